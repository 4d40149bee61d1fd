"""Measure a machine's rates, each by the operation it stands for in the backends' estimates."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from regard.bench.timing import COLD, Store, interleave
from regard.ops.backends import fused
from regard.ops.backends.common import NO_BFLOAT16
from regard.ops.quick_rates import (
    FEW,
    Rate,
    elements,
    products,
    scores,
    tiny_operators,
    without_products,
)
from regard.ops.speed import DEFAULT, Speed

ROUNDS = 15
BUSY = 3.0  # ratio of quartiles above which other programs disturb the measurement


@dataclass(frozen=True)
class Tuning:
    """Measured rates of a machine, and how far they varied.

    Attributes:
        speed: the rates, for estimates of backends.
        spread: the ratio of the upper to the lower quartile of each.

    Examples:
        >>> from regard.bench import Tuning
        >>> from regard.ops.speed import DEFAULT
        >>> Tuning(DEFAULT, {"call": 9.0}).objection()
        'this machine is busy: call varied 9.0-fold'
    """

    speed: Speed
    spread: dict[str, float]

    def objection(self) -> str | None:
        """Why these rates should not be saved, in a sentence; None if they should."""
        name = max(self.spread, key=self.spread.__getitem__)
        if self.spread[name] > BUSY:
            return f"this machine is busy: {name} varied {self.spread[name]:.1f}-fold"
        return self.speed.objection()


def measure_speed(*, rounds: int = ROUNDS, size: float = 1.0) -> Tuning:
    """This machine's rates: medians of rounds in which each is measured once.

    A rate that is not measured is the default one, scaled as the rate of matrix products is.

    Args:
        rounds: times that each rate is measured.
        size: below 1, operations are smaller and rates less exact.

    Examples:
        >>> from regard.bench import measure_speed
        >>> measure_speed(rounds=1, size=0.01).speed.products > 0
        True
    """
    with torch.no_grad():
        made = {name: make(size) for name, make in MEASURED.items()}
        rates = {name: rate for name, rate in made.items() if rate is not None}
        times = interleave({name: rate.run for name, rate in rates.items()}, rounds=rounds)
    found = {name: rates[name].of(statistics.median(times[name])) for name in rates}
    spread = {}
    for name, seconds in times.items():
        ordered = sorted(seconds)
        spread[name] = ordered[3 * len(ordered) // 4] / ordered[len(ordered) // 4]
    found["scores"] = without_products(found["scores"], found["products"])
    faster = found["products"] / DEFAULT.products
    for rate in fields(Speed):
        found.setdefault(rate.name, getattr(DEFAULT, rate.name) * faster)
    return Tuning(Speed(**found), spread)


def _call(size: float) -> Rate:
    return tiny_operators(1)


def _products(size: float) -> Rate:
    side = max(16, int(1024 * size))
    return products(torch.randn(side * side), side)


def _elements(size: float) -> Rate:
    return elements(torch.ones(max(1 << 11, int((1 << 25) * size))))


def _row(dtype: torch.dtype, size: float, queries: int = 1) -> Rate:
    """A few queries per head through torch's kernel, over keys in no cache of the processor."""
    heads, keys, dim = 8, max(16, int(2048 * size)), 128
    store = Store(dtype, total=max(1 << 20, int(COLD * size)))
    q = store(1, heads, queries, dim)

    def run() -> None:
        F.scaled_dot_product_attention(q, store(1, heads, keys, dim), store(1, heads, keys, dim))

    return Rate(run, 2.0 * heads * keys * dim)


def _products_half(size: float) -> Rate:
    side = max(16, int(1024 * size))
    return products(torch.randn(side * side).bfloat16(), side)


def _scores(size: float) -> Rate:
    side = max(16, int(512 * size))
    return scores(torch.randn(2 * 4 * 16 * side), side)


def _stream(size: float) -> Rate:
    """One query per head through `fused`, over keys in no cache of the processor."""
    from regard.ops.kernels.launching import decode

    heads, keys, dim = 8, max(16, int(4096 * size)), 128
    store = Store(total=max(1 << 20, int(COLD * size)))
    q = store(1, heads, 1, dim)

    def run() -> None:
        decode(q, store(1, heads, keys, dim), store(1, heads, keys, dim), scale=0.1)

    return Rate(run, 4 * 2.0 * heads * keys * dim)


def _fused(size: float) -> Rate:
    """As many query rows through `fused` as an absorbed latent has."""
    from regard.ops.kernels.launching import decode

    rows, keys, rank, rotary = 64, max(16, int(4096 * size)), 512, 64
    q, k = torch.randn(1, 1, rows, rank + rotary), torch.randn(1, 1, keys, rank + rotary)
    return Rate(
        lambda: decode(q, k, scale=0.1, width=rank), 2.0 * rows * keys * (2 * rank + rotary)
    )


def _tiled(size: float) -> Rate | None:
    """A prefill through `tiled`; None where this machine cannot run it."""
    from regard.ops.kernels.launching_prefill import prefill, products

    if products() is None:
        return None
    heads, length, dim = 4, max(32, int(1024 * size)), 256  # wide: products take most of the time
    q = torch.randn(1, heads, length, dim, dtype=torch.float32).bfloat16()
    starts = torch.zeros(1, length, dtype=torch.int32)

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
