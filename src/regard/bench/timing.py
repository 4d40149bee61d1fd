"""Timing on machines with other load: variants interleave, keys are cold, ratios are medians.

Every round runs each variant once, in the opposite order of the round before, so that other load
and a drifting clock change all of them alike; reported is the median of the ratios within rounds.
"""

import math
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.turns import in_turns, ratio_of

LAST_LEVEL_CACHE = 64 << 20  # bytes, of large processors
COLD = 4 * LAST_LEVEL_CACHE  # bytes of all buffers, so that keys are read from memory
_MOST_BUFFERS = 512  # of small sizes, which other data push out of the cache anyway

Variants = dict[str, Callable[[], Any]]


class Cold:
    """Buffers used in turn, together larger than the last-level cache: all are read from memory."""

    def __init__(self, make: Callable[[], Any], nbytes: int, total: int = COLD) -> None:
        wanted = -(-total // max(nbytes, 1))
        self.buffers = [make() for _ in range(max(2, min(wanted, _MOST_BUFFERS)))]
        self.turn = 0

    def __call__(self) -> Any:
        self.turn = (self.turn + 1) % len(self.buffers)
        return self.buffers[self.turn]


class Store:
    """Random tensors, consecutive slices of one long buffer: cold keys without copying.

    Examples:
        >>> Store(total=1 << 12)(2, 3).shape
        torch.Size([2, 3])
    """

    def __init__(self, dtype: torch.dtype = torch.float32, total: int = COLD) -> None:
        block = torch.randn(1 << 18, dtype=torch.float32, device="cpu").to(dtype)  # repeated: slow
        self.numbers = block.repeat(-(-total // (block.numel() * block.itemsize)))
        self.at = 0

    def __call__(self, *shape: int) -> Tensor:
        size = math.prod(shape)
        if size > self.numbers.numel():
            self.numbers = self.numbers.repeat(-(-size // self.numbers.numel()))
        if self.at + size > self.numbers.numel():
            self.at = 0
        cut = self.numbers[self.at : self.at + size].view(shape)
        self.at += -(-size // 64) * 64  # aligned as a new tensor is
        return cut


def interleave(
    variants: Variants,
    *,
    rounds: int = 15,
    sample: float = 0.01,
    limit: float = math.inf,
    rest: float = 0.0,
) -> dict[str, list[float]]:
    """Seconds a call, by round: each sample repeats a variant for about `sample` seconds.

    After `limit` seconds no further round begins, once there are six. Before each sample come
    `rest` seconds in which threads of another library, which spin after a call, fall asleep.
    """

    def sample_of(run: Callable[[], Any], repeats: int) -> float:
        time.sleep(rest)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats

    repeats = {name: _repeats(run, sample) for name, run in variants.items()}
    samples = {name: partial(sample_of, run, repeats[name]) for name, run in variants.items()}
    return in_turns(samples, rounds, limit=limit)


def _repeats(run: Callable[[], Any], sample: float) -> int:
    """Calls that fill a sample. The first call is not timed: it may compile."""
    run()
    start = time.perf_counter()
    run()
    return max(1, int(sample / max(time.perf_counter() - start, 1e-7)))


def quartiles(times: list[float], base: list[float]) -> tuple[float, float, float]:
    """The median, and the lower and upper quartile, of the ratios within rounds; further out, if
    there are few (`regard.turns.ratio_of`).

    Examples:
        >>> quartiles([1.0, 2.0, 30.0], [1.0, 1.0, 10.0])
        (2.0, 1.0, 3.0)
    """
    found = ratio_of(times, base)
    return found.value, found.low, found.high


def summary(times: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """For each variant: median milliseconds, and median and quartiles of its ratio to `base`."""
    rows = {}
    for name, seconds in times.items():
        ratio, low, high = quartiles(seconds, times[base])
        rows[name] = {
            "ms": 1e3 * statistics.median(seconds),
            "ratio": ratio,
            "low": low,
            "high": high,
        }
    return rows


def read_bandwidth(mib: int = 512) -> float:
    """Bytes per second that this machine reads from memory: the limit of every decode step."""
    x = torch.ones((mib << 20) // 4)
    times = interleave({"sum": x.sum, "dot": lambda: torch.dot(x, x)}, rounds=5, sample=0.0)
    return x.numel() * 4 / min(statistics.median(t) for t in times.values())


def processor() -> dict[str, str]:
    """The model of this machine's processor, as its system names it, and torch's vector width.

    Examples:
        >>> sorted(processor())
        ['processor', 'vectors']
    """
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = named[0] if named else platform.processor() or platform.machine()
    return {"processor": model, "vectors": torch.backends.cpu.get_cpu_capability()}


def product_rate(dtype: torch.dtype = torch.float32, size: int = 2048) -> float:
    """Floating-point operations per second of a large matrix product: the limit of prefill."""
    a = torch.randn(size, size).to(dtype)
    times = interleave({"mm": lambda: a @ a}, rounds=5, sample=0.0)
    return 2 * size**3 / statistics.median(times["mm"])
