"""Draws what `regard.hf.install` replaces in an attention module, and what stays the model's own.

python drawings/inside_transformers.py
"""

from pathlib import Path
from typing import Any

from common import AMBER, BLUE, INK, LARGE, WIDTH, program, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from transformers import LlamaConfig, LlamaForCausalLM

import regard.hf

HIGH = 3.3  # inches
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 8}
ROW, TALL = 1.55, 1.0  # inches: the middle of the row of boxes, and the height of a box
KEYS = (  # inches from the left
    (0.45, INK, "the model's own"),
    (2.65, AMBER, "your choice of cache"),
    (5.3, BLUE, "run by regard"),
)


def found() -> tuple[str, list[str], list[str]]:
    """The class of a module, its children, and the attributes that `install` sets on it."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2))
    module = model.model.layers[0].self_attn
    before = set(vars(module))
    regard.hf.install(model)
    added = sorted(name for name in set(vars(module)) - before if not name.startswith("_"))
    return type(module).__name__, [name for name, _ in module.named_children()], added


def rounded(axes: Axes, x: float, y: float, width: float, height: float, **style: Any) -> None:
    shape = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, **style))


def box(axes: Axes, x: float, width: float, text: str, colour: str) -> None:
    """A box of the row, from x on."""
    fill = f"{BLUE}22" if colour == BLUE else "none"
    rounded(axes, x, ROW - TALL / 2, width, TALL, facecolor=fill, edgecolor=colour, linewidth=1.6)
    axes.text(x + width / 2, ROW, text, color=colour, ha="center", va="center", fontsize=LARGE)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.4})


def draw(folder: Path) -> list[Path]:
    name, (*projections, output), added = found()
    figure = Figure(figsize=(WIDTH, HIGH))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, HIGH))
    axes.axis("off")
    dashed = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.2, "linestyle": (0, (4, 3))}
    rounded(axes, 0.45, 0.82, WIDTH - 0.9, 1.85, **dashed)
    axes.text(0.6, 2.4, name, fontsize=LARGE, weight="bold", va="center")
    sets = f"install sets {', '.join(added)}"
    axes.text(2.13, 2.4, sets, fontsize=LARGE, va="center", color=BLUE)
    row = [
        (0.65, 0.95, "\n".join(projections), INK),
        (1.87, 0.9, "rotate", INK),
        (3.04, 0.95, "cache", AMBER),
        (4.26, 1.05, "attend", BLUE),
        (5.58, 0.95, output, INK),
    ]
    for x, width, text, colour in row:
        box(axes, x, width, text, colour)
    starts = [0.1, *(x + width for x, width, _, _ in row)]
    for start, stop in zip(starts, [*(x for x, _, _, _ in row), WIDTH - 0.1], strict=True):
        arrow(axes, (start, ROW), (stop, ROW))
    above = row[3][0] + row[3][1] / 2
    arrow(axes, (above, HIGH - 0.28), (above, ROW + TALL / 2))
    centred = {"ha": "center", "va": "center", "fontsize": LARGE}
    axes.text(above, HIGH - 0.12, "mask, read as a rule", **centred)
    for x, colour, text in KEYS:
        rounded(axes, x, 0.33, 0.2, 0.2, facecolor="none", edgecolor=colour, linewidth=1.6)
        axes.text(x + 0.3, 0.43, text, color=colour, va="center", fontsize=LARGE)
    return [save(figure, folder, "transformers")]


if __name__ == "__main__":
    program(draw)
