"""A short benchmark: a few shapes on this machine, regard and each of its backends against torch.

shape -> entries that compute the same -> interleave -> ratios, and the share of the machine's limit
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.bench.timing import COLD, Store, Variants, interleave, product_rate, read_bandwidth
from regard.masks import Causal, Span
from regard.ops.attend import attend, prepare
from regard.ops.backends import BACKENDS
from regard.ops.call import Call
from regard.ops.choose import objection_of
from regard.turns import Ratio, ratio_of
from regard.words import counted

TORCH = "torch sdpa"
ROUNDS = 15  # in each of which every entry runs once
SLOW = 20.0  # backends whose estimate is this many times the best one are not measured
LARGEST = 8 << 30  # bytes of one tensor of a call, which has three and an output
SECONDS = 2.0  # for each shape, after which no further round begins

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Shape:
    """The shape of one causal call, whose queries are the last of the keys' tokens.

    Attributes:
        name: what it stands for.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: size of a head.
        queries: number of queries.
        keys: number of keys.
        batch: rows.

    Examples:
        >>> import torch
        >>> from regard.bench import Shape
        >>> shape = Shape("decode", heads=32, kv_heads=8, head_dim=128, queries=1, keys=4096)
        >>> shape.nbytes(torch.float16), shape.flops  # read once, and computed
        (16777216, 67108864)
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    keys: int
    batch: int = 1

    @property
    def span(self) -> Span:
        """The slots of the queries and keys."""
        return Span(self.keys - self.queries, self.keys, 0, self.keys)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values, each read once."""
        return 2 * self.batch * self.kv_heads * self.keys * self.head_dim * dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of two products over the visible cells."""
        earlier = self.keys - self.queries  # keys that every query sees
        cells = self.queries * earlier + self.queries * (self.queries + 1) // 2
        return 4 * self.batch * self.heads * self.head_dim * cells


@dataclass(frozen=True)
class Entry:
    """The time of one way to compute a shape, relative to torch's SDPA; below 1 is faster.

    Attributes:
        name: the backend.
        milliseconds: the median time of a call.
        ratio: the median of the ratios to torch's time within rounds.
        low: their lower quartile.
        high: their upper quartile.
        of_limit: the least time that the machine allows, over the median time.
        pairs: the number of rounds.
    """

    name: str
    milliseconds: float
    ratio: float
    low: float
    high: float
    of_limit: float
    pairs: int

    @property
    def differs(self) -> bool:
        """Whether a difference from torch's time was measured."""
        return Ratio(self.ratio, self.low, self.high, self.pairs).differs


@dataclass(frozen=True)
class Measured:
    """The measurements of one shape.

    Attributes:
        shape: the call.
        dtype: of its tensors.
        chosen: the backend that regard chose.
        limit: what bounds the time, `"reads"` of memory or `"products"`.
        limit_milliseconds: the least time that this allows.
        entries: the times, torch's first.
        absent: the backends that were not measured, and why.
    """

    shape: Shape
    dtype: str
    chosen: str
    limit: str
    limit_milliseconds: float
    entries: list[Entry]
    absent: dict[str, str]


@dataclass(frozen=True)
class Bench:
    """All shapes, and the limits of this machine, measured in the same run.

    Attributes:
        torch: torch's version.
        threads: threads of torch.
        dtype: of all tensors.
        read_bandwidth: bytes per second that the machine reads from memory.
        product_rate: floating-point operations per second of a large matrix product.
        shapes: the measurements.
    """

    torch: str
    threads: int
    dtype: str
    read_bandwidth: float
    product_rate: float
    shapes: list[Measured] = field(default_factory=list)


