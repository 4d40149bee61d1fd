"""Draws the counter-example of a mask law: the keys that each query attends to, and should.

    python drawings/verify.py

The subject is torch.nn.MultiheadAttention, in a call with a mask and `is_causal=True`. Both grids
are those that `regard verify torch.nn:MultiheadAttention` reports for the law mask_and_causal.
"""

from pathlib import Path

import torch
from common import BLUE, FAINT, LARGE, MEDIUM, RED, WIDTH, program, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from regard_verify import check

LAW = "mask_and_causal"


def grid(axes: Axes, cells: list[list[bool]], wanted: list[list[bool]], title: str) -> None:
    """One grid; cells that differ from what is wanted are red."""
    for query, row in enumerate(cells):
        for key, visible in enumerate(row):
            wrong = visible != wanted[query][key]
            edge = RED if wrong else BLUE if visible else FAINT
            face = (RED if wrong else BLUE) if visible else "none"
            axes.add_patch(
                Rectangle((key + 0.08, query + 0.08), 0.84, 0.84, fc=face, ec=edge, lw=1.2)
            )
    axes.set_xlim(0, len(cells[0]))
    axes.set_ylim(len(cells), 0)
    axes.set_aspect("equal")
    axes.set_xticks([key + 0.5 for key in range(len(cells[0]))], range(len(cells[0])))
    axes.set_yticks([query + 0.5 for query in range(len(cells))], range(len(cells)))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("key")
    axes.set_ylabel("query", size=MEDIUM)
    axes.set_title(title, size=LARGE)


def draw(folder: Path) -> list[Path]:
    """Draw the expected grid and the one that was measured."""
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(32, 4)
    (found,) = check(module, only=[LAW], quick=True).having("failed")
    example = found.example
    figure = Figure(figsize=(WIDTH, 3.1), layout="constrained")
    left, right = figure.subplots(1, 2)
    grid(left, example.expected_grid, example.expected_grid, "expected: causal and mask")
    grid(right, example.actual_grid, example.expected_grid, "got: the mask alone")
    return [save(figure, folder, "verify-mask")]


if __name__ == "__main__":
    program(draw)
