"""Three mistakes of tutorial code that raise no error, and what regard does instead.

    python drawings/tutorials.py

Read from results: which key a query weighs, which key head a query head returns, and which
channels a rotation mixes.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from common import AMBER, BLUE, FAINT, GREEN, INK, MEDIUM, SMALL, VIOLET, WIDTH, program, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from regard import Causal, Rotary, Span, attend

QUERIES, KEYS = 2, 5
HEADS, GROUPS = 6, 2
CHANNELS = 8
COLOURS = (BLUE, AMBER, GREEN, VIOLET)


def causal(regard: bool) -> torch.Tensor:
    """Visible keys of the last queries of a sequence: `[QUERIES, KEYS]`."""
    if regard:
        return Causal().dense(Span(KEYS - QUERIES, KEYS, 0, KEYS))
    return ~torch.ones(QUERIES, KEYS).triu(diagonal=1).bool()


def heads_read(regard: bool) -> list[int]:
    """The key head that each query head reads: the values of a key head are its number."""
    q, k = torch.ones(1, HEADS, 1, 1), torch.ones(1, GROUPS, 1, 1)
    v = torch.arange(float(GROUPS)).view(1, GROUPS, 1, 1)
    if regard:
        return [round(each) for each in attend(q, k, v).flatten().tolist()]
    k, v = (t.repeat(1, HEADS // GROUPS, 1, 1) for t in (k, v))
    return [round(each) for each in F.scaled_dot_product_attention(q, k, v).flatten().tolist()]


def partners(pairing: str) -> list[tuple[int, int]]:
    """The channels that one rotation mixes."""
    rope, one = Rotary(CHANNELS, pairing=pairing), torch.eye(CHANNELS)[:, None, None]
    mixed = rope.rotate(one, torch.tensor([1])).reshape(CHANNELS, CHANNELS).abs() > 1e-9
    return [tuple(row.nonzero().flatten().tolist()) for row in mixed]


class Panel:
    """A row of cells, or several, at a place of the drawing; a unit is a cell."""

    def __init__(self, axes: Axes, x: float, y: float, title: str) -> None:
        self.axes, self.x, self.y = axes, x, y
        axes.text(x, y - 0.35, title, fontsize=SMALL, va="bottom", family="monospace")

    def row(self, y: int, colours: list[str], inside: list[int] | None = None) -> None:
        for x, colour in enumerate(colours):
            place = (self.x + x + 0.05, self.y + y + 0.05)
            self.axes.add_patch(Rectangle(place, 0.9, 0.9, color=colour, lw=0))
            if inside is not None:
                self.text(x, y, str(inside[x]), color="white")

    def text(self, x: float, y: float, text: str, color: str = INK, ha: str = "center") -> None:
        place = (self.x + x + 0.5, self.y + y + 0.5)
        self.axes.text(*place, text, fontsize=SMALL, ha=ha, va="center", color=color)

    def numbers(self, count: int, y: int) -> None:
        for x in range(count):
            self.text(x, y, str(x))


def draw_causal(axes: Axes, x: float, y: float, regard: bool) -> None:
    panel = Panel(axes, x, y, "Causal()" if regard else "triu(diagonal=1)")
    for row, visible in enumerate(causal(regard).tolist()):
        panel.row(row, [GREEN if each else FAINT for each in visible])
        panel.text(-0.6, row, f"query {KEYS - QUERIES + row}", ha="right")
    panel.numbers(KEYS, QUERIES)


def draw_heads(axes: Axes, x: float, y: float, regard: bool) -> None:
    panel, read = Panel(axes, x, y, "repeat_interleave" if regard else "repeat"), heads_read(regard)
    panel.row(0, [COLOURS[each] for each in read], inside=read)
    panel.numbers(HEADS, 1)


def draw_channels(axes: Axes, x: float, y: float, pairing: str) -> None:
    panel, pairs = Panel(axes, x, y, f'pairing="{pairing}"'), partners(pairing)
    colours = dict(zip(sorted(set(pairs)), COLOURS, strict=True))
    panel.row(0, [colours[pair] for pair in pairs])
    panel.numbers(CHANNELS, 1)


def draw(folder: Path) -> list[Path]:
    """Draw docs/pictures/tutorial-mistakes.svg."""
    width, height = 24.2, 10.9  # cells
    figure = Figure(figsize=(WIDTH, WIDTH * height / width))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-2.6, width - 2.6), ylim=(height, 0))
    axes.set_aspect("equal")
    axes.axis("off")
    places = (0.0, 6.0, 13.6)
    heads = ("visible keys", "key head read", "rotated together")
    for x, head in zip(places, heads, strict=True):
        axes.text(x, 1.3, head, fontsize=MEDIUM, weight="bold")
    for row, y in enumerate((3.2, 7.6)):
        draw_causal(axes, places[0], y, regard=row == 1)
        draw_heads(axes, places[1], y, regard=row == 1)
        draw_channels(axes, places[2], y, ("pairs", "halves")[row])
    return [save(figure, folder, "tutorial-mistakes")]


if __name__ == "__main__":
    program(draw)
