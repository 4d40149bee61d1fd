"""How long torch's CPU kernel for attention takes, for estimates.

It computes the queries in blocks. The first block of a head reads its keys from memory, later ones
from a cache. In half precision keys are converted or packed for the processor's products as they
are read: for every block of few queries, once for many.
"""

from regard.ops.call import Call, is_everything
from regard.ops.rates import SPEED

_SIDES = (
    (768, 256),
    (192, 64),
    (0, 32),
)  # from so many queries on, so many in a block (torch 2.13)
_KEYS = 512  # keys in a block
_PACKED = 64  # queries from which on keys are packed once
_L2 = 1 << 20  # bytes of one key head that stay in a core's cache for the next query head or block
_PASSES = 6  # over the elements of a mask, while it is made
_HALF_PRODUCTS = 0.5  # of an operator: starting the two half-precision products of a block
_PRODUCTS = 0.25  # the same in float32


def kernel_seconds(
    call: Call, *, heads: int, kv_heads: int, queries: int, share: float = 1.0
) -> float:
    """Seconds of the kernel, without starting it.

    Args:
        call: gives the keys, their widths and their dtype.
        heads: query heads, of the whole batch.
        kv_heads: key heads, of the whole batch; the query heads of each read it one after another.
        queries: of a head.
        share: of the scores that is computed.
    """
    half = call.dtype.itemsize < 4
    side = next(side for least, side in _SIDES if queries >= least)
    blocks = -(-queries // side)
    seconds = heads * queries * call.num_keys * per_score(call)
    first, converted, cached = _reads(call, queries)
    elements = call.num_keys * 2 * max(call.head_dim, call.v_head_dim)
    packed = half and queries >= _PACKED
    later = cached if packed else converted
    passes = kv_heads * first + (heads - kv_heads) * converted + heads * (blocks - 1) * later
    seconds += elements * passes
    if queries > 1 and not packed:
        operators = heads * blocks * -(-call.num_keys // _KEYS)
        seconds += (_HALF_PRODUCTS if half else _PRODUCTS) * SPEED.call * operators
    return share * seconds


def mask_seconds(call: Call) -> float:
    """Seconds to make a mask as a tensor, and to copy it for the query heads of each key head."""
    if is_everything(call.mask):
        return 0.0
    cells = call.num_queries * call.num_keys
    return (_PASSES + call.num_heads) * cells / SPEED.elements


def per_score(call: Call) -> float:
    """Seconds for one score: its products with a query and a value, and its softmax."""
    rate = SPEED.products_half if call.dtype.itemsize < 4 else SPEED.products
    return 4 * max(call.head_dim, call.v_head_dim) / rate + 1 / SPEED.scores


def _reads(call: Call, queries: int) -> tuple[float, float, float]:
    """Seconds for an element of the keys: from memory; from a cache, converted; packed there."""
    width, itemsize = 2 * max(call.head_dim, call.v_head_dim), call.dtype.itemsize
    part = 1 / 6 if call.num_keys * width * itemsize <= _L2 else 1 / 2
    memory = 1 / SPEED.row_float
    cached = part * memory * min(1.0, itemsize / 4)
    if itemsize >= 4:
        return memory, cached, cached
    first = 1 / (SPEED.row_half if queries == 1 else SPEED.rows_half)
    # what a first read takes beyond reading the bytes is the conversion, which is done again
    return first, max(part * first, first - memory / 2.5), cached
