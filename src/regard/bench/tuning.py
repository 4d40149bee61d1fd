"""Measure a machine's rates, each by the operation it stands for in the backends' estimates."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from regard.bench.load import Load, Watch
from regard.bench.timing import COLD, Store, interleave
from regard.ops.backends import fused
from regard.ops.backends.common import NO_BFLOAT16
from regard.rates import Speed, typical
from regard.tracing import without_autocast

ROUNDS = 15
APART = 1.5  # ratio of quartiles above which something else disturbs the measurement
LATER = 1.25  # ratio of the medians of the first and the second half of the rounds, likewise
NARROW = 16  # head dim at which scores take longer than products
# What calls of attention reach of a rate measured alone: the constants of `AVX2` and `AVX512` over
# the rates of the EPYC that they were fitted on.
REACHED = {
    "call": 2.5, "products": 0.7, "elements": 0.77, "row_float": 0.9, "row_half": 0.75,
    "rows_half": 1.33, "products_half": 0.68, "scores": 1.4, "stream": 0.9, "fused": 0.75,
    "tiled": 0.79,
}  # fmt: skip
FEW = 4  # queries: several, whose products take little time beside reading keys
FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


@dataclass(frozen=True)
class Tuning:
    """Measured rates of a machine, and how far they varied.

    Attributes:
        speed: the rates, for estimates of backends.
        spread: the ratio of the upper to the lower quartile of each.
        drift: the ratio of each median in the second half of the rounds to that in the first.
        load: what other programs took of the processors meanwhile.

    Examples:
        >>> from regard.bench import Tuning
        >>> from regard.bench.load import Load
        >>> from regard.rates import DEFAULT
        >>> Tuning(DEFAULT, {"call": 9.0}, {"call": 1.0}, Load(0.0, 0.0)).objection()
        'this machine is busy: the quartiles of call are 9.0-fold apart'
    """

    speed: Speed
    spread: dict[str, float]
    drift: dict[str, float]
    load: Load

    def objection(self) -> str | None:
        """Why these rates should not be saved, in a sentence; None if they should."""
        threads = torch.get_num_threads()
        apart = max(self.spread, key=self.spread.__getitem__)
        fold = {name: max(ratio, 1 / ratio) for name, ratio in self.drift.items()}
        later = max(fold, key=fold.__getitem__)
        found = self.load.objection(threads)
        if found is None and self.spread[apart] > APART:
            found = f"the quartiles of {apart} are {self.spread[apart]:.1f}-fold apart"
        if found is None and fold[later] > LATER:
            found = f"the median of {later} changed {fold[later]:.1f}-fold meanwhile"
        if found is not None:
            return f"this machine is busy: {found}"
        return self.speed.objection(typical(threads))


@dataclass(frozen=True)
class Rate:
    """One rate: a function to time, and the units of work that one call does.

    With `inverse` the rate is seconds per unit, not units per second.
    """

    run: Callable[[], Any]
    amount: float
    inverse: bool = False

    def of(self, seconds: float) -> float:
        return seconds / self.amount if self.inverse else self.amount / seconds


def measure_speed(*, rounds: int = ROUNDS, size: float = 1.0) -> Tuning:
    """This machine's rates: medians of rounds in which each is measured once.

    A rate that is not measured is the usual one of such a processor, scaled as the rate of matrix
    products is.

    Args:
        rounds: times that each rate is measured.
        size: below 1, operations are smaller and rates less exact.

    Examples:
        >>> from regard.bench import measure_speed
        >>> measure_speed(rounds=1, size=0.01).speed.products > 0
        True
    """
    with torch.no_grad(), without_autocast(FLOAT["device"]):
        made = {name: make(size) for name, make in MEASURED.items()}
        rates = {name: rate for name, rate in made.items() if rate is not None}
        for rate in rates.values():  # some compile, on other threads
            rate.run()
        watch = Watch()
        times = interleave({name: rate.run for name, rate in rates.items()}, rounds=rounds)
        load = watch.load()
    found = {name: rates[name].of(statistics.median(times[name])) for name in rates}
    found["scores"] = _without_products(found["scores"], found["products"])
    found = {name: REACHED[name] * rate for name, rate in found.items()}
    usual = asdict(typical(torch.get_num_threads()))
    faster = found["products"] / usual["products"]
    speed = Speed(**{name: found.get(name, usual[name] * faster) for name in usual})
    spread = {name: _apart(seconds) for name, seconds in times.items()}
    return Tuning(speed, spread, {name: _drift(each) for name, each in times.items()}, load)


def _apart(seconds: list[float]) -> float:
    """The ratio of the upper quartile to the lower."""
    ordered = sorted(seconds)
    return ordered[3 * len(ordered) // 4] / ordered[len(ordered) // 4]


def _drift(seconds: list[float]) -> float:
    """The ratio of the median of the second half to that of the first."""
    half = -(-len(seconds) // 2)
    return statistics.median(seconds[-half:]) / statistics.median(seconds[:half])


def _without_products(rate: float, products: float) -> float:
    """Scores a second of `scores`, whose products take at most half of the time."""
    return 1 / max(1 / rate - 4 * NARROW / products, 0.5 / rate)


def _call(size: float) -> Rate:
    """The operators of a decode step, on tiny tensors."""
    x = torch.ones(2, 4, 8, **FLOAT)

    def run() -> None:
        y = torch.bmm(x, x.mT) * 0.5
        torch.bmm(y.softmax(-1), x).unflatten(0, (1, 2)).transpose(1, 2).contiguous()

    return Rate(run, 7.0, inverse=True)


def _products(size: float) -> Rate:
    """A product of two square matrices."""
    side = max(16, int(1024 * size))
    a = torch.randn(side, side, **FLOAT)
    return Rate(lambda: a @ a, 2.0 * side**3)


def _products_half(size: float) -> Rate:
    """Products of wide heads in torch's kernel, which need not be as fast as those of matrices."""
    side = max(16, int(512 * size))
    q, k, v = torch.randn(3, 1, 4, side, 256, **FLOAT).bfloat16()
    return Rate(lambda: F.scaled_dot_product_attention(q, k, v), 4.0 * 4 * 256 * side**2)


