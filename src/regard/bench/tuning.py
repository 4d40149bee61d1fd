"""Measure a machine's rates, each by the operation it stands for in the backends' estimates.

several passes -> the pattern of each: rates over the usual ones -> their medians -> drawn half way
and more towards the usual pattern, since an operation measured alone tells only a part
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
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

PASSES = 5  # each with new tensors in new memory
ROUNDS = 7  # of each pass
VARIED = 0.2  # log of the factor by which a rate of a machine usually differs from its class
TOLD = 0.2  # log of the error that a rate measured alone has for calls of attention
APART = 1.5  # ratio of quartiles above which something else disturbs the measurement
LATER = 1.5  # ratio of the medians of the first and the second half of the rounds, likewise
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
        spread: the ratio of the upper to the lower quartile of each over the passes, beside the
            pace of all rates.
        drift: the ratio of each median in the second half of the rounds to that in the first.
        load: what other programs took of the processors meanwhile.
        pace: how many times as fast as usual the machine is, by the median of its rates.

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
    pace: float = 1.0

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


def measure_speed(*, passes: int = PASSES, rounds: int = ROUNDS, size: float = 1.0) -> Tuning:
    """This machine's rates: the usual ones of such a processor, moved towards measured ones.

    All rates move by the machine's pace, the median of measured over usual rates. Beyond it a rate
    moves half way to its measured value, or less if that differed between passes: an operation
    measured alone tells only in part how long it takes in calls of attention. A rate that is not
    measured moves by the pace alone.

    Args:
        passes: passes over all rates, each with new tensors.
        rounds: times that each rate is measured in a pass.
        size: below 1, operations are smaller and rates less exact.

    Examples:
        >>> from regard.bench import measure_speed
        >>> measure_speed(passes=1, rounds=1, size=0.01).speed.products > 0
        True
    """
    usual = typical(torch.get_num_threads())
    with torch.no_grad(), without_autocast(FLOAT["device"]):
        for rate in _rates(size).values():  # some compile, on other threads
            rate.run()
        watch = Watch()
        measured = [_measure_pass(size, rounds) for _ in range(passes)]
        load = watch.load()
    speed, spread, pace = _combine([_faster(each, usual) for each in measured], usual)
    every = {name: [x for each in measured for x in each[name]] for name in measured[0]}
    drift = {name: _drift(each) for name, each in every.items()}
    return Tuning(speed, spread, drift, load, pace)


def _rates(size: float) -> dict[str, "Rate"]:
    """The rates that this machine can measure."""
    made = {name: make(size) for name, make in MEASURED.items()}
    return {name: rate for name, rate in made.items() if rate is not None}


def _measure_pass(size: float, rounds: int) -> dict[str, list[float]]:
    """Each rate in each round, as it is measured alone."""
    rates = _rates(size)
    times = interleave({name: rate.run for name, rate in rates.items()}, rounds=rounds)
    return {name: [rates[name].of(each) for each in seconds] for name, seconds in times.items()}


def _faster(measured: dict[str, list[float]], usual: Speed) -> dict[str, float]:
    """The logarithm of how many times as fast as usual each rate is."""
    rates = {name: statistics.median(each) for name, each in measured.items()}
    rates["scores"] = _without_products(rates["scores"], rates["products"])
    logs = {name: math.log(REACHED[name] * rates[name] / getattr(usual, name)) for name in rates}
    return {**logs, "call": -logs["call"]}  # seconds: the other rates are per second


def _combine(passes: list[dict[str, float]], usual: Speed) -> tuple[Speed, dict[str, float], float]:
    """The rates, the ratio of the quartiles of each over the passes, and the pace."""
    paces = [statistics.median(each.values()) for each in passes]
    moved, spread = {}, {}
    for name in passes[0]:
        beside = [each[name] - its_pace for each, its_pace in zip(passes, paces, strict=True)]
        doubt = TOLD**2 + (statistics.variance(beside) if len(beside) > 1 else 0.0)
        moved[name] = math.exp(statistics.median(beside) * VARIED**2 / (VARIED**2 + doubt))
        spread[name] = _apart([math.exp(each) for each in beside])
    pace = math.exp(statistics.median(paces))
    return usual.faster(pace).faster(1.0, **moved), spread, pace


def _apart(values: list[float]) -> float:
    """The ratio of the upper quartile to the lower."""
    ordered = sorted(values)
    return ordered[3 * len(ordered) // 4] / ordered[len(ordered) // 4]


def _drift(values: list[float]) -> float:
    """The ratio of the median of the second half to that of the first."""
    half = -(-len(values) // 2)
    return statistics.median(values[-half:]) / statistics.median(values[:half])


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
