"""`regard compare --json` as a picture: perplexity against bytes of the cache a token.

regard compare --attention all --full --context 1024 --windows 2 --json > docs/compare.json
python benchmarks/compare_picture.py docs/compare.json docs/pictures/compare.svg

The line is the Pareto front: no row beyond it has both a smaller cache and a lower perplexity.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from regard.compare.frontiers import front
from regard.see.figures import figure, picture

GREY, BLUE, VIOLET, ORANGE, GREEN = "#7d8590", "#3b82f6", "#8b5cf6", "#d97706", "#0f9d6b"
SIZE = 12  # points of the text
BYTES, PERPLEXITIES = (6000, 12000, 25000, 50000), (14, 16, 20, 25)  # of the axes' ticks


class Label(NamedTuple):
    """The text beside the point of a row."""

    text: str
    colour: str
    right: float  # points from the row's point to the text
    up: float
    side: str = "left"  # of the text that is there


LABELS = {
    "GQA, as shipped": Label("GQA, as shipped", BLUE, 0, -24, "center"),
    "GQA, int8 cache": Label("int8", BLUE, 0, -24, "center"),
    "GQA, int4 cache": Label("int4", BLUE, 8, 6),
    "GQA, K8V4 cache": Label("K8V4", BLUE, 4, -24, "center"),
    "GQA, K6V4 cache": Label("K6V4", BLUE, -10, -24, "center"),
    "MHA, spelled out": Label("MHA", GREY, 0, -24, "center"),
    "MQA, aligned": Label("MQA", GREY, 11, -5),
    "joint latent, full rank": Label("= joint latent, full rank", VIOLET, 0, -42, "center"),
    "joint latent, 75 %": Label("75 %", VIOLET, 0, 8, "center"),
    "joint latent, 50 %": Label("joint latent, 50 %", VIOLET, -3, 16),
    "DeepSeek's MLA, 50 %": Label("DeepSeek's MLA, 50 %", ORANGE, 11, -5),
    "DeepSeek's MLA, 50 %, int8 cache": Label("DeepSeek's MLA,\n50 %, int8", ORANGE, 9, 7),
}


def draw(rows: list[dict[str, Any]], axes: Axes) -> None:
    """Draw the rows and their Pareto front; both axes are logarithmic."""
    points = {row["name"]: (row["cache_bytes_per_token"], row["perplexity"]) for row in rows}
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(5500, 95000)
    axes.set_ylim(11.8, 28)
    best = [points[name] for name in front(points)]
    first, last = best[0], best[-1]
    steps = [(first[0], 28), *best, (95000, last[1])]
    axes.step(*zip(*steps, strict=True), where="post", color=GREEN, alpha=0.75, linewidth=2)
    axes.annotate("Pareto front: smaller\nis worse, better is larger", (first[0], 21), (8, 0),
                  textcoords="offset points", color=GREEN, fontsize=SIZE)  # fmt: skip
    for name, point in points.items():
        label = LABELS.get(name, Label(name, GREY, 8, 4))
        size = 14 if name == "joint latent, full rank" else 9  # it lies below the shipped row
        axes.plot(*point, "o", color=label.colour, markersize=size, zorder=3 - size / 99)
        axes.annotate(label.text, point, (label.right, label.up), textcoords="offset points",
                      color=label.colour, ha=label.side, fontsize=SIZE)  # fmt: skip
    axes.set_xticks(BYTES, [f"{each:,}" for each in BYTES])
    axes.set_yticks(PERPLEXITIES, map(str, PERPLEXITIES))
    axes.minorticks_off()
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.7)
    axes.tick_params(length=0, labelcolor=GREY, labelsize=SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.set_xlabel("cache bytes a token, in the checkpoint's float16", color=GREY, fontsize=SIZE)
    axes.set_title("perplexity", loc="left", color=GREY, fontsize=SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="a JSON file of `regard compare --json`")
    parser.add_argument("target", type=Path, help="an SVG file")
    options = parser.parse_args()
    drawn = figure(7.1, 5.2, layout="constrained")
    draw(json.loads(options.results.read_text())["rows"], drawn.subplots())
    options.target.write_bytes(picture(drawn, "svg"))


if __name__ == "__main__":
    main()
