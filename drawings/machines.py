"""Draws the share of the machine's reading speed that decoding reaches, by the length of the cache.

python drawings/machines.py

The figures are those of docs/benchmarks.json, which `python benchmarks/suite.py --docs` wrote.
"""

import json
from pathlib import Path
from typing import Any

from common import BLUE, INK, LARGE, WIDTH, program, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MEASURED = Path(__file__).parents[1] / "docs" / "benchmarks.json"
HIGH = 3.4  # inches
HEADS = (32, 8)  # query heads, key heads
LINES = (("regard", BLUE), ("sdpa, packed queries", INK), ("sdpa", INK))  # rows of the suite


def series(results: list[dict[str, Any]], dtype: str, row: str) -> tuple[list[int], list[float]]:
    """Numbers of keys, and the shares of the limit of reading them once."""
    found = sorted(
        (each["keys"], each["rows"][row]["of_limit"])
        for each in results
        if each["kind"] == "decode" and (each["heads"], each["kv_heads"]) == HEADS
        and each["dtype"] == dtype and row in each["rows"]
    )  # fmt: skip
    return [keys for keys, _ in found], [share for _, share in found]


def panel(axes: Axes, results: list[dict[str, Any]], dtype: str) -> None:
    for row, colour in LINES:
        keys, shares = series(results, dtype, row)
        axes.plot(keys, shares, "o-", color=colour, lw=2.4 if row == "regard" else 1.4, ms=5)
        axes.text(keys[-1], shares[-1] + 0.05, row, color=colour, ha="right", fontsize=LARGE)
    axes.set_xscale("log", base=2)
    axes.set_xticks(keys, [f"{each >> 10}K" for each in keys], fontsize=LARGE)
    axes.minorticks_off()
    axes.set_ylim(0, 1.3)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"], fontsize=LARGE)
    axes.grid(axis="y")
    axes.set_title(dtype, fontsize=LARGE, weight="bold", loc="left")
    axes.set_xlabel("keys in the cache", fontsize=LARGE)


def draw(folder: Path) -> list[Path]:
    results = json.loads(MEASURED.read_text())["results"]
    figure = Figure(figsize=(WIDTH, HIGH))
    left, right = figure.subplots(1, 2, sharey=True)
    panel(left, results, "float32")
    panel(right, results, "bfloat16")
    figure.subplots_adjust(left=0.1, right=0.99, top=0.9, bottom=0.17, wspace=0.08)
    return [save(figure, folder, "machines")]


if __name__ == "__main__":
    program(draw)
