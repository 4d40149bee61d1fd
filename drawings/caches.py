"""How caches hold tokens over time: which slots, in how many bytes; recorded from the caches.

python drawings/caches.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from common import AMBER, BLUE, FAINT, GREEN, RED, SMALL, VIOLET, program, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regard import KVCache, QuantizedCache, SlidingCache, StaticCache

TOKENS, STEP = 1024, 16
HEADS, WIDTH_OF_HEAD = 3, 64  # one layer of SmolLM2-135M, in bfloat16
PAGE = 5.4  # inches: narrower than a page, so that the text is larger on a phone
MAKERS: list[tuple[str, str, Callable]] = [
    ("KVCache()", BLUE, KVCache),
    ("StaticCache(1024)", GREEN, lambda: StaticCache(TOKENS)),
    ("SlidingCache(256)", AMBER, lambda: SlidingCache(256)),
    ("QuantizedCache(bits=8)", RED, QuantizedCache),
    ("QuantizedCache(bits=4)", VIOLET, lambda: QuantizedCache(4)),
]


class History(NamedTuple):
    """What was recorded after every step, in slots and bytes."""

    tokens: list[int]
    first_held: list[int]
    held: list[int]
    allocated: list[int]

    def slots(self) -> tuple[list[int], list[float]]:
        """The first slot held, and one past the last slot for which there is room."""
        per_token = self.held[-1] / (self.tokens[-1] - self.first_held[-1])
        room = [each / per_token for each in self.allocated]
        return self.first_held, [a + b for a, b in zip(self.first_held, room, strict=True)]


def record(make: Callable) -> History:
    """Write `TOKENS` tokens, `STEP` at a time."""
    cache, history = make(), History([], [], [], [])
    new = torch.randn(1, HEADS, STEP, WIDTH_OF_HEAD, generator=torch.Generator().manual_seed(0))
    new = new.bfloat16()
    for _ in range(TOKENS // STEP):
        cache.update(new, new)
        per_token = history.held[0] / STEP if history.held else cache.nbytes / STEP
        history.tokens.append(cache.length)
        history.first_held.append(cache.length - round(cache.nbytes / per_token))
        history.held.append(cache.nbytes)
        history.allocated.append(cache.allocated_bytes)
    return history


def draw(folder: Path) -> list[Path]:
    """Draw two pictures: the slots that caches hold, and their bytes."""
    histories = [(name, colour, record(make)) for name, colour, make in MAKERS]
    return [draw_slots(histories, folder), draw_bytes(histories, folder)]


def draw_slots(histories: list[tuple[str, str, History]], folder: Path) -> Path:
    """Tokens written to the right, slots upwards: held, and room for more."""
    figure = Figure(figsize=(PAGE, 2.0), layout="constrained")
    for at, (name, colour, history) in enumerate(histories[:3]):
        axes = figure.add_subplot(1, 3, at + 1)
        first, room = history.slots()
        axes.fill_between(history.tokens, history.tokens, room, color=FAINT, linewidth=0)
        axes.fill_between(history.tokens, first, history.tokens, color=colour, linewidth=0)
        axes.set_title(name, fontsize=SMALL)
        axes.set(xlim=(0, TOKENS), ylim=(0, TOKENS + 64), yticks=[0, 512, 1024])
        ticks(axes, "y" if at == 0 else "")
        axes.set_xlabel("tokens written", fontsize=SMALL)
        axes.set_ylabel("slots" if at == 0 else "", fontsize=SMALL)
    return save(figure, folder, "caches-slots")


def draw_bytes(histories: list[tuple[str, str, History]], folder: Path) -> Path:
    """Bytes of the tokens held, and of the buffers, against the tokens written."""
    figure = Figure(figsize=(PAGE, 3.0), layout="constrained")
    for at, what in enumerate(("nbytes", "allocated_bytes")):
        axes = figure.add_subplot(1, 2, at + 1)
        for name, colour, history in histories:
            values = history.held if what == "nbytes" else history.allocated
            kib = [each / 1024 for each in values]
            style = (0, (4, 3)) if colour == GREEN else "-"  # the line below it stays visible
            axes.plot(history.tokens, kib, color=colour, linewidth=1.8, label=name, linestyle=style)
        axes.set_title(f"cache.{what}", fontsize=SMALL)
        axes.set(xlim=(0, TOKENS), ylim=(0, 820))
        ticks(axes, "y" if at == 0 else "")
        axes.set_xlabel("tokens written", fontsize=SMALL)
        axes.set_ylabel("KiB" if at == 0 else "", fontsize=SMALL)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=SMALL)
    return save(figure, folder, "caches-bytes")


def ticks(axes: Axes, labelled: str) -> None:
    axes.set_xticks([0, 512, 1024])
    axes.tick_params(length=2, labelsize=SMALL, labelleft=labelled == "y")


if __name__ == "__main__":
    program(draw)
