"""Draws the perplexity and the cache of each attention that a model can be given.

python drawings/compare.py

The figures are those of docs/compare.json, which `regard compare --json` wrote.
"""

import json
from pathlib import Path

from common import AMBER, BLUE, FAINT, GREEN, INK, VIOLET, WIDTH, program, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regard.compare.frontiers import front

MEASURED = Path(__file__).parents[1] / "docs" / "compare.json"
HIGH = 5.6  # inches
TEXT = 15.0  # points: this picture stands on the first page
COLOURS = {"GQA": BLUE, "MHA": INK, "MQA": INK, "joint": VIOLET, "DeepSeek's": AMBER}
LABELS = {  # the name of a row: what is written, points right and above, alignment
    "GQA, as shipped": ("GQA, as shipped", (0, -24), "center"),
    "joint latent, full rank": ("= joint latent, full rank", (0, -43), "center"),
    "GQA, int8 cache": ("int8", (0, -24), "center"),
    "GQA, int4 cache": ("int4", (9, 5), "left"),
    "GQA, K8V4 cache": ("K8V4", (1, -24), "center"),
    "GQA, K6V4 cache": ("K6V4", (-18, -24), "center"),
    "MHA, spelled out": ("MHA", (0, -24), "center"),
    "MQA, aligned": ("MQA", (11, -5), "left"),
    "joint latent, 75 %": ("75 %", (10, 3), "left"),
    "joint latent, 50 %": ("joint latent, 50 %", (-4, 10), "left"),
    "DeepSeek's MLA, 50 %": ("DeepSeek's MLA, 50 %", (11, -5), "left"),
    "DeepSeek's MLA, 50 %, int8 cache": ("DeepSeek's MLA,\n50 %, int8 cache", (9, 7), "left"),
}
TOP, RIGHT = 27.5, 95_000  # where the axes end
Point = tuple[float, float]  # cache bytes a token, perplexity


def points() -> dict[str, Point]:
    rows = json.loads(MEASURED.read_text())["rows"]
    return {
        row["name"]: (row["cache_bytes_per_token"], row["perplexity"])
        for row in rows
        if row["perplexity"] is not None
    }


def dress(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(5_500, RIGHT)
    axes.set_ylim(11.7, TOP)
    axes.minorticks_off()
    ticks = [6_000, 12_000, 25_000, 50_000]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=TEXT)
    axes.set_yticks([14, 16, 20, 25], ["14", "16", "20", "25"], fontsize=TEXT)
    axes.grid(axis="y")
    axes.set_xlabel("cache bytes a token, in the checkpoint's float16", fontsize=TEXT)
    axes.set_title("perplexity", fontsize=TEXT, loc="left", pad=10)
    axes.tick_params(length=0)


def draw(folder: Path) -> list[Path]:
    found = points()
    best = front(found)
    figure = Figure(figsize=(WIDTH, HIGH))
    axes = figure.add_subplot()
    dress(axes)
    steps = [found[name] for name in best]
    line = [(steps[0][0], TOP), *steps, (RIGHT, steps[-1][1])]
    axes.step(*zip(*line, strict=True), where="post", color=GREEN, lw=2.2, zorder=1, alpha=0.75)
    axes.annotate(
        "Pareto front: smaller\nis worse, better is larger", (steps[0][0], 21.9), color=GREEN,
        fontsize=TEXT, va="center", xytext=(9, 0), textcoords="offset points",
    )  # fmt: skip
    for name, (nbytes, perplexity) in found.items():
        colour = COLOURS[name.partition(",")[0].partition(" ")[0]]
        behind = name == "joint latent, full rank"  # of the shipped attention, where it equals it
        size = 16 if behind else 12 if name in best else 10
        axes.plot(nbytes, perplexity, "o", ms=size, color=colour, mec=FAINT, zorder=4 - behind)
        text, offset, align = LABELS[name]
        axes.annotate(
            text, (nbytes, perplexity), color=colour, fontsize=TEXT, ha=align,
            xytext=offset, textcoords="offset points", linespacing=1.05,
        )  # fmt: skip
    figure.subplots_adjust(left=0.06, right=0.99, top=0.9, bottom=0.14)
    return [save(figure, folder, "compare")]


if __name__ == "__main__":
    program(draw)
