"""Timing that survives a noisy machine: variants take turns, keys are cold, ratios are medians.

Every round runs each variant once, forwards then backwards, so that a slow neighbour or a drifting
clock hits all of them alike; what is reported is the median of the ratios within rounds.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

THREADS = int(os.environ.get("THREADS", "2"))
torch.set_num_threads(THREADS)
LAST_LEVEL_CACHE = 64 << 20  # bytes; buffers together are larger, so that keys come from memory


class Cold:
    """Buffers taken in turn, together larger than the last-level cache: as in a deep model."""

    def __init__(self, make: Callable[[], Any], nbytes: int, total: int = 4 * LAST_LEVEL_CACHE):
        self.buffers = [make() for _ in range(max(2, -(-total // nbytes)))]
        self.turn = 0

    def __call__(self) -> Any:
        self.turn = (self.turn + 1) % len(self.buffers)
        return self.buffers[self.turn]


def interleave(
    variants: dict[str, Callable[[], Any]], *, rounds: int = 15, sample: float = 0.01
) -> dict[str, list[float]]:
    """Seconds a call, by round: each sample repeats a variant for about `sample` seconds."""
    repeats = {}
    for name, run in variants.items():
        run()
        start = time.perf_counter()
        run()
        repeats[name] = max(1, int(sample / max(time.perf_counter() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        for name in list(variants) if turn % 2 == 0 else list(variants)[::-1]:
            start = time.perf_counter()
            for _ in range(repeats[name]):
                variants[name]()
            times[name].append((time.perf_counter() - start) / repeats[name])
    return times


def summary(times: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Of each variant: median milliseconds, and median and quartiles of its ratio to `base`."""
    rows = {}
    for name, seconds in times.items():
        ratios = sorted(a / b for a, b in zip(seconds, times[base], strict=True))
        rows[name] = {
            "ms": 1e3 * statistics.median(seconds),
            "ratio": statistics.median(ratios),
            "low": ratios[len(ratios) // 4],
            "high": ratios[3 * len(ratios) // 4],
        }
    return rows


def read_bandwidth(mib: int = 512) -> float:
    """Bytes a second this machine reads from memory: the limit of every decode step."""
    x = torch.ones((mib << 20) // 4)
    times = interleave({"sum": x.sum, "dot": lambda: torch.dot(x, x)}, rounds=5, sample=0)
    return x.numel() * 4 / min(statistics.median(t) for t in times.values())


def product_rate(dtype: torch.dtype = torch.float32, size: int = 2048) -> float:
    """Floating-point operations a second in a large matrix product: the limit of every prefill."""
    a = torch.randn(size, size).to(dtype)
    times = interleave({"mm": lambda: a @ a}, rounds=5, sample=0)
    return 2 * size**3 / statistics.median(times["mm"])


def card(title: str, rows: dict[str, dict[str, float]], base: str) -> None:
    """Print a table for people."""
    print(f"\n{title}\n{'':2}{'':<36}{'ms':>10}{'ratio':>9}   quartiles   (ratio to {base})")
    for name, row in rows.items():
        spread = f"[{row['low']:.2f}, {row['high']:.2f}]"
        print(f"  {name:<36}{row['ms']:>10.3f}{row['ratio']:>9.3f}   {spread}")


def finish(name: str, results: list[dict[str, Any]]) -> None:
    """Print one JSON line, the last."""
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps({"benchmark": name, "machine": machine, "results": results}))
