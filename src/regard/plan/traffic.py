"""Bytes that a layer of attention reads and writes at least, on one rank.

Counted are, each once: the parameters, the hidden states in and out, and the cache as it is stored,
read and written. What a kernel may leave in registers and caches of the processor is not counted:
queries, scores, keys computed from latents, outputs of the heads.
"""

from regard.plan.cache_bytes import bytes_in_pages, token_bytes
from regard.plan.flops import visible_keys
from regard.plan.formula import Formula, number
from regard.plan.pages import coded_keys, coded_tokens
from regard.plan.shapes import STORAGES, LayerShape, Storage
from regard.plan.sizes import BATCH, CONTEXT, HIDDEN, ITEMSIZE, TOKENS
from regard.plan.weights import check_known, parameters


def prefill_bytes(layer: LayerShape, storage: Storage) -> Formula:
    """Bytes moved by the prefill of `context` tokens.

    Keys and values of all tokens are written once and read once, as the cache stores them, also
    where a window drops them later. A layer with `keys_of` only reads them. In pages they are read
    in the dtype's own bits.

    Args:
        layer: of any kind but linear attention.
        storage: of its cache.

    Raises:
        ValueError: for linear attention.
    """
    if not storage.page_size:
        token = _token(layer, storage)
        return _moved(layer, TOKENS, read=CONTEXT * token, written=TOKENS * token)
    read = CONTEXT * _token(layer, STORAGES["plain"])
    written = bytes_in_pages(layer, storage, TOKENS, coded_tokens(TOKENS))
    return _moved(layer, TOKENS, read=read, written=written)


def decode_bytes(layer: LayerShape, storage: Storage) -> Formula:
    """Bytes moved by one more token after `context` tokens.

    The visible keys and values are read, those of the new token too; the latter are also written.
    Sealing a page, once in `page_size` tokens, is left out.

    Args:
        layer: of any kind but linear attention.
        storage: of its cache.

    Raises:
        ValueError: for linear attention.

    Examples:
        >>> from regard.plan.cost import decode_bytes, sizes
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> mqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=1, head_dim=8, v_head_dim=8)
        >>> count = decode_bytes(mqa, STORAGES["plain"])
        >>> weights, hidden, keys = 64 * (64 + 8 + 8 + 64), 2 * 64, (100 + 1) * (8 + 8)
        >>> sizes_of_step = sizes(mqa, STORAGES["plain"], context=99)
        >>> count.evaluate(**sizes_of_step) == 4 * (weights + hidden + keys)
        True
    """
    keys = visible_keys(layer)
    if not storage.page_size:
        token = _token(layer, storage)
        return _moved(layer, number(1), read=keys * token, written=token)
    written = _token(layer, STORAGES["plain"])
    read = bytes_in_pages(layer, storage, keys, coded_keys(keys))
    return _moved(layer, number(1), read=read, written=written)


def _token(layer: LayerShape, storage: Storage) -> Formula:
    check_known(layer)
    return token_bytes(layer, storage)


def _moved(layer: LayerShape, tokens: Formula, *, read: Formula, written: Formula) -> Formula:
    """Parameters, hidden states of the tokens, and the cache's bytes of each row."""
    cached = read if layer.keys_of is not None else read + written
    moved = parameters(layer) * ITEMSIZE + 2 * BATCH * tokens * HIDDEN * ITEMSIZE
    return moved + BATCH * cached
