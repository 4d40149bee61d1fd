"""Bytes of a layer's cache: those that tokens need, and those that regard's caches allocate.

Of one layer of any kind, on one rank, in all rows of the batch. Each function takes the layer, the
storage of its cache, and the workload whose tokens, rows, dtype and ranks count.
"""

from regard.plan.shapes import STORAGES, LayerShape, Storage, Workload, ceil_div

POSITION = 4  # bytes of the int32 position that is cached beside a latent or beside tied values
SCALE_AND_ZERO = 4  # bytes for a group of channels: QuantizedCache stores two bfloat16 numbers
FIRST_CAPACITY = 256  # tokens of the first buffers of KVCache and SlidingCache


def token_bytes(layer: LayerShape, storage: Storage, work: Workload) -> int:
    """Bytes of one token of one row in the cache that a layer reads; of pages, in one of codes.
    Raises a ValueError for linear attention, which stores no tokens."""
    if layer.kind == "linear":
        raise ValueError("linear attention stores a state and no tokens; use cache_bytes")
    return _tokens_bytes(layer, storage, work, 1)


def _tokens_bytes(layer: LayerShape, storage: Storage, work: Workload, tokens: int) -> int:
    """Bytes of so many tokens of one row, all in codes if the storage has any."""
    if layer.kind == "MLA":
        return _keys(layer.latent + layer.qk_rope_head_dim, storage, work, tokens)
    if layer.kind == "LatentKV":
        return _keys(layer.latent, storage, work, tokens) + tokens * POSITION
    if layer.tied_channels is not None:
        positions = tokens * POSITION * layer.keys_by_position
        joined = _keys(layer.v_head_dim + layer.tied_channels, storage, work, tokens)
        return work.key_heads(layer) * joined + positions
    keys = _keys(layer.head_dim, storage, work, tokens)
    values = tokens * _stored(layer.v_head_dim, storage.value_bits, storage.group, work)
    return work.key_heads(layer) * (keys + values)


def _keys(width: int, storage: Storage, work: Workload, tokens: int) -> int:
    """Bytes of the keys or latents of so many tokens and one head."""
    if not storage.shares_scales:
        return tokens * _stored(width, storage.key_bits, storage.group, work)
    codes = tokens * _stored(width, storage.key_bits, 0, work)
    return codes + SCALE_AND_ZERO * width * tokens // storage.page_size


def _stored(width: int, bits: int | None, group: int, work: Workload) -> int:
    """Bytes of the channels of one head and token: numbers, or codes with their scales and zeros.

    The last byte of codes of fewer than 8 bits may have room left, and the last group of channels
    may be smaller.
    """
    if bits is None:
        return width * work.itemsize
    codes = ceil_div(width * bits, 8)
    if bits == 6:  # four bits of two channels in a byte, and two bits of four
        codes = ceil_div(width, 2) + ceil_div(width, 4)
    return codes + SCALE_AND_ZERO * ceil_div(width, group) if group else codes


def cache_bytes(layer: LayerShape, storage: Storage, work: Workload) -> int:
    """Bytes of the tokens that are needed: those held, or those of a window or a chunk if fewer.

    Of a window as many as its size, the newest token's own counted; of a chunk a whole one, which
    is the most that is needed at a time. A layer with `keys_of` caches nothing. The state of linear
    attention does not depend on the context, and is on every rank.

    Examples:
        >>> from regard.plan.cache_bytes import cache_bytes
        >>> from regard.plan.shapes import STORAGES, LayerShape, Workload
        >>> mla = LayerShape(hidden_size=5120, num_heads=128, num_kv_heads=128, head_dim=192,
        ...     v_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64)
        >>> cache_bytes(mla, STORAGES["plain"], Workload(context=1, dtype="bfloat16"))
        1152
    """
    if layer.keys_of is not None:
        return 0
    if layer.kind == "linear":
        return work.batch * layer.state_elements * work.itemsize
    needed = _needed(layer, work)
    coded = coded_tokens(storage, work, needed)
    return work.batch * stored_bytes(layer, storage, work, needed, coded)


def _needed(layer: LayerShape, work: Workload) -> int:
    tokens = layer.within_window(work.tokens)
    return tokens if layer.chunk is None else min(tokens, layer.chunk)


def stored_bytes(
    layer: LayerShape, storage: Storage, work: Workload, tokens: int, coded: int
) -> int:
    """Bytes of so many tokens of one row, `coded` of which are codes if the storage has any."""
    whole = token_bytes(layer, STORAGES["plain"], work)
    if not storage.bits:
        return tokens * whole
    return (tokens - coded) * whole + _tokens_bytes(layer, storage, work, coded)


