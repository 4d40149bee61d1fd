"""Timing on machines with other load: variants interleave, keys are cold, ratios are medians.

Every round runs each variant once, in the opposite order of the round before, so that other load
and a drifting clock change all of them alike; reported is the median of the ratios within rounds.
"""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.turns import in_turns

LAST_LEVEL_CACHE = 64 << 20  # bytes, of large processors
COLD = 4 * LAST_LEVEL_CACHE  # bytes of all buffers, so that keys are read from memory

Variants = dict[str, Callable[[], Any]]


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


def read_bandwidth(mib: int = 512) -> float:
    """Bytes per second that this machine reads from memory: the limit of every decode step."""
    x = torch.ones((mib << 20) // 4)
    times = interleave({"sum": x.sum, "dot": lambda: torch.dot(x, x)}, rounds=5, sample=0.0)
    return x.numel() * 4 / min(statistics.median(t) for t in times.values())


def product_rate(dtype: torch.dtype = torch.float32, size: int = 2048) -> float:
    """Floating-point operations per second of a large matrix product: the limit of prefill."""
    a = torch.randn(size, size).to(dtype)
    times = interleave({"mm": lambda: a @ a}, rounds=5, sample=0.0)
    return 2 * size**3 / statistics.median(times["mm"])
