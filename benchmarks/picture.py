"""The suite's results as a picture: a bar for each case, regard's time by its fastest peer's.

python benchmarks/picture.py docs/benchmarks.json docs/benchmarks.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

FASTER, SLOWER, PEER = "#2a7f62", "#c4513a", "#8a8f98"
ROW = 0.205  # inches: height of the bar of a case
GROUPS = (
    ("Decode: one query", ("decode", "ragged", "int8 cache", "int4 cache")),
    ("Latents: MLA, one query", ("MLA absorbed", "MLA int8 latent", "MLA layer")),
    ("Whole layers", ("layer decode", "layer prefill", "layer without positions")),
    ("Prefill, causal", ("prefill", "prefill fast")),
    ("Prefill under masks", ("mask",)),
    ("Forward and backward", ("backward",)),
)
COLUMNS = ((0, 1), (2, 3, 4, 5))
TICKS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)


def draw(whole: dict[str, Any], path: Path) -> None:
    """Write the picture of a suite's results."""
    ready = [each for each in whole["results"] if len(_peers(each)) > 0]
    groups = [(title, [r for r in ready if r["kind"] in kinds]) for title, kinds in GROUPS]
    columns = [[groups[i] for i in column if groups[i][1]] for column in COLUMNS]
    columns = [column for column in columns if column]
    if not columns:
        raise ValueError("no case has a peer beside regard; nothing can be drawn")
    heights = [sum(len(rows) + 2.5 for _, rows in column) for column in columns]
    figure = plt.figure(figsize=(8.2 * len(columns), ROW * max(heights) + 1.6))
    reach = _reach(ready)
    top = 1 - 1.2 / figure.get_figheight()
    for index, column in enumerate(columns):
        y = top
        for title, rows in column:
            height = ROW * len(rows) / figure.get_figheight()
            left, width = (index + 0.305) / len(columns), 0.355 / len(columns)
            axes = figure.add_axes((left, y - height, width, height))
            _panel(axes, title, rows, reach)
            y -= ROW * (len(rows) + 2.5) / figure.get_figheight()
    _heading(figure, whole)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _peers(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = result.get("rows", {})
    return {name: row for name, row in rows.items() if not name.startswith("regard")}


def _reach(results: list[dict[str, Any]]) -> tuple[float, float]:
    """The limits of the axis, the same for every panel."""
    ratios = [row["ratio"] for result in results for row in _peers(result).values()]
    fitting = [tick for tick in TICKS if tick <= max(min(ratios), TICKS[0])]
    low = min(fitting[-1], 0.5)
    above = [tick for tick in TICKS if tick >= min(max(ratios), TICKS[-1])]
    return low / 1.1, max(above[0], 2.0) * 1.1


def _heading(figure: Any, whole: dict[str, Any]) -> None:
    machine, limits = whole["machine"], whole["limits"]
    rates = ", ".join(
        f"{rate / 1e9:.0f} GFLOP/s {name}" for name, rate in limits["products"].items()
    )
    inch = 1 / figure.get_figheight()
    figure.text(
        0.01, 1 - 0.3 * inch, "Time of regard over time of the fastest peer",
        fontsize=14, weight="bold",
    )  # fmt: skip
    figure.text(
        0.01, 1 - 0.7 * inch,
        "left of 1 regard is faster; dots: the other peers; lines: quartiles; "
        "in brackets: regard's share of the machine's reading, or of torch's product.\n"
        f"torch {machine['torch']}, {machine['threads']} threads, "
        f"{limits['read'] / 1e9:.0f} GB/s read, {rates}",
        fontsize=8.5, color="#444",
    )  # fmt: skip


def _panel(
    axes: Axes, title: str, results: list[dict[str, Any]], reach: tuple[float, float]
) -> None:
    for y, result in enumerate(results):
        peers = _peers(result)
        best = min(peers, key=lambda name: peers[name]["ms"])
        row = peers[best]
        colour = FASTER if row["ratio"] <= 1 else SLOWER
        ratio = min(max(row["ratio"], reach[0]), reach[1])
        axes.barh(y, ratio - 1, left=1, height=0.66, color=colour, zorder=2)
        axes.plot([row["low"], row["high"]], [y, y], color="#222", lw=1, zorder=3)
        others = [peer["ratio"] for name, peer in peers.items() if name != best]
        axes.plot(
            others, [y] * len(others), "o", ms=3.6, color=PEER, mec="white", mew=0.5, zorder=4
        )
        share = result["rows"]["regard"]["of_limit"]
        label = f"{row['ratio']:.2f}  {best}  ({share:.0%} of {result['bound']})"
        axes.text(1.02, y, label, transform=axes.get_yaxis_transform(), va="center", fontsize=7)
    _dress(axes, title, [result["case"] for result in results], reach)


def _dress(axes: Axes, title: str, names: list[str], reach: tuple[float, float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(*reach)
    ticks = [tick for tick in TICKS if reach[0] <= tick <= reach[1]]
    labels = [f"1/{round(1 / tick)}" if tick < 1 else f"{tick:.0f}" for tick in ticks]
    axes.set_xticks(ticks, labels, fontsize=7)
    axes.minorticks_off()
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.axvline(1, color="#222", lw=1, zorder=3)
    axes.grid(axis="x", color="#ddd", lw=0.6, zorder=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, loc="left", fontsize=9.5, weight="bold", pad=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="what the suite wrote")
    parser.add_argument("picture", type=Path, help="a .png or .svg")
    options = parser.parse_args()
    draw(json.loads(options.results.read_text()), options.picture)


if __name__ == "__main__":
    main()
