"""Shared by the scripts: the number of threads, the peers there are, a printed table, JSON."""

import json
import os
import platform
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from regard.bench.timing import (
    LAST_LEVEL_CACHE,
    Cold,
    Store,
    interleave,
    processor,
    product_rate,
    quartiles,
    read_bandwidth,
    summary,
)

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
PEERS = ("transformers", "x-transformers", "onnx", "onnxruntime", "openvino")  # distributions


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
