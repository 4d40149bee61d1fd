"""Bytes of a layer's cache: those that tokens need, and those that regard's caches allocate.

Of one layer, on one rank, in all rows of the batch.
"""

from regard.plan.formula import Formula, ceil_div, floor_div, maximum, minimum, number, size
from regard.plan.pages import PAGE, coded_tokens, pages
from regard.plan.shapes import STORAGES, LayerShape, Storage
from regard.plan.sizes import (
    BATCH,
    BLOCK,
    CHUNK,
    HEAD,
    ITEMSIZE,
    KEY_HEADS,
    LATENT,
    ROTARY,
    TOKENS,
    VALUE,
    WINDOW,
    within_window,
)

POSITION = 4  # bytes of the int32 position that LatentKVAttention caches beside a latent
SCALE_AND_ZERO = 4  # bytes for a group of channels: QuantizedCache stores two bfloat16 numbers
FIRST_CAPACITY = 256  # tokens of the first buffers of KVCache and SlidingCache


def token_bytes(layer: LayerShape, storage: Storage) -> Formula:
    """Bytes of one token of one row in the cache that a layer reads; of pages, in one of codes.

    Args:
        layer: with keys and values, or with a latent.
        storage: of the cache.

    Raises:
        ValueError: for linear attention, which stores no tokens.

    Examples:
        >>> from regard.plan.cache_bytes import token_bytes
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> gqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
        >>> token_bytes(gqa, STORAGES["plain"])
        ceil(num_kv_heads / tp) x (head_dim x itemsize + v_head_dim x itemsize)
    """
    if layer.kind == "linear":
        raise ValueError("linear attention stores a state and no tokens; use cache_bytes")
    return _tokens_bytes(layer, storage, number(1))


def _tokens_bytes(layer: LayerShape, storage: Storage, tokens: Formula) -> Formula:
    """Bytes of so many tokens of one row, all in codes if the storage has any."""
    if layer.kind == "MLA":
        return _keys(LATENT + ROTARY, storage, tokens)
    if layer.kind == "LatentKV":
        return _keys(LATENT, storage, tokens) + tokens * POSITION
    keys = _keys(HEAD, storage, tokens)
    values = tokens * _stored(VALUE, "value_bits", storage.value_bits, storage.group)
    return KEY_HEADS * (keys + values)


def _keys(width: Formula, storage: Storage, tokens: Formula) -> Formula:
    """Bytes of the keys or latents of so many tokens and one head."""
    if not storage.shares_scales:
        return tokens * _stored(width, "key_bits", storage.key_bits, storage.group)
    codes = tokens * _stored(width, "key_bits", storage.key_bits, 0)
    return codes + floor_div(SCALE_AND_ZERO * width * tokens, PAGE)


def cache_bytes(layer: LayerShape, storage: Storage) -> Formula:
    """Bytes of the tokens that are needed: those held, or those of a window or a chunk if fewer.

    Of a window as many as its size, the newest token's own counted; of a chunk a whole one, which
    is the most that is needed at a time. A layer with `keys_of` caches nothing. The state of linear
    attention does not depend on the context, and is on every rank.

    Args:
        layer: of any kind.
        storage: of its cache.

    Examples:
        >>> from regard.plan.cost import cache_bytes, sizes
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> mla = LayerShape(hidden_size=5120, num_heads=128, num_kv_heads=128, head_dim=192,
        ...     v_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64)
        >>> formula = cache_bytes(mla, STORAGES["plain"])
        >>> formula.evaluate(**sizes(mla, STORAGES["plain"], context=1, dtype="bfloat16"))
        1152
    """
    if layer.keys_of is not None:
        return number(0)
    if layer.kind == "linear":
        return BATCH * size("state_elements") * ITEMSIZE
    needed = _needed(layer)
    if not storage.page_size:
        return BATCH * needed * token_bytes(layer, storage)
    return BATCH * bytes_in_pages(layer, storage, needed, coded_tokens(needed))


def bytes_in_pages(layer: LayerShape, storage: Storage, tokens: Formula, coded: Formula) -> Formula:
    """Bytes of so many tokens of one row, `coded` of which are codes if the storage has any.

    Args:
        layer: with keys and values, or with a latent.
        storage: of its pages.
        tokens: all of them.
        coded: those in full pages after the first, as `coded_tokens`.
    """
    whole = token_bytes(layer, STORAGES["plain"])
    if not storage.bits:
        return tokens * whole
    return (tokens - coded) * whole + _tokens_bytes(layer, storage, coded)


