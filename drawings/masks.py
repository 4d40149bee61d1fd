"""Every mask rule, rules combined, and spans, as grids of visible keys made by the rules.

python drawings/masks.py
"""

import re
from pathlib import Path as File

import numpy as np
import torch
from common import BLUE, FAINT, INK, RED, SMALL, program, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from torch import Tensor

from regard.masks import (
    EVERYTHING,
    NOTHING,
    Causal,
    Chunked,
    Dense,
    Documents,
    Mask,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
    Tree,
    Where,
)
from regard.see.mask_picture import svg

SLOTS = 6
WIDTH = 5.4  # inches: narrower than a page, so that the text is larger on a phone
IDS = torch.tensor([0, 0, 1, 1, 1, 2])
PARENTS = torch.tensor([-1, -1, 0, 0, 1, 2])
RIGHT, LEFT = torch.tensor([1, 1, 1, 1, 0, 0]), torch.tensor([0, 0, 1, 1, 1, 1])
CELL = Path([(0.06, 0.06), (0.94, 0.06), (0.94, 0.94), (0.06, 0.94), (0.06, 0.06)])


def even_distance(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx) % 2 == 0


def draw(folder: File) -> list[File]:
    """Draw three pictures: the rules, rules combined, and spans."""
    return [draw_rules(folder), draw_combined(folder), draw_spans(folder), draw_large(folder)]


def draw_rules(folder: File) -> File:
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(SLOTS, SLOTS, generator=generator) < 0.5
    rules: list[tuple[Mask, str, Tensor | None]] = [
        (EVERYTHING, "key", None),
        (NOTHING, "key", None),
        (Causal(), "key", None),
        (SlidingWindow(3), "key", None),
        (Chunked(3), "key", None),
        (Prefix(2), "key", None),
        (Documents(IDS), "id", IDS),
        (Padding(RIGHT), "valid", RIGHT),
        (Tree(PARENTS), "parent", PARENTS),
        (Dense(keep), "key", None),
        (Where(even_distance), "key", None),
        (~Causal(), "key", None),
    ]
    return save(panels(rules), folder, "masks-rules")


def draw_combined(folder: File) -> File:
    causal = Causal()
    rules: list[tuple[Mask, str, Tensor | None]] = [
        (causal & SlidingWindow(3), "key", None),
        (causal & Chunked(3), "key", None),
        (causal | Prefix(3), "key", None),
        (causal & Documents(IDS), "id", IDS),
        (causal & Padding(LEFT), "valid", LEFT),
        (causal & (SlidingWindow(2) | Prefix(1)), "key", None),
    ]
    return save(panels(rules), folder, "masks-combined")


def panels(rules: list[tuple[Mask, str, Tensor | None]]) -> Figure:
    """A panel for each rule: its code, its cells, and under each key its slot or its data."""
    rows = len(rules) // 3
    figure = Figure(figsize=(WIDTH, 2.35 * rows), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08)  # inches, between rows
    span = Span(0, SLOTS, 0, SLOTS)
    for at, (mask, name, data) in enumerate(rules):
        axes = figure.add_subplot(rows, 3, at + 1)
        grid(axes, mask, span, wrapped(repr(mask)))
        keys = range(SLOTS) if data is None else data.tolist()
        axes.set_xticks([each + 0.5 for each in range(SLOTS)], [str(each) for each in keys])
        axes.set_xlabel(name, fontsize=SMALL, loc="left", labelpad=2)
        if at % 3:
            axes.set_yticks([])
        else:
            axes.set_ylabel("query", fontsize=SMALL, loc="top")
    return figure


def draw_spans(folder: File) -> File:
    figure = Figure(figsize=(WIDTH, 1.5), layout="constrained")
    spans = (Span(0, 2, 0, 6), Span(4, 6, 0, 6), Span(5, 6, 0, 6))
    for at, span in enumerate(spans):
        axes = figure.add_subplot(1, 3, at + 1)
        mask = Causal()
        code = f"Span({span.q_start}, {span.q_stop}, {span.kv_start}, {span.kv_stop})"
        grid(axes, mask, span, f"{code}\nwithin it: {mask.within(span)!r}")
        axes.set_xticks([each + 0.5 for each in range(6)], [str(each) for each in range(6)])
        axes.set_xlabel("key", fontsize=SMALL, loc="left", labelpad=2)
        axes.set_ylabel("query" if at == 0 else "", fontsize=SMALL, loc="top")
    return save(figure, folder, "masks-spans")


def draw_large(folder: File) -> File:
    """As `regard show mask --svg` writes it."""
    mask, name = Causal() & SlidingWindow(1024) | Prefix(256), "masks-large"
    path = folder / f"{name}.svg"
    path.write_text(svg(mask, Span(0, 4096, 0, 4096)) + "\n", encoding="utf-8")
    return path


def grid(axes: Axes, mask: Mask, span: Span, title: str) -> None:
    """The cells of a mask: filled where visible, and "0" beside fully masked rows."""
    cells = mask.within(span).dense(span)
    visible = cells.expand(1, 1, span.num_queries, span.num_keys)[0, 0]
    squares(axes, visible, BLUE)
    squares(axes, ~visible, FAINT)
    for row, empty in enumerate((~visible.any(dim=1)).tolist()):
        if empty:
            axes.text(span.num_keys + 0.15, row + 0.5, "0", color=RED, va="center", fontsize=SMALL)
    axes.set(xlim=(0, span.num_keys), ylim=(span.num_queries, 0), aspect="equal", anchor="N")
    slots = span.positions().tolist()
    axes.set_yticks([row + 0.5 for row in range(len(slots))], [str(slot) for slot in slots])
    axes.tick_params(length=0, labelsize=SMALL)
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=SMALL, color=INK, pad=5)


def squares(axes: Axes, cells: Tensor, colour: str) -> None:
    at = cells.nonzero().tolist()
    if at:
        paths = [Path(CELL.vertices + np.array([column, row])) for row, column in at]
        axes.add_patch(PathPatch(Path.make_compound_path(*paths), facecolor=colour, linewidth=0))


def wrapped(code: str, width: int = 22) -> str:
    """The code of a mask in lines that fit above a panel, broken before operators or data."""
    lines = [""]
    for piece in re.split(r" (?=[&|] )|(?<=\()(?=ids|valid|keep|parents)", code):
        space = "" if lines[-1].endswith("(") else " "
        joined = f"{lines[-1]}{space}{piece}".strip()
        lines[-1:] = [joined] if len(joined) <= width or not lines[-1] else [lines[-1], piece]
    return "\n".join(lines)


if __name__ == "__main__":
    program(draw)
