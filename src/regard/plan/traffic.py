"""Bytes that a layer of attention reads and writes at least, on one rank.

Counted are, each once: the parameters, the hidden states in and out, and the cache as it is stored,
read and written. What a kernel may leave in registers and caches of the processor is not counted:
queries, scores, keys computed from latents, outputs of the heads.
"""

from regard.plan.cache_bytes import token_bytes
from regard.plan.flops import visible_keys
from regard.plan.formula import Formula, number
from regard.plan.shapes import LayerShape, Storage
from regard.plan.sizes import BATCH, CONTEXT, HIDDEN, ITEMSIZE, TOKENS
from regard.plan.weights import check_known, parameters


def prefill_bytes(layer: LayerShape, storage: Storage) -> Formula:
    """Bytes moved by the prefill of `context` tokens.

    Keys and values of all tokens are written once and read once, as the cache stores them, also
    where a window drops them later. A layer with `keys_of` only reads them.

    Args:
        layer: of any kind but linear attention.
        storage: of its cache.

    Raises:
        ValueError: for linear attention.
    """
    return _moved(layer, storage, tokens=TOKENS, keys=CONTEXT)


def decode_bytes(layer: LayerShape, storage: Storage) -> Formula:
    """Bytes moved by one more token after `context` tokens.

    The visible keys and values are read, those of the new token too; the latter are also written.

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
    return _moved(layer, storage, tokens=number(1), keys=visible_keys(layer))


def _moved(layer: LayerShape, storage: Storage, *, tokens: Formula, keys: Formula) -> Formula:
    check_known(layer)
    written = keys if layer.keys_of is not None else keys + tokens
    moved = parameters(layer) * ITEMSIZE + 2 * BATCH * tokens * HIDDEN * ITEMSIZE
    return moved + BATCH * written * token_bytes(layer, storage)
