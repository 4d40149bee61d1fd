"""Shared by the scripts: the number of threads, the peers there are, a printed table, JSON."""

import json
import os
import platform
import statistics
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from regard.bench.timing import (
    COLD,
    LAST_LEVEL_CACHE,
    Store,
    interleave,
    product_rate,
    read_bandwidth,
)
from regard.rates import processor_name
from regard.turns import ratio_of

__all__ = [
    "LAST_LEVEL_CACHE",
    "PEERS",
    "THREADS",
    "Cold",
    "Store",
    "card",
    "finish",
    "installed",
    "interleave",
    "introduce",
    "machine",
    "product_rate",
    "quartiles",
    "read_bandwidth",
    "summary",
]

THREADS = int(os.environ.get("THREADS", "2"))
torch.set_num_threads(THREADS)
MOST_BUFFERS = 512  # of small sizes, which other data push out of the cache anyway
PEERS = ("transformers", "x-transformers", "onnx", "onnxruntime", "openvino")  # distributions


class Cold:
    """Buffers used in turn, together larger than the last-level cache: all are read from memory."""

    def __init__(self, make: Callable[[], Any], nbytes: int, total: int = COLD) -> None:
        wanted = -(-total // max(nbytes, 1))
        self.buffers = [make() for _ in range(max(2, min(wanted, MOST_BUFFERS)))]
        self.turn = 0

    def __call__(self) -> Any:
        self.turn = (self.turn + 1) % len(self.buffers)
        return self.buffers[self.turn]


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


def processor() -> dict[str, str]:
    """The model of this machine's processor, as its system names it, and torch's vector width.

    Examples:
        >>> sorted(processor())
        ['processor', 'vectors']
    """
    return {"processor": processor_name(), "vectors": torch.backends.cpu.get_cpu_capability()}


def installed(*modules: str) -> bool:
    """Whether a peer can be imported."""
    return all(find_spec(name) is not None for name in modules)


def versions(*names: str) -> dict[str, str | None]:
    """The versions of distributions, None where one is absent."""
    return {
        name: metadata.version(name) if installed(name.replace("-", "_")) else None
        for name in names
    }


def introduce(*names: str) -> None:
    """Say on what machine this runs, the versions of peers, and which are not installed."""
    found = versions(*names)
    there = [f"{name} {version}" for name, version in found.items() if version is not None]
    here = ", ".join([*processor().values(), f"{THREADS} threads"])
    print(f"{here}; torch {torch.__version__}, {', '.join(there)}")
    absent = [name for name, version in found.items() if version is None]
    if absent:
        how = "python -m pip install -r benchmarks/requirements.txt"
        print(f"without {', '.join(absent)}: not installed ({how})")


def card(title: str, rows: dict[str, dict[str, float]], base: str) -> None:
    """Print a table."""
    print(f"\n{title}\n{'':2}{'':<36}{'ms':>10}{'ratio':>9}   quartiles   (ratio to {base})")
    for name, row in rows.items():
        spread = f"[{row['low']:.2f}, {row['high']:.2f}]"
        print(f"  {name:<36}{row['ms']:>10.3f}{row['ratio']:>9.3f}   {spread}")


def machine() -> dict[str, Any]:
    """The machine of the measurements."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        **processor(),
        "threads": torch.get_num_threads(),
        "packages": versions("numba", *PEERS, "xllamacpp"),
    }


def finish(name: str, results: list[dict[str, Any]]) -> None:
    """Print the last line, in JSON."""
    print(json.dumps({"benchmark": name, "machine": machine(), "results": results}))