def shapes(heads: int, kv_heads: int, head_dim: int, keys: int) -> list[Shape]:
    """Decoding at three lengths, one batch, a few queries at once, and two prefills."""

    def shape(name: str, queries: int, keys: int, batch: int = 1) -> Shape:
        return Shape(name, heads, kv_heads, head_dim, queries, keys, batch)

    few, some, most = max(1, keys // 4), max(1, keys // 8), min(8, keys)
    found = [
        shape(f"decode, {counted(few, 'key')}", 1, few),
        shape(f"decode, {counted(keys, 'key')}", 1, keys),
        shape(f"decode, {counted(few, 'key')}, batch of 4", 1, few, batch=4),
        shape(f"{counted(most, 'query', 'queries')}, {counted(keys, 'key')}", most, keys),
        shape(f"prefill, {counted(some, 'token')}", some, some),
        shape(f"prefill, {counted(few, 'token')}", few, few),
    ]
    return list(dict.fromkeys(found))  # with very few keys, some are equal


def bench(
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    keys: int = 4096,
    dtype: torch.dtype = torch.float32,
    rounds: int = ROUNDS,
    cold: int = COLD,
    progress: Progress = lambda what, done, total: None,
) -> Bench:
    """Measure regard and each of its backends against torch on this machine.

    Args:
        heads: query heads.
        kv_heads: key/value heads, a divisor of `heads`.
        head_dim: size of a head.
        keys: the most keys of a call.
        dtype: of all tensors.
        rounds: rounds in which every way to compute a shape runs once.
        cold: bytes of memory that keys are spread over, so that no cache of the processor holds
            them.
        progress: called with the present shape, the steps done and their number.

    Raises:
        ValueError: if a size is below 1, `kv_heads` does not divide `heads`, or a tensor has more
            than 8 GiB.

    Examples:
        >>> from regard.bench import bench
        >>> measured = bench(heads=2, kv_heads=1, head_dim=16, keys=8, rounds=1, cold=1 << 16)
        >>> [each.shape.name for each in measured.shapes][:2]
        ['decode, 2 keys', 'decode, 8 keys']
        >>> measured.shapes[0].entries[0].name
        'torch sdpa'
    """
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "keys": keys}
    if min(sizes.values()) < 1 or heads % kv_heads:
        raise ValueError(f"each of {sizes} is at least 1, and kv_heads divides heads")
    most = max(kv_heads * keys, heads * keys // 4) * head_dim * dtype.itemsize
    if most > LARGEST:
        raise ValueError(
            f"a tensor of {sizes} has {most:,} bytes, at most {LARGEST:,} are measured"
        )
    wanted = shapes(**sizes)
    progress("the limits of this machine", 0, len(wanted) + 1)
    with torch.no_grad():
        result = Bench(
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            dtype=str(dtype).removeprefix("torch."),
            read_bandwidth=read_bandwidth(max(1, cold >> 20)),
            product_rate=product_rate(dtype, 2048 if cold >= COLD else 128),
        )
        store = Store(dtype, cold)
        for done, shape in enumerate(wanted):
            progress(shape.name, done + 1, len(wanted) + 1)
            result.shapes.append(_measured(shape, dtype, store, rounds, result))
    return result


def _measured(
    shape: Shape, dtype: torch.dtype, store: Store, rounds: int, machine: Bench
) -> Measured:
    variants, chosen, absent = _variants(shape, store)
    times = interleave(variants, rounds=rounds, limit=SECONDS)
    least = {
        "reads": shape.nbytes(dtype) / machine.read_bandwidth,
        "products": shape.flops / machine.product_rate,
    }
    limit = max(least, key=least.__getitem__)
    entries = []
    for name, seconds in times.items():
        to, middle = ratio_of(seconds, times[TORCH]), statistics.median(seconds)
        of_limit = least[limit] / middle
        entries.append(Entry(name, 1e3 * middle, to.value, to.low, to.high, of_limit, to.pairs))
    return Measured(shape, machine.dtype, chosen, limit, 1e3 * least[limit], entries, absent)


def _variants(shape: Shape, store: Store) -> tuple[Variants, str, dict[str, str]]:
    """The functions to time: torch's kernel, the chosen backend and others; the name of the chosen
    backend; and the reasons of absent ones."""
    key_shape = (shape.batch, shape.kv_heads, shape.keys, shape.head_dim)
    q = store(shape.batch, shape.heads, shape.queries, shape.head_dim)
    k, v = store(*key_shape), store(*key_shape)

    def through(backend: str) -> Callable[[], Tensor]:
        def run() -> Tensor:
            k, v = store(*key_shape), store(*key_shape)
            return attend(q, k, v, mask=Causal(), span=shape.span, backend=backend)

        return run

    prepared = prepare(q, k, v, mask=Causal(), span=shape.span)
    absent = _absent(prepared.call)
    variants: Variants = {TORCH: _torch(shape, q, store, key_shape)}
    variants[f"regard: {prepared.name}"] = through("auto")
    for name in BACKENDS:
        if name != prepared.name and name not in absent:
            variants[f"backend {name}"] = through(name)
    return variants, prepared.name, absent


def _absent(call: Call) -> dict[str, str]:
    """The reasons why backends are not measured: their objections, or their estimated times."""
    found = {name: objection_of(call, name) for name in BACKENDS}
    found["flex"] = "flex is for GPUs: on a CPU it stores all scores, and is traced first"
    able = {name: BACKENDS[name].estimate(call) for name, why in found.items() if why is None}
    best = min(able.values())
    for name, seconds in able.items():
        if seconds > SLOW * best:
            times = f"about {seconds / best:,.0f} times as long as the fastest backend"
            found[name] = f"{name} would take {times}"
    return {name: why for name, why in found.items() if why is not None}


def _torch(
    shape: Shape, q: Tensor, store: Store, key_shape: tuple[int, ...]
) -> Callable[[], Tensor]:
    """Torch's kernel with the flags of its manual; a dense mask is made before timing."""
    flags: dict[str, Any] = {"enable_gqa": shape.heads != shape.kv_heads}
    if shape.queries == shape.keys:
        flags["is_causal"] = True
    elif shape.queries > 1:
        flags["attn_mask"] = Causal().dense(shape.span)

    def run() -> Tensor:
        return F.scaled_dot_product_attention(q, store(*key_shape), store(*key_shape), **flags)

    return run
