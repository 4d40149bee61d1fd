"""Figures of matplotlib as files, and the overview of all heads as pixels of a PNG."""

import io
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

MISSING = "this picture is drawn by matplotlib: python -m pip install 'regard[bench]'"
DOTS = 160  # of a PNG, in an inch
INK = (36, 92, 168)  # red, green, blue of a weight of 1; it reads on light and on dark pages
GAP = 2  # pixels between two heads of the overview


def figure(width: float, height: float, **options: Any) -> Any:
    """A figure of matplotlib, of so many inches.

    Raises:
        ImportError: if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot, which keeps a state of its own
    except ImportError as error:
        raise ImportError(MISSING) from error
    return Figure(figsize=(width, height), **options)


def picture(drawn: Any, kind: str = "png", **options: Any) -> bytes:
    """The bytes of a file of a figure: a PNG on white paper, or a transparent SVG."""
    paper = {"transparent": True} if kind == "svg" else {"facecolor": "white"}
    undated = {"metadata": {"Date": None}} if kind == "svg" else {}  # equal figures, equal files
    file = io.BytesIO()
    drawn.savefig(file, format=kind, dpi=DOTS, **paper, **undated, **options)
    return file.getvalue()


def sheet(overview: Float[Tensor, "layers heads rows columns"]) -> bytes:
    """A PNG of all heads, a pixel a cell, transparent where a cell is 0.

    Raises:
        ImportError: if matplotlib is missing.

    Examples:
        >>> import torch
        >>> sheet(torch.eye(4).expand(2, 3, 4, 4))[1:4]
        b'PNG'
    """
    try:
        from matplotlib.image import imsave
    except ImportError as error:
        raise ImportError(MISSING) from error
    file = io.BytesIO()
    imsave(file, inked(cells(overview)).mul(255).round().byte().numpy(), format="png")
    return file.getvalue()


def cells(overview: Float[Tensor, "layers heads rows columns"]) -> Float[Tensor, "down across"]:
    """The cells of all heads in one plane, layers down, heads across, with gaps of 0 between."""
    spaced = torch.nn.functional.pad(overview, (0, GAP, 0, GAP))
    return spaced.transpose(1, 2).flatten(2, 3).flatten(0, 1)[:-GAP, :-GAP].contiguous()


def inked(weights: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns 4"]:
    """Paint weights in one colour. Its opacity is the square root of a weight, so that attention
    spread over many keys is visible beside a sink."""
    colour = torch.tensor(INK) / 255
    opacity = weights.clamp(0, 1).sqrt().unsqueeze(-1)
    return torch.cat([colour.expand(*weights.shape, 3), opacity], dim=-1)
