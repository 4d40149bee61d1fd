"""Which keys each rank computes and which it receives, under a causal mask and under a window.

python drawings/distributed.py
"""

from collections.abc import Iterable
from pathlib import Path as File

import numpy as np
from common import AMBER, BLUE, FAINT, GREEN, INK, SMALL, VIOLET, program, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from regard.distributed import Shards
from regard.distributed.context.needed import Needs, needs_of
from regard.masks import Causal, Mask, SlidingWindow, Span

SLOTS, RANKS = 16, 4
COLOURS = (BLUE, AMBER, GREEN, VIOLET)  # of the ranks
RECEIVED = 0.42  # opacity of a key that another rank holds
KEYS = SLOTS + 1  # where the strips of keys begin, in cells
CELL = Path([(0.06, 0.06), (0.94, 0.06), (0.94, 0.94), (0.06, 0.94), (0.06, 0.06)])
WIDTH, HEIGHT = 5.4, 3.7  # inches: narrower than a page, so that the text is larger on a phone


def draw(folder: File) -> list[File]:
    """Draw the cells of both masks, and under them the keys of every rank."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    cases: tuple[tuple[Mask, Shards], ...] = (
        (Causal(), Shards(SLOTS, RANKS, "zigzag")),
        (Causal() & SlidingWindow(4), Shards(SLOTS, RANKS, "contiguous")),
    )
    for axes, (mask, shards) in zip(figure.subplots(1, 2), cases, strict=True):
        needs = needs_of(mask, shards)
        cells(axes, mask, shards)
        strips(axes, needs)
        axes.set(xlim=(-1.4, SLOTS), ylim=(KEYS + RANKS, 0), aspect="equal", anchor="N")
        ranks = range(RANKS)
        places = [0.5, SLOTS - 0.5, *(KEYS + rank + 0.5 for rank in ranks)]
        axes.set_yticks(places, ["query 0", str(SLOTS - 1), *(f"rank {rank}" for rank in ranks)])
        axes.set_xticks([])
        axes.tick_params(length=0, labelsize=SMALL, pad=1)
        axes.spines[:].set_visible(False)
        sent = sum(needs.sent_tokens(rank) for rank in ranks)
        axes.set_xlabel(f"keys held, and {sent} received", fontsize=SMALL, labelpad=3)
        layout, code = shards.layout.replace("zigzag", "zig-zag"), repr(mask).replace("size=", "")
        axes.set_title(f"{layout}\n{code}", fontsize=SMALL, color=INK, pad=4)
    return [save(figure, folder, "distributed")]


def cells(axes: Axes, mask: Mask, shards: Shards) -> None:
    """The visible cells, in the colour of the query's rank; pale where the key is another's."""
    visible = mask.dense(Span(0, SLOTS, 0, SLOTS)).expand(1, 1, SLOTS, SLOTS)[0, 0]
    owner = owners(shards)
    squares(axes, [(key, query) for query, key in (~visible).nonzero().tolist()], FAINT, None)
    for rank, colour in enumerate(COLOURS):
        rows = [(key, query) for query, key in visible.nonzero().tolist() if owner[query] == rank]
        labels = [(-1.3, query) for query in range(SLOTS) if owner[query] == rank]
        own = [(key, query) for key, query in rows if owner[key] == rank]
        squares(axes, labels + own, colour, 1.0)
        squares(axes, [each for each in rows if each not in own], colour, RECEIVED)


def strips(axes: Axes, needs: Needs) -> None:
    """For each rank the keys that it holds, and pale those that it receives."""
    for rank, colour in enumerate(COLOURS):
        at = KEYS + rank
        held = slots(needs.shards.pieces(rank))
        others = [needs.of(rank, sender) for sender in range(RANKS) if sender != rank]
        received = [slot for runs in others for slot in slots(runs)]
        rest = {*range(SLOTS)} - {*held, *received}
        squares(axes, [(key, at) for key in held], colour, 1.0)
        squares(axes, [(key, at) for key in received], colour, RECEIVED)
        squares(axes, [(key, at) for key in sorted(rest)], FAINT, None)


def slots(runs: Iterable[tuple[int, int]]) -> list[int]:
    return [slot for run in runs for slot in range(*run)]


def owners(shards: Shards) -> list[int]:
    """The rank of each slot."""
    found = [0] * shards.length
    for rank in range(shards.ranks):
        for slot in shards.positions(rank).tolist():
            found[slot] = rank
    return found


def squares(axes: Axes, cells: list[tuple[float, float]], colour: str, alpha: float | None) -> None:
    """Cells of one colour, with gaps between them."""
    if cells:
        paths = [Path(CELL.vertices + np.array(each)) for each in cells]
        whole = Path.make_compound_path(*paths)
        axes.add_patch(PathPatch(whole, facecolor=colour, alpha=alpha, linewidth=0))


if __name__ == "__main__":
    program(draw)
