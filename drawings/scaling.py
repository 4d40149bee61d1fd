"""Draw docs/pictures/scaling.svg: time and memory over ranks. `python drawings/scaling.py`

By the model of `benchmarks/scaling_model.py`, for H200 in nodes of 8 behind NVLink 4, nodes behind
InfiniBand NDR.
"""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import AMBER, BLUE, GREEN, INK, RED, SMALL, WIDTH, program, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
model = importlib.import_module("scaling_model")
H200 = model.cluster_of("h200")
RANKS = [1 << n for n in range(11)]
LENGTHS = {"8K": 8192, "128K": 131072, "1M": 1 << 20, "10M": 10_000_000}  # tokens
SIZES = {1: BLUE, 8: GREEN, 64: AMBER, 1024: RED}  # ranks, and their colours
COLOURS = (BLUE, GREEN, AMBER, RED)
MILLION = 1 << 20


def lines(axes: Axes, curves: dict[str, list[float]], across: list[int], colours: object) -> None:
    """Curves over powers of two, with their names beside their ends."""
    for (name, values), colour in zip(curves.items(), colours, strict=True):
        axes.plot(across, values, color=colour, linewidth=1.8, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(visible=True)


def over_ranks(axes: Axes, title: str) -> None:
    """The axis of ranks."""
    shown = [1, 8, 64, 1024]
    axes.set_xticks(shown, [f"{ranks:,}" for ranks in shown])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_title(title, fontsize=SMALL)


def split(tokens: int, ranks: int) -> Any:
    """A prefill with heads split in a node and tokens over nodes."""
    return model.prefill(model.GQA, H200, tokens, ranks, min(ranks, H200.node))


def prefills(axes: Axes) -> None:
    """Seconds of a prefill."""
    curves = {
        name: [split(tokens, ranks).seconds for ranks in RANKS] for name, tokens in LENGTHS.items()
    }
    lines(axes, curves, RANKS, COLOURS)
    over_ranks(axes, "seconds of a prefill, GQA")
    axes.legend(fontsize=SMALL, title="tokens", title_fontsize=SMALL, ncols=2)
    axes.set_ylim(top=1e8)


def memory(axes: Axes) -> None:
    """Gigabytes of a rank in a prefill, against tokens."""
    tokens = [8192 << n for n in range(11)]
    curves = {f"{ranks:,}": [split(each, ranks).memory / 1e9 for each in tokens] for ranks in SIZES}
    lines(axes, curves, tokens, SIZES.values())
    axes.axhline(H200.device.memory_bytes / 1e9, color=INK, linestyle="--", linewidth=1.2)
    axes.text(8192, 1.15 * H200.device.memory_bytes / 1e9, "H200", fontsize=SMALL)
    axes.set_xticks(
        tokens[::3], [f"{n // 1024}K" if n < MILLION else f"{n // MILLION}M" for n in tokens[::3]]
    )
    axes.minorticks_off()
    axes.set_xlabel("tokens")
    axes.set_title("GB of a rank, prefill, GQA", fontsize=SMALL)
    axes.legend(fontsize=SMALL, title="ranks", title_fontsize=SMALL, ncols=2)
    axes.set_ylim(top=2e5)


def decoding(axes: Axes, title: str, sizes: Any) -> None:
    """Milliseconds of a token after a million, with the tokens shared by the ranks and not."""
    plans: dict[str, Callable[[int], Any]] = {
        "heads and tokens": partial(model.fastest_decode, sizes, H200, MILLION),
        "heads alone": lambda ranks: model.decode(
            sizes, H200, MILLION, ranks, ranks, sharded=False
        ),
    }
    curves = {name: [1e3 * plan(ranks).seconds for ranks in RANKS] for name, plan in plans.items()}
    lines(axes, curves, RANKS, (BLUE, RED))
    over_ranks(axes, title)
    axes.set_yticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
    axes.legend(fontsize=SMALL)
    axes.set_ylim(1, 300)


def draw(folder: Path) -> list[Path]:
    """Draw the four panels."""
    figure = Figure(figsize=(WIDTH, 6.4), layout="constrained")
    above, below = figure.subplots(2, 2)
    prefills(above[0])
    memory(above[1])
    decoding(below[0], "ms of a token after 1M, GQA", model.GQA)
    decoding(below[1], "ms of a token after 1M, MLA", model.MLA)
    return [save(figure, folder, "scaling")]


if __name__ == "__main__":
    program(draw)
