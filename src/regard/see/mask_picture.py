"""Masks as text of a given width, as SVG and as PNG, and the sentence that explains a cell."""

import textwrap
from typing import Any

import torch

from regard.masks import Mask, Span
from regard.masks.draw import HIDDEN, SIZE, VISIBLE, as_svg, frame, in_blocks, slots
from regard.masks.draw import SIDE as BLOCKS
from regard.pooling import Pooled
from regard.see.figures import figure, picture
from regard.svg import BLUE, RED, runs
from regard.words import counted

PARTLY = "▒"  # a block of which some cells are visible
LINES = 32  # of a picture in a terminal at most, with blocks of several queries
LARGEST = 8192  # queries and keys of a mask without data: where fewer would show less of it
PALE, PAPER, LINE = "#9dc1fa", "#eef0f3", "#c5cad1"  # of a PNG: partly visible, hidden
INCHES = (2.2, 5.0)  # the shortest and longest side of its cells
CELL = 0.28  # inches of a cell at most


def span_of(
    mask: Mask,
    queries: int | None = None,
    keys: int | None = None,
    *,
    q_start: int = 0,
    kv_start: int = 0,
) -> Span:
    """The slots to draw.

    Args:
        mask: the mask.
        queries: how many; as many as keys if None.
        keys: how many; up to the last query if None. Without both, the slots of the mask's data,
            or as many as show all of its rules.
        q_start: the slot of the first query.
        kv_start: the slot of the first key.

    Raises:
        ValueError: if keys end before they start.

    Examples:
        >>> from regard import Causal, SlidingWindow
        >>> span_of(Causal() & SlidingWindow(20))
        Span(q_start=0, q_stop=32, kv_start=0, kv_stop=32, queries=None, bounds=None)
        >>> span_of(Causal(), 2, q_start=6)
        Span(q_start=6, q_stop=8, kv_start=0, kv_stop=8, queries=None, bounds=None)
    """
    if q_start or kv_start:
        stop = None if keys is None else kv_start + keys
        rows = queries or max(1, stop - q_start if stop and q_start else SIZE)
        return Span(q_start, q_start + rows, kv_start, q_start + rows if stop is None else stop)
    if queries is None and keys is None and mask.extent is None:
        sizes = [1 << power for power in range(SIZE.bit_length() - 1, LARGEST.bit_length())]
        shown = (n for n in sizes if repr(mask.within(Span(0, n, 0, n))) == repr(mask))
        queries = next(shown, SIZE)
    return frame(mask, queries, keys)


def text(mask: Mask, span: Span, *, b: int = 0, h: int = 0, width: int = 80) -> str:
    """The mask as text that fits: `mask.draw` if it does, else a character for each block.

    Args:
        mask: the mask.
        span: the slots to draw.
        b: the batch row.
        h: the head.
        width: columns of the terminal.

    Raises:
        ValueError: if there are too many cells, or the mask's data are for other sizes.

    Examples:
        >>> from regard import Causal, SlidingWindow
        >>> mask = Causal() & SlidingWindow(24)
        >>> print(text(mask, Span(54, 60, 0, 64), width=24))
        Causal() & SlidingWindow(size=24)
        keys 0 to 63, down: queries 54 to 59
        a character is 1 query x 4 keys: ■ visible, ▒ some of them, · hidden
        54 ·······▒■■■■■▒··
        55 ········■■■■■■··
        56 ········▒■■■■■▒·
        57 ········▒■■■■■▒·
        58 ········▒■■■■■▒·
        59 ·········■■■■■■·
    """
    queries, keys = slots(span, b)
    margin = len(str(queries[-1] if queries else 0))
    if margin + len(keys) * (1 + len(str(span.kv_stop - 1))) <= width and len(queries) <= BLOCKS:
        return mask.draw(span, b=b, h=h)
    room = max(1, width - margin - 1)
    rows = len(queries) if max(len(queries), len(keys)) <= room else LINES
    cells = in_blocks(mask, span, b, h, rows=rows, columns=room)
    block = f"{counted(cells.high, 'query', 'queries')} x {counted(cells.wide, 'key')}"
    partly = f", {PARTLY} some of them" if cells.high * cells.wide > 1 else ""
    signs = [
        "".join(
            VISIBLE if all_ else PARTLY if any_ else HIDDEN for all_, any_ in zip(*row, strict=True)
        )
        for row in zip(cells.every.tolist(), cells.some.tolist(), strict=True)
    ]
    return "\n".join(
        [
            repr(mask),
            f"keys {keys[0]} to {keys[-1]}, down: queries {queries[0]} to {queries[-1]}",
            f"a character is {block}: {VISIBLE} visible{partly}, {HIDDEN} hidden",
            *(f"{queries[at * cells.high]:>{margin}} {line}" for at, line in enumerate(signs)),
        ]
    )


