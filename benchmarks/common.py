"""Shared by the scripts: the number of threads, a printed table, one line of JSON."""

import json
import os
import platform
from typing import Any

import torch

from regard.bench.timing import (
    LAST_LEVEL_CACHE,
    Cold,
    Store,
    interleave,
    product_rate,
    quartiles,
    read_bandwidth,
    summary,
)

__all__ = [
    "LAST_LEVEL_CACHE",
    "THREADS",
    "Cold",
    "Store",
    "card",
    "finish",
    "interleave",
    "machine",
    "product_rate",
    "quartiles",
    "read_bandwidth",
    "summary",
]

THREADS = int(os.environ.get("THREADS", "2"))
torch.set_num_threads(THREADS)


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
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def finish(name: str, results: list[dict[str, Any]]) -> None:
    """Print the last line, in JSON."""
    print(json.dumps({"benchmark": name, "machine": machine(), "results": results}))
