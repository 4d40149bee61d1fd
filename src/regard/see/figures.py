"""Figures of matplotlib as files, and pixels as PNG."""

import io
from typing import Any

from jaxtyping import Float
from torch import Tensor

MISSING = "this picture is drawn by matplotlib: python -m pip install 'regard[bench]'"
DOTS = 160  # of a PNG, in an inch


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


def pixels_as_png(colours: Float[Tensor, "rows columns 4"]) -> bytes:
    """A PNG with a pixel for each red, green, blue and opacity.

    Raises:
        ImportError: if matplotlib is missing.
    """
    try:
        from matplotlib.image import imsave
    except ImportError as error:
        raise ImportError(MISSING) from error
    file = io.BytesIO()
    imsave(file, colours.mul(255).round().byte().numpy(), format="png")
    return file.getvalue()