def coded_tokens(storage: Storage, work: Workload, needed: int) -> int:
    """How many of the `needed` latest of all tokens are codes: those in full pages after the first,
    or all in a cache without pages."""
    return _coded(storage, work, needed, work.tokens)


def coded_keys(storage: Storage, work: Workload, visible: int) -> int:
    """How many of the `visible` latest keys of the next token, its own included, are codes."""
    return _coded(storage, work, visible, work.tokens + 1)


def _coded(storage: Storage, work: Workload, tokens: int, stop: int) -> int:
    """How many of the `tokens` before slot `stop` are codes.

    A row's first page stays in the dtype's own bits, and so does its last one until it is full.
    """
    page, start = storage.page_size, stop - tokens
    return max(0, page * (work.tokens // page) - max(page, start)) if page else tokens


def pages(layer: LayerShape, page: int, work: Workload) -> tuple[int, int]:
    """Pages of one row in the dtype's own bits and pages of codes, after the prefill and one token.

    A page has `page` tokens. Pages that lie wholly before a window are released.
    """
    tokens = work.tokens + 1
    released = 0 if layer.window is None else max(0, tokens + 1 - layer.window) // page
    coded = max(0, tokens // page - max(1, released))
    return ceil_div(tokens, page) - released - coded, coded


def allocated_bytes(layer: LayerShape, storage: Storage, work: Workload) -> int:
    """Bytes of the buffers of regard's cache, after a prefill of the context and one decoded token.

    Those of a window are in a `SlidingCache`, whose buffers have room for 256 tokens at first, for
    twice a longer context, and for 1.25 windows at most; others are in a `KVCache`, whose buffers
    have room for 256 tokens at first and double when they are full. Buffers of codes grow alike.
    Of a `PagedCache`, its pages: the pool may hold more of them, which are free.

    Raises:
        ValueError: if no cache of regard stores keys and values like this.
    """
    if layer.keys_of is not None or layer.kind == "linear":
        return cache_bytes(layer, storage, work)
    _check_quantized(storage)
    if storage.page_size:
        plain, coded = (
            storage.page_size * count for count in pages(layer, storage.page_size, work)
        )
        return work.batch * stored_bytes(layer, storage, work, plain + coded, coded)
    tokens = _growing(work.tokens)
    if layer.window is not None:
        tokens = _sliding(layer.window, work.tokens)
    return work.batch * tokens * token_bytes(layer, storage, work)


def _growing(tokens: int) -> int:
    """Tokens of the buffers of `KVCache`: 256, until a token does not fit into the buffers of the
    prefill, which are then doubled."""
    return FIRST_CAPACITY if tokens < FIRST_CAPACITY else 2 * tokens


def _sliding(window: int, tokens: int) -> int:
    """Tokens of the buffers of `SlidingCache`: 256 or twice the context, up to the window and a
    quarter of it, rounded down."""
    return min(window + window // 4, max(FIRST_CAPACITY, 2 * tokens))


def block_bytes(layer: LayerShape, storage: Storage, work: Workload, block: int) -> int:
    """Bytes of whole blocks of `block` tokens, as serving engines reserve them.

    Of a window, the blocks that it can touch while decoding; of chunks, those of one chunk.
    A ValueError is raised for pages.
    """
    if storage.page_size:
        raise ValueError(
            f"pages of {storage.page_size} tokens are blocks of their own; give block or page_size"
        )
    if layer.keys_of is not None or layer.kind == "linear":
        return cache_bytes(layer, storage, work)
    blocks = ceil_div(work.tokens, block)
    if layer.window is not None:
        blocks = min(blocks, ceil_div(layer.window - 1, block) + 1)
    if layer.chunk is not None:
        blocks = min(blocks, ceil_div(layer.chunk, block))
    return work.batch * block * blocks * token_bytes(layer, storage, work)


def _check_quantized(storage: Storage) -> None:
    known = storage.bits == () or (
        len(storage.bits) == 2
        and set(storage.bits) <= {8, 6, 4}
        and storage.group >= 1
        and storage.group % 2 == 0
    )
    if not known or storage.page_size < 0:
        raise ValueError(
            "keys and values of regard's caches are plain, or codes of 8, 6 or 4 bits each, an "
            f"even number of channels to a scale; got {storage}; choose from STORAGES"
        )