def allocated_bytes(layer: LayerShape, storage: Storage) -> Formula:
    """Bytes of the buffers of regard's cache, after a prefill of the context and one decoded token.

    Those of a window are in a `SlidingCache`, whose buffers have room for 256 tokens at first, for
    twice a longer context, and for 1.25 windows at most; others are in a `KVCache`, whose buffers
    have room for 256 tokens at first and double when they are full. Buffers of codes grow alike.
    Of a `PagedCache`, its pages: the pool may hold more of them, which are free.

    Args:
        layer: of any kind.
        storage: of its cache.

    Raises:
        ValueError: if no cache of regard stores keys and values like this.

    Examples:
        >>> from regard.plan.cost import allocated_bytes, sizes
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> mqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=1, head_dim=8, v_head_dim=8)
        >>> formula = allocated_bytes(mqa, STORAGES["plain"])
        >>> [formula.evaluate(**sizes(mqa, STORAGES["plain"], context=n)) for n in (255, 256)]
        [16384, 32768]
    """
    if layer.keys_of is not None or layer.kind == "linear":
        return cache_bytes(layer, storage)
    _check_quantized(storage)
    if storage.page_size:
        plain, coded = (PAGE * each for each in pages(layer))
        return BATCH * bytes_in_pages(layer, storage, plain + coded, coded)
    tokens = _growing() if layer.window is None else _sliding()
    return BATCH * tokens * token_bytes(layer, storage)


def block_bytes(layer: LayerShape, storage: Storage) -> Formula:
    """Bytes of whole blocks of `block` tokens, as serving engines reserve them.

    Of a window, the blocks that it can touch while decoding; of chunks, those of one chunk.

    Args:
        layer: of any kind.
        storage: of its cache.

    Raises:
        ValueError: if the storage is in pages, which are blocks of their own size.

    Examples:
        >>> from regard.plan.cost import block_bytes, sizes
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> mqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=1, head_dim=8, v_head_dim=8)
        >>> numbers = sizes(mqa, STORAGES["plain"], context=17, dtype="bfloat16", block=16)
        >>> block_bytes(mqa, STORAGES["plain"]).evaluate(**numbers)
        1024
    """
    if storage.page_size:
        raise ValueError(
            f"pages of {storage.page_size} tokens are blocks of their own; give block or page_size"
        )
    if layer.keys_of is not None or layer.kind == "linear":
        return cache_bytes(layer, storage)
    blocks = ceil_div(TOKENS, BLOCK)
    if layer.window is not None:
        blocks = minimum(blocks, ceil_div(WINDOW - 1, BLOCK) + 1)
    if layer.chunk is not None:
        blocks = minimum(blocks, ceil_div(CHUNK, BLOCK))
    return BATCH * BLOCK * blocks * token_bytes(layer, storage)


def static_bytes(layer: LayerShape, storage: Storage) -> Formula:
    """Bytes of the buffers of a `StaticCache` for `capacity` tokens.

    Args:
        layer: of any kind.
        storage: of its cache, which is plain.

    Raises:
        ValueError: if the storage is not plain.
    """
    if storage.bits or storage.page_size:
        raise ValueError(
            f"StaticCache stores no codes and has no pages, got {storage}; use STORAGES['plain']"
        )
    if layer.keys_of is not None or layer.kind == "linear":
        return cache_bytes(layer, storage)
    return BATCH * size("capacity") * token_bytes(layer, storage)


def _stored(width: Formula, name: str, bits: int | None, group: int) -> Formula:
    """Bytes of the channels of one head and token: numbers, or codes with their scales and zeros.

    The last byte of codes of fewer than 8 bits may have room left, and the last group of channels
    may be smaller.
    """
    if bits is None:
        return width * ITEMSIZE
    codes = ceil_div(width * size(name), 8)
    if bits == 6:  # four bits of two channels in a byte, and two bits of four
        codes = ceil_div(width, 2) + ceil_div(width, 4)
    return codes + SCALE_AND_ZERO * ceil_div(width, size("group")) if group else codes


def _needed(layer: LayerShape) -> Formula:
    tokens = within_window(layer, TOKENS)
    return tokens if layer.chunk is None else minimum(tokens, CHUNK)


def _growing() -> Formula:
    """Tokens of the buffers of `KVCache`: 256, until a token does not fit into the buffers of the
    prefill, which are then doubled. The last term is above the doubled context from 256 tokens on.
    """
    doubled = minimum(2 * TOKENS, 2 * FIRST_CAPACITY * (TOKENS - (FIRST_CAPACITY - 1)))
    return maximum(FIRST_CAPACITY, doubled)


def _sliding() -> Formula:
    """Tokens of the buffers of `SlidingCache`: 256 or twice the context, up to the window and a
    quarter of it, rounded down."""
    return minimum(WINDOW + ceil_div(WINDOW - 3, 4), maximum(FIRST_CAPACITY, 2 * TOKENS))


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
