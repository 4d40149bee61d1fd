"""A pool of pages as text of a given width, and as SVG: a cell for each page."""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice
from typing import NamedTuple

from regard.cache.paging.paged import PagedCache
from regard.cache.paging.pages import Page, PageTable, Slab
from regard.cache.paging.pool import PagePool
from regard.svg import INK
from regard.words import counted, without_controls

MOST = 2000  # cells of a strip that are shown: a drawing of 100,000 takes minutes
SIDE = 20  # pixels of a cell
LINE = 20  # cells of a line
GAP = 12  # pixels around the picture and between its parts
HEADING = 22  # pixels of a line of text
CHARACTER = 6.4  # pixels of a character of a heading, of 12 pixels in height


class State(NamedTuple):
    """A state of a page: its sign in a text, its colour, and what it means."""

    sign: str
    colour: str
    meaning: str


STATES = {
    "open": State("o", "#d97706", "open: one row writes it"),
    "sealed": State("s", "#3b82f6", "sealed, owned by one row"),
    "shared": State("2", "#8b5cf6", "sealed, shared: the number of rows"),
    "reusable": State("r", "#0f9d6c", "reusable: a stored prefix"),
    "cold": State("c", "#dc4c4c", "cold: offloaded"),
    "free": State("·", "", "free"),
}


class Cell(NamedTuple):
    """A page in the picture: its state, and its sign: the number of rows that share it, say."""

    state: str
    sign: str


class Strip(NamedTuple):
    """A line of cells under a heading: the pages of a slab, or those of a row."""

    heading: str
    cells: tuple[Cell, ...]

    @classmethod
    def of(cls, heading: str, cells: Iterable[Cell], count: int) -> "Strip":
        """A strip of the first of `count` cells, as many as are drawn at most."""
        more = f", the first {MOST:,} of {count:,}" if count > MOST else ""
        return cls(heading + more, tuple(islice(cells, MOST)))


class Picture(NamedTuple):
    """The content of a picture of a pool: strips of pages, and the number of pages in each
    state."""

    title: str
    strips: tuple[Strip, ...]
    counts: dict[str, int]  # pages of each state


def described(pool: PagePool, caches: Sequence[PagedCache] = ()) -> Picture:
    """The content of a picture of a pool: at most `MOST` pages of each strip.

    Args:
        pool: the pool.
        caches: whose rows to show, page by page, above the pool.

    Examples:
        >>> import torch
        >>> from regard import PagedCache, PagePool
        >>> pool = PagePool(num_pages=8, page_size=4)
        >>> cache = PagedCache(pool)
        >>> _ = cache.update(torch.zeros(1, 2, 10, 8))
        >>> described(pool, [cache]).counts["sealed"]
        2
    """
    with pool.memory.lock:
        pages = pool.memory.in_order()
        found = {(id(page.slab), page.index): _cell(page) for page in pages}
        strips = [
            _of_table(_name_of_row(caches, number, row, pool.page_size), table)
            for number, cache in enumerate(caches)
            for row, table in enumerate(cache.rows)
        ]
        strips += [_of_slab(slab, found, pool) for slab in pool.memory.slabs() if slab.capacity]
        counts = Counter(cell.state for cell in found.values())
        counts["free"] = sum(slab.capacity - slab.in_use for slab in pool.memory.slabs())
        title = f"{pool!r}: {counted(len(pages), 'page')} in use"
        return Picture(title, tuple(strips), {state: counts[state] for state in STATES})


def _of_slab(slab: Slab, found: dict[tuple[int, int], Cell], pool: PagePool) -> Strip:
    free = Cell("free", STATES["free"].sign)
    cells = (found.get((id(slab), index), free) for index in range(slab.capacity))
    form = pool.format.name if slab.sealed and pool.format.name != "plain" else "full precision"
    place = "offloaded, " if slab.host_of is not None else ""
    heading = (
        f"{place}{form}, {slab.page_bytes:,} bytes a page of {counted(pool.page_size, 'token')}"
    )
    return Strip.of(heading, cells, slab.capacity)


def _name_of_row(caches: Sequence[PagedCache], number: int, row: int, page_size: int) -> str:
    names = [f"cache {number}"] if len(caches) > 1 else []
    if len(caches[number].rows) > 1 or not names:
        names.append(f"row {row}")
    first = caches[number].rows[row].first * page_size
    return ", ".join(names) + (f", from slot {first}" if first else "")


def _of_table(heading: str, table: PageTable) -> Strip:
    return Strip.of(heading, map(_cell, table.pages), len(table.pages))


