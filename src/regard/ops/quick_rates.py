"""The rates of this machine taken in a fifth of a second, where none are stored.

Each is the best of some runs of the operation that it stands for. `regard tune` takes longer and
measures the compiled kernel, too; here its rates follow from those of torch's kernel and from the
width of a vector.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.backends.common import NO_BFLOAT16
from regard.ops.speed import DEFAULT, Speed, vector_lanes
from regard.tracing import without_autocast

CPU = torch.device("cpu")
PART = 1 << 23  # float32 numbers, 32 MiB: a round uses four such parts, more than most processors'
# caches hold, so that each is read from memory again
LIMIT = 0.08  # seconds after which no further round begins, once there are two
LONG = 0.03  # seconds of a run, after the first, that is not repeated
LEAST, MOST = 2, 6  # rounds after the first, which may prepare libraries, and is not counted
CALLS = 80  # of the tiny operators a round: after the large ones the first find cold caches
UNSTEADY = 2.0  # ratio of median and minimum above which other programs disturb the measurement
STREAM = 4.6  # bytes that `fused` reads while torch's kernel reads an element: 1.15 times as fast
TILED = 1.0  # times as fast as a product of large matrices: those of `tiled`, with AMX
NARROW = 16  # head dim at which scores take longer than products
FEW = 4  # queries: several, whose products take little time beside reading keys
LANE = 8e9  # floating-point operations a second of `fused` for a lane of a vector and a thread


@dataclass(frozen=True)
class Rate:
    """One rate: what is run, and how many units one run does.

    With `inverse` the rate is seconds per unit, not units per second.
    """

    run: Callable[[], Any]
    amount: float
    inverse: bool = False

    def of(self, seconds: float) -> float:
        return seconds / self.amount if self.inverse else self.amount / seconds


def quick_speed() -> tuple[Speed, bool]:
    """The rates, and whether they were steady enough to be stored; the defaults if they cannot be
    those of a machine. No state of torch changes it or is changed: no mode, no random number."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), without_autocast(CPU):
        try:
            rates = _rates(torch.ones(4 * PART, dtype=torch.float32, device=CPU))
            times = _rounds(rates)
        except RuntimeError:  # no memory
            return DEFAULT, False
    found = {name: rates[name].of(min(times[name])) for name in rates}
    found["stream"] = STREAM * found["row_float"]
    found["fused"] = LANE * vector_lanes() * torch.get_num_threads()
    if "scores" in found:
        found["scores"] = without_products(found["scores"], found["products"])
    if "products_half" in found:
        found["tiled"] = TILED * found["products_half"]
    faster = found["row_float"] / DEFAULT.row_float
    for rate in fields(Speed):
        found.setdefault(rate.name, getattr(DEFAULT, rate.name) * faster)
    speed = Speed(**found)
    if speed.objection() is not None:
        return DEFAULT, False
    return speed, all(statistics.median(each) < UNSTEADY * min(each) for each in times.values())


def _rounds(rates: dict[str, Rate]) -> dict[str, list[float]]:
    """Seconds of each run that counts, in rounds that run each once."""
    times: dict[str, list[float]] = {name: [] for name in rates}
    begun = time.perf_counter()
    for turn in range(1 + MOST):
        if turn > LEAST and time.perf_counter() - begun > LIMIT:
            break
        for name, rate in rates.items():
            if turn < 2 or times[name][1] < LONG:
                start = time.perf_counter()
                rate.run()
                times[name].append(time.perf_counter() - start)
    return {name: each[1:] for name, each in times.items()}


def _rates(x: Tensor) -> dict[str, Rate]:
    """What is run for each rate, on four parts of the numbers `x`."""
    rates = {
        "call": tiny_operators(CALLS),
        "products": products(x, 512),
        "elements": elements(x[: 2 * PART]),
        "row_float": attention(x[2 * PART : 3 * PART], queries=1, keys=1 << 12),
        "scores": scores(x, 1 << 9),
    }
    if not NO_BFLOAT16:
        one, several = x[3 * PART :].view(torch.bfloat16).chunk(2)  # alternately 0 and 1
        rates["row_half"] = attention(one, queries=1, keys=1 << 12)
        few = attention(several, queries=FEW, keys=1 << 12)
        rates["rows_half"] = Rate(few.run, few.amount / FEW)
        rates["products_half"] = products(one, 512)
    return rates


def tiny_operators(times: int) -> Rate:
    """The operators of a decode step, on tiny tensors."""
    x = torch.ones(2, 4, 8, dtype=torch.float32, device="cpu")

    def run() -> None:
        for _ in range(times):
            y = torch.bmm(x, x.mT) * 0.5
            torch.bmm(y.softmax(-1), x).unflatten(0, (1, 2)).transpose(1, 2).contiguous()

    return Rate(run, 7.0 * times, inverse=True)


def products(x: Tensor, side: int) -> Rate:
    """A product of two square matrices."""
    a = x[: side * side].view(side, side)
    return Rate(lambda: a @ a, 2.0 * side**3)


def scores(x: Tensor, side: int) -> Rate:
    """Scores of so many queries and keys, in four narrow heads."""
    narrow = attention(x, queries=side, keys=side, heads=4, dim=NARROW)
    return Rate(narrow.run, narrow.amount / (2 * NARROW))


def without_products(rate: float, products: float) -> float:
    """Scores a second of `scores`, whose products take at most half of the time."""
    return 1 / max(1 / rate - 4 * NARROW / products, 0.5 / rate)


def elements(x: Tensor) -> Rate:
    """Elements that are read from memory and written to it."""
    source, target = x.chunk(2)
    return Rate(lambda: torch.mul(source, 1.0, out=target), float(source.numel()))


def attention(x: Tensor, *, queries: int, keys: int, heads: int = 8, dim: int = 128) -> Rate:
    """torch's kernel, once over the keys and values of each head."""
    count = heads * keys * dim
    k, v = (part.view(1, heads, keys, dim) for part in x[: 2 * count].chunk(2))
    q = k[:, :, :queries]
    return Rate(lambda: F.scaled_dot_product_attention(q, k, v), 2.0 * count * queries)