def svg(mask: Mask, span: Span | None = None, *, b: int = 0, h: int = 0) -> str:
    """The mask as the text of an SVG file, which reads on light and on dark pages.

    Args:
        mask: the mask.
        span: the slots to draw; `span_of(mask)` if None.
        b: the batch row.
        h: the head.

    Raises:
        ValueError: as `text`.

    Examples:
        >>> from regard import Causal
        >>> svg(Causal(), Span(0, 3, 0, 3)).partition("d=")[2].partition("/>")[0]
        '"M0 0h1v1h-1zM0 1h2v1h-2zM0 2h3v1h-3z"'
    """
    return as_svg(mask, span or span_of(mask), b, h, alone=True)


def png(mask: Mask, span: Span | None = None, *, b: int = 0, h: int = 0) -> bytes:
    """The mask as the bytes of a PNG file, on white paper, with its code above.

    Args:
        mask: the mask.
        span: the slots to draw; `span_of(mask)` if None.
        b: the batch row.
        h: the head.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: as `text`.

    Examples:
        >>> from regard import Causal
        >>> png(Causal())[:4]
        b'\\x89PNG'
    """
    span = span or span_of(mask)
    cells = in_blocks(mask, span, b, h, rows=BLOCKS, columns=BLOCKS)
    height, width = (min(INCHES[1], max(INCHES[0], CELL * side)) for side in cells.some.shape)
    drawn = figure(width + 0.9, height + 0.9, layout="constrained")
    axes = drawn.add_subplot()
    _paint(axes, cells, *slots(span, b))
    code = textwrap.shorten(repr(mask), 160, placeholder=" ...")
    lines = textwrap.wrap(code, max(20, round(12 * width)), break_long_words=True)
    axes.set_title("\n".join(lines), fontsize=9, family="monospace")
    return picture(drawn)


def _paint(axes: Any, cells: Pooled, queries: range, keys: range) -> None:
    """The blocks at their slots, in matplotlib's axes."""
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    rows, columns = cells.some.shape
    left, top = keys[0] - 0.5, queries[0] - 0.5
    right, bottom = left + columns * cells.wide, top + rows * cells.high
    levels = (cells.some.int() + cells.every.int()).numpy()
    colours = ListedColormap([PAPER, PALE, BLUE])
    axes.imshow(
        levels, cmap=colours, vmin=0, vmax=2, aspect="auto", interpolation="nearest",
        extent=(left, right, bottom, top),
    )  # fmt: skip
    for first, length in runs((~cells.some.any(dim=1)).tolist()):
        ends = [top + first * cells.high, top + (first + length) * cells.high]
        axes.plot([right, right], ends, color=RED, lw=4, clip_on=False, solid_capstyle="butt")
    axes.set(xlim=(left, right), ylim=(bottom, top), xlabel="keys", ylabel="queries")
    axes.xaxis.set(major_locator=MaxNLocator(9, integer=True), label_position="top")
    axes.yaxis.set_major_locator(MaxNLocator(9, integer=True))
    axes.xaxis.tick_top()
    if max(rows, columns) * CELL <= 2 * INCHES[1] and cells.high == cells.wide == 1:
        axes.hlines([top + y for y in range(rows + 1)], left, right, color=LINE, lw=0.5)
        axes.vlines([left + x for x in range(columns + 1)], top, bottom, color=LINE, lw=0.5)


def sentence(mask: Mask, span: Span, q: int, k: int, *, b: int = 0, h: int = 0) -> str:
    """A sentence on why a query may attend to a key or not. `span` places a `Dense`.

    Args:
        mask: the mask.
        span: the slots of the call.
        q: the slot of the query.
        k: the slot of the key.
        b: the batch row.
        h: the head.

    Examples:
        >>> from regard import Causal
        >>> sentence(Causal(), Span(0, 4, 0, 4), 1, 2)
        'query 1 may not attend to key 2: Causal() hides keys after the query (2 > 1)'
    """
    placed = mask.within(span)
    same = _visible(mask, b, h, q, k) == _visible(placed, b, h, q, k)
    return (mask if same else placed).explain(b, h, q, k)


def _visible(mask: Mask, *indices: int) -> bool:
    return bool(mask(*(torch.tensor(index, device="cpu") for index in indices)))