def _cell(page: Page) -> Cell:
    state = _state(page)
    shared = str(page.references) if page.references < 10 else "+"
    return Cell(state, shared if state == "shared" else STATES[state].sign)


def _state(page: Page) -> str:
    if page.slab.host_of is not None:
        return "cold"
    if not page.references:
        return "reusable"
    if not page.sealed:
        return "open"
    return "shared" if page.references > 1 else "sealed"


def pool_text(pool: PagePool, caches: Sequence[PagedCache] = (), *, width: int = 80) -> str:
    """The pool as text that fits: a character for each page.

    Args:
        pool: the pool.
        caches: whose rows to show, page by page, above the pool.
        width: columns of the terminal.

    Examples:
        >>> import torch
        >>> from regard import PagedCache, PagePool
        >>> from regard.see import pool_text
        >>> pool = PagePool(num_pages=8, page_size=4)
        >>> cache = PagedCache(pool)
        >>> _ = cache.update(torch.zeros(1, 2, 10, 8))
        >>> beam = cache.fork()
        >>> print(pool_text(pool, [cache, beam]))
        PagePool(8, 4): 4 pages in use
        cache 0
          22o
        cache 1
          22o
        full precision, 256 bytes a page of 4 tokens
          22oo············
        o open: one row writes it
        2 sealed, shared: the number of rows
        · free
    """
    picture = described(pool, caches)
    lines = [picture.title]
    for strip in picture.strips:
        lines.append(strip.heading)
        signs = "".join(cell.sign for cell in strip.cells)
        step = max(1, width - 2)
        lines += [f"  {signs[at : at + step]}" for at in range(0, len(signs), step)]
    shown = [STATES[state] for state, count in picture.counts.items() if count]
    return "\n".join([*lines, *(f"{state.sign} {state.meaning}" for state in shown)])


def pool_svg(pool: PagePool, caches: Sequence[PagedCache] = ()) -> str:
    """The pool as the text of an SVG file, which reads on light and on dark pages.

    Args:
        pool: the pool.
        caches: whose rows to show, page by page, above the pool.

    Examples:
        >>> import torch
        >>> from regard import PagedCache, PagePool
        >>> from regard.see import pool_svg
        >>> pool = PagePool(num_pages=8, page_size=4)
        >>> cache = PagedCache(pool)
        >>> _ = cache.update(torch.zeros(1, 2, 10, 8))
        >>> pool_svg(pool, [cache]).count("<rect")  # 3 of the row, 16 of the pool, 3 in the key
        22
    """
    picture = described(pool, caches)
    shapes, y, widths = [], GAP, [0]

    def write(x: int, text: str) -> None:
        shapes.append(f'<text x="{x}" y="{y + 14}">{escape(without_controls(text))}</text>')
        widths.append(x + round(CHARACTER * len(text)))

    for strip in picture.strips:
        write(GAP, strip.heading)
        y += HEADING
        for at, cell in enumerate(strip.cells):
            shapes.append(_box(GAP + at % LINE * SIDE, y + at // LINE * SIDE, cell))
        widths.append(GAP + SIDE * min(LINE, len(strip.cells)))
        y += -(-len(strip.cells) // LINE) * SIDE + GAP // 2
    y += GAP // 2
    for state, count in picture.counts.items():
        if count:
            shapes.append(_box(GAP, y, Cell(state, STATES[state].sign)))
            write(GAP + SIDE + 6, f"{count:,} {STATES[state].meaning}")
            y += HEADING
    width, height = max(widths) + GAP, y - HEADING + SIDE + GAP
    parts = [f"{count:,} {state}" for state, count in picture.counts.items() if count]
    title = escape(without_controls(f"{picture.title}: {', '.join(parts) or 'none free'}"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{title}" '
            f'font-family="system-ui,sans-serif" font-size="12" fill="currentColor" color="{INK}">',
            f"<title>{title}</title>",
            *shapes,
            "</svg>",
        ]
    )


def _box(x: int, y: int, cell: Cell) -> str:
    """A cell of SVG with its sign; of a free page the outline alone."""
    size = f'x="{x + 1}" y="{y + 1}" width="{SIDE - 2}" height="{SIDE - 2}" rx="2"'
    if cell.state == "free":
        return f'<rect {size} fill="none" stroke="currentColor" stroke-opacity=".4"/>'
    place = f'x="{x + SIDE // 2}" y="{y + 14}" text-anchor="middle" fill="#fff"'
    return f'<rect {size} fill="{STATES[cell.state].colour}"/><text {place}>{cell.sign}</text>'
