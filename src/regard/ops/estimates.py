"""How long a call takes, for estimates: in torch's CPU kernel for attention, and on a GPU.

The CPU kernel computes the queries in blocks. The first block of a head reads its keys from memory,
later ones from a cache. In half precision keys are converted or packed for the processor's products
as they are read: for every block of few queries, once for many.

On a GPU, kernels reach the shares of a device's rates that they reached on an H100
(`benchmarks/gpu.py`). Only the order of the estimates matters.
"""

import torch

from regard.devices import UNKNOWN, rates_of
from regard.masks import Nothing, Span
from regard.ops.call import Call, is_everything, narrowed
from regard.rates import SPEED

_SIDES = (768, 256), (192, 64), (0, 32)  # from so many queries on, so many a block (torch 2.13)
_KEYS = 512  # keys in a block
_PACKED = 64  # queries from which on keys are packed once
_L2 = 1 << 20  # bytes of one key head that stay in a core's cache for the next query head or block
_MASK_PASSES = 6  # over the elements of a mask, while it is made
_HALF_PRODUCTS = 0.5  # of an operator: starting the two half-precision products of a block
_PRODUCTS = 0.25  # the same in float32
_HALF_ROW = 0.08  # the same of a single query, beyond the operators of its head

LAUNCH = 5e-6  # seconds to start an operator, which decoding steps outside of CUDA graphs wait for
READ = 0.8  # share of the memory's rate that long reads reach
FLASH = 0.55  # share of the rate of products: cuDNN and FlashAttention 3 on an H100
DIRECT = 0.35  # FlashAttention 2, which torch calls directly, on an H100
EFFICIENT = 0.3  # torch's kernel for dense masks and float32
GENERATED = 0.4  # kernels that Triton compiles, FlexAttention's among them, on an H100
LATENTS = 0.2  # the kernel for latents, on an H100
UNFUSED = 0.6  # plain matrix products of the sizes of one head
_PASSES = 12  # over the scores in `eager`: softcap, bias, mask, softmax, dropout
_SAMPLES = 16  # queries at which the reach of a mask is looked up


def kernel_seconds(
    call: Call, *, heads: int, kv_heads: int, queries: int, share: float = 1.0
) -> float:
    """Seconds of the kernel, without starting it. A thread computes one block of queries of one
    head at a time, so that fewer blocks than threads leave threads idle.

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
    if queries == 1:
        seconds += _HALF_ROW * half * SPEED.call * heads
    elif not packed:
        operators = heads * blocks * -(-call.num_keys // _KEYS)
        seconds += (_HALF_PRODUCTS if half else _PRODUCTS) * SPEED.call * operators
    idle = SPEED.threads / max(1, min(SPEED.threads, heads * blocks))
    return idle * share * seconds


def mask_seconds(call: Call) -> float:
    """Seconds to make a mask as a tensor, and to copy it for the query heads of each key head."""
    if is_everything(call.mask):
        return 0.0
    cells = call.num_queries * call.num_keys
    return (_MASK_PASSES + call.num_heads) * cells / SPEED.elements


def per_score(call: Call) -> float:
    """Seconds for one score: its products with a query and a value, and its softmax."""
    rate = SPEED.products_half if call.dtype.itemsize < 4 else SPEED.products
    return 4 * max(call.head_dim, call.v_head_dim) / rate + 1 / SPEED.scores


def _reads(call: Call, queries: int) -> tuple[float, float, float]:
    """Seconds to read an element of the keys: from memory, or from a cache, converted or packed."""
    width, itemsize = 2 * max(call.head_dim, call.v_head_dim), call.dtype.itemsize
    part = 1 / 6 if call.num_keys * width * itemsize <= _L2 else 1 / 2
    memory = 1 / SPEED.row_float
    cached = part * memory * min(1.0, itemsize / 4)
    if itemsize >= 4:
        return memory, cached, cached
    first = 1 / (SPEED.row_half if queries == 1 else SPEED.rows_half)
    # what a first read takes beyond reading the bytes is the conversion, which is done again
    return first, max(part * first, first - memory / 2.5), cached


def rates_note(device: torch.device) -> str | None:
    """A sentence on the source of the estimates for a device; None for a CPU."""
    if device.type == "cpu":
        return None
    rates = rates_of(device)
    return f"of {rates.name} ({rates.source}); shares of them as on an H100"


def on_device(
    call: Call,
    *,
    operators: int,
    kernel: float,
    single: bool = False,
    share: float = 1.0,
    passes: float | int = 0,
    copies: float | int = 1,
) -> float:
    """Seconds that a call takes on a device that is not a CPU.

    Args:
        operators: operators that are started.
        kernel: share of the rate of products that the kernel reaches.
        single: whether products are computed in float32, whatever the dtype of the queries.
        share: of the scores, those that are computed.
        passes: over these scores in float32, in memory.
        copies: times that as many bytes as those of keys and values are read or written.
    """
    compiling = torch.compiler.is_compiling()  # a compiled graph cannot ask the driver
    rates = UNKNOWN if compiling else rates_of(call.device)
    exact = compiling or torch.get_float32_matmul_precision() == "highest"
    width, heads = call.head_dim + call.v_head_dim, call.batch * call.num_heads
    cells = share * heads * call.num_queries * call.num_keys
    keys = call.batch * call.num_kv_heads * call.num_keys * share
    moved = call.dtype.itemsize * width * (copies * keys + heads * call.num_queries)
    moved += 4 * passes * cells
    rate = rates.single if exact else rates.tf32
    if call.dtype.itemsize < 4 and not single:
        rate = rates.half
    reading, computing = moved / (READ * rates.memory), 2 * cells * width / (kernel * rate)
    return LAUNCH * operators + max(reading, computing)


def unfused(call: Call, *, operators: int) -> float:
    """Seconds of the definition: products in float32, all scores in memory, keys converted to
    float32 and repeated for the heads of a group."""
    converted = 1 if call.dtype.itemsize >= 4 else 5  # bytes moved for each byte of keys: read 2,
    repeated = 2 * call.group if call.group > 1 else 0  # write 4, read 4
    memory = {"passes": _PASSES, "copies": converted + repeated}
    return on_device(call, operators=operators, kernel=UNFUSED, single=True, **memory)


def visible_share(call: Call) -> float:
    """An estimate of the share of scores that a kernel computes if it skips hidden blocks, from the
    reach of the mask for some of the queries. No tensor is read. 1 inside a compiled graph, where
    the reach would become a guard on the lengths."""
    if torch.compiler.is_compiling():
        return 1.0
    span, found = call.span, 0
    samples = min(_SAMPLES, call.num_queries)
    for sample in range(samples):
        query = span.first_query + (2 * sample + 1) * call.num_queries // (2 * samples)
        here = Span(query, query + 1, span.kv_start, span.kv_stop)
        visible = narrowed(here, call.mask)
        found += 0 if isinstance(call.mask.within(here), Nothing) else visible.num_keys
    return max(found, 1) / (samples * call.num_keys)