def _elements(size: float) -> Rate:
    """Elements that are read from memory and written to it."""
    source, target = torch.ones(2, max(1 << 10, int((1 << 24) * size)), **FLOAT)
    return Rate(lambda: torch.mul(source, 1.0, out=target), float(source.numel()))


def _over_cold_keys(
    run: Callable[..., object], keys: int, size: float, dtype: torch.dtype, queries: int = 1
) -> Rate:
    """A few queries in each of eight heads, over keys and values in no cache of the processor.

    `run` takes queries, keys and values.
    """
    heads, keys, dim = 8, max(16, int(keys * size)), 128
    store = Store(dtype, total=max(1 << 20, int(COLD * size)))
    q = store(1, heads, queries, dim)
    return Rate(
        lambda: run(q, store(1, heads, keys, dim), store(1, heads, keys, dim)),
        2.0 * heads * keys * dim,
    )


def _row(dtype: torch.dtype, size: float, queries: int = 1) -> Rate:
    """A few queries per head through torch's kernel."""
    return _over_cold_keys(F.scaled_dot_product_attention, 2048, size, dtype, queries)


def _scores(size: float) -> Rate:
    """Scores of as many queries as keys, in four narrow heads."""
    side = max(16, int(512 * size))
    q, k, v = torch.randn(3, 1, 4, side, NARROW, **FLOAT)
    return Rate(lambda: F.scaled_dot_product_attention(q, k, v), 4.0 * side**2)


def _stream(size: float) -> Rate:
    """Bytes a second that `fused` reads with one query for each key head."""
    from regard.ops.kernels.launching import decode

    rate = _over_cold_keys(partial(decode, scale=0.1), 4096, size, torch.float32)
    return Rate(rate.run, rate.amount * FLOAT["dtype"].itemsize)


def _fused(size: float) -> Rate:
    """As many query rows through `fused` as an absorbed latent has."""
    from regard.ops.kernels.launching import decode

    rows, keys, rank, rotary = 64, max(16, int(4096 * size)), 512, 64
    q = torch.randn(1, 1, rows, rank + rotary, **FLOAT)
    k = torch.randn(1, 1, keys, rank + rotary, **FLOAT)
    return Rate(
        lambda: decode(q, k, scale=0.1, width=rank), 2.0 * rows * keys * (2 * rank + rotary)
    )


def _tiled(size: float) -> Rate | None:
    """A prefill through `tiled`; None where this machine cannot run it."""
    from regard.ops.kernels.launching_prefill import prefill, products

    if products() is None:
        return None
    heads, length, dim = 4, max(32, int(1024 * size)), 256  # wide: products take most of the time
    q = torch.randn(1, heads, length, dim, **FLOAT).bfloat16()
    starts = torch.zeros(1, length, dtype=torch.int32, device="cpu")

    def run() -> None:
        prefill(q, q, q, scale=0.1, starts=starts, stops=starts + length)

    return Rate(run, 4.0 * heads * length**2 * dim)


MEASURED: dict[str, Callable[[float], Rate | None]] = {
    "call": _call,
    "products": _products,
    "elements": _elements,
    "row_float": lambda size: _row(torch.float32, size),
    "scores": _scores,
}
if not NO_BFLOAT16:
    MEASURED |= {
        "row_half": lambda size: _row(torch.bfloat16, size),
        "rows_half": lambda size: _row(torch.bfloat16, size, FEW),
        "products_half": _products_half,
    }
if fused.is_installed():
    MEASURED |= {"stream": _stream, "fused": _fused, "tiled": _tiled}
