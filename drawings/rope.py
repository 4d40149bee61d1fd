"""Draws which channels are rotated together, and what each scaling does to the frequencies.

python drawings/rope.py
"""

import math
from pathlib import Path

import torch
from common import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    LARGE,
    MEDIUM,
    SMALL,
    VIOLET,
    WIDTH,
    program,
    save,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc, FancyBboxPatch

from regard import NTK, LinearScaling, Llama3, Rotary, Yarn

CHANNELS = 8
ROWS = (
    (Rotary(8), "halves: Hugging Face"),
    (Rotary(8, pairing="pairs"), "pairs: Meta, DeepSeek"),
    (Rotary(4), "only the first 4 of 8 channels"),
)
FACTOR, ORIGINAL, THETA = 8, 8192, 500_000.0
SCALINGS = (
    (LinearScaling(FACTOR), BLUE, "-"),
    (NTK(FACTOR), AMBER, "-"),
    (Yarn(FACTOR, original_max_position=ORIGINAL), GREEN, "-"),
    (Llama3(FACTOR, original_max_position=ORIGINAL), VIOLET, (0, (4, 2))),
)


def partners(rope: Rotary) -> list[list[int]]:
    """The channels that each channel is rotated into: those that a unit vector reaches."""
    units = torch.eye(CHANNELS).reshape(1, 1, CHANNELS, CHANNELS)
    rotated = rope.rotate(units, torch.ones(CHANNELS, dtype=torch.long))
    return [row.nonzero().flatten().tolist() for row in rotated[0, 0]]


def channels(axes: Axes, rope: Rotary, what: str) -> None:
    """The channels of a head, with an arc over each pair."""
    colours = iter((BLUE, AMBER, GREEN, VIOLET))
    for channel, pair in enumerate(partners(rope)):
        if len(pair) == 1:
            box(axes, channel, FAINT, INK)
        elif channel == pair[0]:
            colour, width = next(colours), pair[1] - pair[0]
            middle = (pair[0] + width / 2, 0.42)
            arc = Arc(middle, width, 0.6 + 0.22 * width, theta1=0, theta2=180, linewidth=2)
            arc.set_edgecolor(colour)
            axes.add_patch(arc)
            for each in pair:
                box(axes, each, colour, "#ffffff")
    axes.text(8.1, 0.25, repr(rope), size=MEDIUM, family="monospace", va="bottom")
    axes.text(8.1, 0.1, what, size=SMALL, va="top")
    axes.set(xlim=(-0.5, 14.5), ylim=(-0.5, 1.5), aspect="equal")
    axes.axis("off")


def box(axes: Axes, channel: int, colour: str, ink: str) -> None:
    style = {"boxstyle": "round,pad=0,rounding_size=0.1", "edgecolor": "none"}
    axes.add_patch(FancyBboxPatch((channel - 0.4, -0.38), 0.8, 0.76, facecolor=colour, **style))
    axes.text(channel, -0.02, str(channel), ha="center", va="center", size=LARGE, color=ink)


def pairing(folder: Path) -> Path:
    """Channels of one colour are rotated together."""
    figure = Figure(figsize=(WIDTH, 2.9))
    for axes, row in zip(figure.subplots(3, 1), ROWS, strict=True):
        channels(axes, *row)
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1, hspace=0.05)
    return save(figure, folder, "rope-pairing")


def scaling(folder: Path) -> Path:
    """Scaled over unscaled frequencies of the pairs of a head, against their wavelengths."""
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    axes = figure.subplots()
    plain = Rotary(128, theta=THETA).angles(torch.ones(()), torch.float64)
    wavelengths = (2 * math.pi / plain).tolist()
    for scaling, colour, style in SCALINGS:
        scaled = Rotary(128, theta=THETA, scaling=scaling).angles(torch.ones(()), torch.float64)
        name = type(scaling).__name__
        axes.plot(wavelengths, (scaled / plain).tolist(), ls=style, color=colour, lw=2, label=name)
    axes.axvline(ORIGINAL, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.text(
        ORIGINAL * 1.15, 0.86, f"original context, {ORIGINAL:,} tokens", size=SMALL, va="center"
    )
    axes.set(xscale="log", yscale="log", xlabel="wavelength of the pair before scaling, in tokens")
    axes.set(ylabel="frequency, scaled over unscaled")
    axes.set_yticks([1, 1 / 2, 1 / 4, 1 / 8], ["1", "1/2", "1/4", "1/8"])
    axes.set_xticks([10, 100, 1e3, 1e4, 1e5, 1e6], ["10", "100", "1,000", "10,000", "1e5", "1e6"])
    axes.minorticks_off()
    axes.grid(color=FAINT)
    axes.legend(loc="lower left", bbox_to_anchor=(0.02, 0.08))
    return save(figure, folder, "rope-scaling")


def draw(folder: Path) -> list[Path]:
    """The drawings of the guide to rotary embeddings."""
    return [pairing(folder), scaling(folder)]


if __name__ == "__main__":
    program(draw)
