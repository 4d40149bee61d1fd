"""The table of conversions as a picture: perplexity against the size of the cache.

python benchmarks/conversions.py docs/conversions.json docs/conversions.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

LINES = {
    "latent, ": ("joint latent, rotation exact", "#2a7f62"),
    "latent by layer, ": ("the same, ranks by layer", "#7fb39f"),
    "latent of equal ranks, ": ("the same, equal ranks", "#7fb39f"),
    "DeepSeek's form, portable, ": ("DeepSeek's form, stock checkpoint", "#b07aa1"),
    "DeepSeek's form, ": ("DeepSeek's form, frequencies by layer", "#4269a5"),
    "TransMLA (no training), ": ("TransMLA's rule, no training", "#b9b9b9"),
    "MHA2MLA (no training), ": ("MHA2MLA's rule, no training", "#8a8f98"),
}
POINTS = {
    "int8 cache": "#d0872c",
    "int4 cache": "#d0872c",
    "MQA, aligned": "#c4513a",
    "MQA, mean pooling (GQA paper)": "#8a8f98",
}
LEAST, MOST = 1e-3, 1e2  # range of the axis: relative increase of perplexity


def draw(found: dict[str, Any], path: Path) -> None:
    """Write the picture of a table."""
    figure, axes = plt.subplots(figsize=(9.6, 5.6))
    rows = {row["method"]: row for row in found["results"]}
    for start, (label, colour) in LINES.items():
        _line(axes, [row for name, row in rows.items() if _starts(name, start)], label, colour)
    for name, colour in POINTS.items():
        if name in rows:
            _point(axes, rows[name], name.partition(" (")[0], colour)
    both = [row for name, row in rows.items() if name.endswith("int8 cache") and ", " in name]
    for row in both:
        _point(axes, row, row["method"].replace(", int8 cache", " + int8"), "#d0872c", side="right")
    _dress(axes, found)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _starts(name: str, start: str) -> bool:
    rest = name.removeprefix(start)
    return rest != name and rest.rstrip(" %").isdigit()


def _above(row: dict[str, Any]) -> float:
    return min(max(row["ratio"] - 1, LEAST), MOST)


def _line(axes: Axes, rows: list[dict[str, Any]], label: str, colour: str) -> None:
    if rows:
        rows = sorted(rows, key=lambda row: row["cache"])
        axes.plot(
            [100 * row["cache"] for row in rows],
            [_above(row) for row in rows],
            "o-", color=colour, label=label, lw=1.8, ms=5,
        )  # fmt: skip


def _point(axes: Axes, row: dict[str, Any], name: str, colour: str, side: str = "left") -> None:
    """A point and its name, of which the given side is beside it."""
    x, y = 100 * row["cache"], _above(row)
    axes.plot([x], [y], "D", color=colour, ms=6, zorder=5)
    beside = (-8, -3) if side == "right" else (8, 4) if y < 2 * LEAST else (8, -9)
    axes.annotate(name, (x, y), textcoords="offset points", xytext=beside, fontsize=8, color="#333",
                  ha=side)  # fmt: skip


def _dress(axes: Axes, found: dict[str, Any]) -> None:
    axes.set_yscale("log")
    axes.set_ylim(LEAST / 1.4, MOST * 1.4)
    ticks = [1e-3, 1e-2, 0.05, 0.1, 0.2, 0.5, 1, 4, 10, 100]
    labels = ["≤ +0.1 %", "+1 %", "+5 %", "+10 %", "+20 %", "+50 %", "2x", "5x", "11x", "≥ 100x"]
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.minorticks_off()
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 25), [f"{x} %" for x in range(0, 101, 25)], fontsize=8)
    axes.set_xlabel("cache, of the shipped size", fontsize=9)
    axes.set_ylabel("perplexity, relative to the shipped", fontsize=9)
    texts = ", ".join(found["results"][0]["perplexity"])
    axes.set_title(
        "SmolLM2-135M (GQA 9/3), converted without training: lower left is better\n"
        f"geometric mean over {texts}; calibrated on {len(found['calibrated_on'])} other texts",
        fontsize=9.5, loc="left",
    )  # fmt: skip
    axes.grid(color="#e6e6e6", lw=0.7)
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("png", type=Path)
    given = parser.parse_args()
    draw(json.loads(given.json.read_text()), given.png)
