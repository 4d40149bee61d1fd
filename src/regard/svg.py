"""The cells of a mask as SVG: runs of equal cells are one shape, text takes the page's colour."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from regard.pooling import Pooled
from regard.words import counted, without_controls

SIDE = 400  # pixels of the longer side at most, about
LARGEST = 22  # pixels of a cell at most
LINES = 6  # pixels of a cell from which it has lines around it
CHARACTER = 7  # pixels of a digit at the size of the labels
GAP = 12  # pixels between labels at least, and around the picture
NAME = 18  # pixels of the name of an axis
BLUE, RED = "#3b82f6", "#dc4c4c"  # contrasts above 3 on white and on black
INK = "#7d8590"  # of text in an SVG file, which is shown on any page: a contrast above 3.8 on white
# and on black

Cells = Sequence[Sequence[bool]]


def svg(
    code: str, cells: Pooled, queries: Sequence[int], keys: Sequence[int], *, alone: bool = False
) -> str:
    """The picture.

    Args:
        code: of the mask, for its title.
        cells: what is visible.
        queries: their slots.
        keys: their slots.
        alone: whether it is a file of its own, which has no page whose colour its text could take.

    Examples:
        >>> from regard import Causal
        >>> text = Causal()._repr_html_()
        >>> text.count("<svg"), "36 of 64 cells are visible" in text
        (1, True)
    """
    code = escape(without_controls(code))
    down, across = cells.some.shape
    cell = (min(LARGEST, SIDE / max(1, across)), min(LARGEST, SIDE / max(1, down)))
    left = NAME + CHARACTER * len(str(max(queries, default=0))) + GAP
    top = NAME + 1.5 * GAP
    high, note = down * cell[1], _note(cells)
    size = (
        _n(left + max(across * cell[0] + 2 * GAP, CHARACTER * len(note))),
        _n(top + high + GAP + NAME * bool(note)),
    )
    texts = [
        *_labels(queries, cells.high, cell[1], down=True),
        *_labels(keys, cells.wide, cell[0], down=False),
        _text("queries", 12 - left, high / 2, 'text-anchor="middle"', turned=True),
        _text("keys", across * cell[0] / 2, 12 - top, 'text-anchor="middle"'),
        *([_text(note, 4 - left, high + GAP + 8)] if note else []),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
            f'width="{size[0]}" height="{size[1]}" role="img" aria-label="{code}" '
            'font-family="system-ui,sans-serif" font-size="12" fill="currentColor"'
            + (f' color="{INK}">' if alone else ">"),
            f"<title>{code}</title>",
            f"<desc>{described(cells, queries, keys)}</desc>",
            f'<g transform="translate({_n(left)} {_n(top)})">',
            *_shapes(cells, *cell),
            *texts,
            "</g>",
            "</svg>",
        ]
    )


def _shapes(cells: Pooled, width: float | int, height: float | int) -> list[str]:
    """Hidden, visible and partly visible cells, fully masked rows, and lines."""
    down, across = cells.some.shape
    every, partly = cells.every.tolist(), (cells.some & ~cells.every).tolist()
    masked = [[not any(row)] for row in cells.some.tolist()]
    right = _n(across * width)
    scale = f'transform="scale({width:.6g} {height:.6g})" fill="{BLUE}"'
    strip = f'transform="translate({right} 0) translate(4 0) scale(4 {height:.6g})" fill="{RED}"'
    return [
        f'<rect width="{right}" height="{_n(down * height)}" fill-opacity=".07"/>',
        f'<path {scale} d="{_path(every)}"/>',
        f'<path {scale} fill-opacity=".45" d="{_path(partly)}"/>',
        f'<path {strip} d="{_path(masked)}"/>',
        *_lines(down, across, width, height),
    ]


def _text(
    text: str, x: float | int, y: float | int, style: str = "", *, turned: bool = False
) -> str:
    turn = f' transform="rotate(-90 {_n(x)} {_n(y)})"' if turned else ""
    return f'<text x="{_n(x)}" y="{_n(y)}" {style}{turn}>{text}</text>'


def described(cells: Pooled, queries: Sequence[int], keys: Sequence[int]) -> str:
    """A sentence with the numbers of queries, keys, visible cells and fully masked rows."""
    rows = (
        f"{counted(len(queries), 'query', 'queries')}{_slots(queries)} by "
        f"{counted(len(keys), 'key')}{_slots(keys)}"
    )
    counts = f"{cells.visible:,} of {len(queries) * len(keys):,} cells are visible"
    return f"{rows}; {counts}; {counted(cells.masked, 'fully masked row')}."


def _slots(slots: Sequence[int]) -> str:
    return f" (slots {slots[0]} to {slots[-1]})" if slots else ""


def _note(cells: Pooled) -> str:
    """A note on colours and blocks, where a cell stands for several keys or a row is fully
    masked."""
    notes = [f"a cell is {_size(cells)}; pale: some are visible"] * (cells.high * cells.wide > 1)
    return "; ".join([*notes, *["red: fully masked rows"] * (cells.masked > 0)])


def _size(cells: Pooled) -> str:
    return f"{counted(cells.high, 'query', 'queries')} x {counted(cells.wide, 'key')}"


def _path(cells: Cells) -> str:
    """Rectangles around the True cells: equal rows below each other share theirs."""
    shapes, first = [], 0
    for row, alike in groupby(cells):
        rows = len(list(alike))
        shapes += [f"M{start} {first}h{n}v{rows}h-{n}z" for start, n in runs(row)]
        first += rows
    return "".join(shapes)


def runs(row: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The start and length of each run of True."""
    start = 0
    for value, run in groupby(row):
        length = len(list(run))
        if value:
            yield start, length
        start += length


def _lines(down: int, across: int, width: float | int, height: float | int) -> list[str]:
    """Lines between the cells, where these are large enough."""
    if min(width, height) < LINES:
        return []
    rows = "".join(f"M0 {_n(y * height)}h{_n(across * width)}" for y in range(down + 1))
    columns = "".join(f"M{_n(x * width)} 0v{_n(down * height)}" for x in range(across + 1))
    return [f'<path d="{rows}{columns}" fill="none" stroke="currentColor" stroke-opacity=".25"/>']


def _labels(slots: Sequence[int], block: int, size: float | int, *, down: bool) -> Iterator[str]:
    """The slots of some rows or columns, as many as have room, at round distances."""
    room = GAP + (8 if down else CHARACTER * len(str(max(slots, default=0))))
    step = next(step for step in _round_steps() if step * size / block >= room)
    for at, slot in enumerate(slots):
        if slot % step == 0:
            middle = _n((at // block + 0.5) * size if block == 1 else at * size / block)
            place = f'x="-6" y="{middle}" dy=".35em"' if down else f'x="{middle}" y="-6"'
            anchor = "end" if down else "middle"
            yield f'<text {place} text-anchor="{anchor}">{slot}</text>'


def _round_steps() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50 ..."""
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _n(number: float | int) -> str:
    """A number with two decimals at most."""
    text = f"{number:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
