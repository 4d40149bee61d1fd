"""Pages in files of caches, and a paged cache there: tables that name pages by their number.

Pages are written as they are stored, codes with their scales, and each of them once, however many
rows share it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache.files import Stacked, is_naturals
from regard.cache.paging.bookkeeping import Kind, Pages
from regard.cache.paging.pages import Page, PageTable
from regard.cache.paging.slabs import Outline, coded
from regard.cache.rotation import blocks_of
from regard.cache.saving import (
    Record,
    lengths_from,
    lengths_state,
    outlines_from,
    outlines_text,
    pieces_from,
)
from regard.cache.streams import Lengths

# ---- pages ----


class Group(NamedTuple):
    """Pages of one kind, in a row of numbers."""

    outlines: tuple[Outline, ...]  # of its kind
    codes: bool  # whether they are stored as codes
    size: int  # pages

    def shapes(self, page_size: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shapes and dtypes of the tensors of a file that hold these pages."""
        stored = self.outlines if self.codes else [each.plain for each in self.outlines]
        buffers = (buffer for each in stored for buffer in each.buffers(page_size))
        return [((self.size, *shape), dtype) for shape, dtype in buffers]


class Numbered:
    """Pages with a number each, for a file.

    Args:
        pool: of the pages.
        pages: in any order; one may come several times.
        empty: the kind of a cache that has rows, and may have no page: it is stored as a group of
            0 pages then, which has the shapes and dtypes of the streams.
    """

    def __init__(self, pool: Pages, pages: Iterable[Page], empty: Kind | None = None) -> None:
        found: dict[tuple[tuple[Outline, ...], bool], dict[Page, None]] = {}
        for page in pages:
            kind = pool.kind_with(page.slab)
            codes = kind.open is not kind.sealed and page.slab is not kind.open
            found.setdefault((kind.sealed.outlines, codes), {})[page] = None
        if empty is not None and not found:
            found[empty.sealed.outlines, False] = {}
        self._page_size = pool.page_size
        self.groups = [Group(*key, len(each)) for key, each in found.items()]
        self._pages = [list(each) for each in found.values()]
        every = (page for each in self._pages for page in each)
        self.numbers = {page: number for number, page in enumerate(every)}

    def text(self) -> list[dict[str, Any]]:
        """The groups, for JSON."""
        return [
            {
                "outlines": outlines_text([each.empty(1, 0) for each in group.outlines]),
                "rotations": [list(each.rotation) for each in group.outlines],
                "codes": group.codes,
                "count": group.size,
            }
            for group in self.groups
        ]

    def streams(self) -> list[Stacked | Tensor]:
        """What the pages store, group by group."""
        found: list[Stacked | Tensor] = []
        for group, pages in zip(self.groups, self._pages, strict=True):
            stored = (page.slab.stored(page.index) for page in pages)
            found += map(Stacked, zip(*stored, strict=True))
            if not pages:
                shapes = group.shapes(self._page_size)
                found += [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in shapes]
        return found


def arguments_of(pool: Pages) -> dict[str, Any]:
    """The arguments of a pool that its pages in a file depend on."""
    return {"page_size": pool.page_size, "format": pool.format.name}


def groups_from(value: Any, pool: Pages, device: torch.device) -> list[Group]:
    """The groups that JSON describes. Raises a ValueError if it describes none, or pages that the
    pool would store otherwise."""
    if not isinstance(value, list):
        raise ValueError(f"groups of pages are a list, got {value!r:.200}")
    groups = [_group(each, pool, device) for each in value]
    if len({group[:2] for group in groups}) != len(groups):
        raise ValueError("pages of one kind are one group")
    if len(groups) > 1 and not all(group.size for group in groups):
        raise ValueError("a group of 0 pages is the only one")
    return groups


def _group(value: Any, pool: Pages, device: torch.device) -> Group:
    names = {"outlines", "rotations", "codes", "count"}
    if not isinstance(value, dict) or set(value) != names:
        raise ValueError(f"a group of pages has {', '.join(sorted(names))}, got {value!r:.200}")
    likes, rotations = outlines_from(value["outlines"], ()), value["rotations"]
    if not isinstance(rotations, list) or len(rotations) != len(likes) or not likes:
        raise ValueError(f"a group has a rotation for each stream, got {rotations!r:.200}")
    count, codes = value["count"], value["codes"]
    if not is_naturals([count]) or codes not in (0, 1) or (codes and not count):
        raise ValueError(f"a group has a count of pages, and codes or not, got {value!r:.200}")
    pairs = enumerate(zip(likes, rotations, strict=True))
    outlines = tuple(_outline(i, like, rotation, pool, device) for i, (like, rotation) in pairs)
    if codes and all(each.bits is None for each in outlines):
        raise ValueError(f"pages of format {pool.format.name!r} have no codes")
    if count and not any(each.heads * each.width for each in outlines):
        raise ValueError(f"pages have numbers, so that a file bounds their count, got {count}")
    return Group(outlines, bool(codes), count)


def _outline(index: int, like: Tensor, rotation: Any, pool: Pages, device: torch.device) -> Outline:
    _, heads, _, width = like.shape
    known = is_naturals(rotation) and tuple(rotation) == blocks_of(min(sum(rotation), width))
    plain, blocks = Outline(heads, width, like.dtype, device), tuple(rotation) if known else ()
    found = coded(plain, index, pool.format, pool.page_size, blocks)
    rotated = found.bits is not None and found.bits < 8 and found.run == 1
    if not known or (rotation and not rotated):
        raise ValueError(
            f"{width} channels in {found.bits or 'no'} bits are not rotated in blocks "
            f"{rotation!r:.99}"
        )
    return found


def check_shapes(groups: Sequence[Group], page_size: int, found: Sequence[Any]) -> None:
    """Raise a ValueError unless tensors, or entries of a file, hold the pages of these groups."""
    expected = [each for group in groups for each in group.shapes(page_size)]
    got = [(tuple(each.shape), each.dtype) for each in found]
    if expected != got:
        raise ValueError(f"pages are stored as {expected!r:.200}, got {got!r:.200}")


def taken(
    pool: Pages, groups: Sequence[Group], streams: Iterator[Iterable[Tensor]], *, cold: bool = False
) -> list[Page]:
    """New pages of a pool, with one reference each, that hold what a file does; lock held.

    Args:
        pool: with the lock held.
        groups: of the file, whose shapes have been checked.
        streams: of each tensor of the file its pages.
        cold: whether they go where the pool offloads pages to, if it does: sealed ones may.

    Raises:
        ValueError: if the pool has too few pages left; nothing changes then.
    """
    kinds = [(pool.kind_of(group.outlines), group) for group in groups]
    slabs = [kind.sealed if group.codes else kind.open for kind, group in kinds]
    if cold and pool.offloading is not None:
        slabs = [pool.offloading.cold_of(slab) for slab in slabs]
    pool.reserve([s for s, group in zip(slabs, groups, strict=True) for _ in range(group.size)])
    taken: list[Page] = []
    try:
        for slab, group in zip(slabs, groups, strict=True):
            pages = [pool.take(slab) for _ in range(group.size)]
            taken += pages
            for index in range(len(slab.stored(pages[0].index)) if pages else 0):
                for page, values in zip(pages, next(streams), strict=True):
                    slab.stored(page.index)[index].copy_(values)
    except BaseException:
        for page in taken:
            pool.release(page)
        raise
    return taken


# ---- a cache ----


class Filled(NamedTuple):
    """The state of a paged cache that a file holds, in new pages of its pool."""

    pieces: tuple[int, ...] | None
    kind: Kind | None
    lengths: Lengths
    like: tuple[Tensor, ...]  # empty tensors of the streams
    tables: list[PageTable]


def cache_record(cache: Any, tables: Sequence[PageTable], kind: Kind | None) -> Record:
    """What a paged cache holds, for its file; the pool's lock is held."""
    numbered = Numbered(cache.pool, (page for table in tables for page in table.pages), kind)
    state = {
        **lengths_state(cache.lengths),
        "tables": [
            {"first": table.first, "pages": [numbered.numbers[page] for page in table.pages]}
            for table in tables
        ],
        "groups": numbered.text(),
        "pieces": None if cache.pieces is None else list(cache.pieces),
    }
    return Record(state, numbered.streams())


def filled(cache: Any, record: Record) -> Filled:
    """The state of a paged cache that a file holds, in new pages of its pool; lock held.

    Args:
        cache: empty.
        record: of a cache with its arguments.

    Raises:
        ValueError: if it could not be the record of such a cache, or the pool has too few pages.
    """
    pool, state = cache.pool, record.state
    device = record.streams[0].device if record.streams else torch.device("cpu")
    groups = groups_from(state.get("groups"), pool, device)
    check_shapes(groups, pool.page_size, record.streams)
    kinds = {group.outlines for group in groups}
    if len(kinds) > 1 or (state.get("tables") and not kinds):
        raise ValueError(f"the rows of a cache have pages of one kind, got {len(kinds)} kinds")
    outlines = groups[0].outlines if groups else ()
    pieces = pieces_from(state.get("pieces"), [each.empty(0, 0) for each in outlines])
    lengths, numbers = _rows_of(state)
    _check_tables(cache, state["tables"], numbers, groups)
    pages = taken(pool, groups, iter(record.streams))
    kind = pool.kind_of(outlines) if groups else None
    tables = [
        PageTable([pages[n] for n in table["pages"]], table["first"]) for table in state["tables"]
    ]
    for table, length in zip(tables, numbers, strict=True):
        for number, page in enumerate(table.pages, table.first):
            page.sealed = (number + 1) * pool.page_size <= length
            pool.retain(page)
    for page in pages:
        pool.release(page)
    like = () if kind is None else tuple(x.empty(len(tables), 0) for x in kind.open.outlines)
    return Filled(pieces, kind, lengths, like, tables)


def _rows_of(state: dict[str, Any]) -> tuple[Lengths, list[int]]:
    """The lengths of rows, and the same as a list."""
    lengths, tables = lengths_from(state), state.get("tables")
    if not isinstance(tables, list) or not all(_is_table(each) for each in tables):
        raise ValueError(f"tables have a first page and pages, got {tables!r:.200}")
    rows = lengths.rows
    numbers: list[int] = [lengths.longest] * len(tables) if rows is None else rows.tolist()
    if len(numbers) != len(tables):
        raise ValueError(f"rows have a length each, got {numbers!r:.200} of {len(tables)} rows")
    return lengths, numbers


def _is_table(value: Any) -> bool:
    names = isinstance(value, dict) and set(value) == {"first", "pages"}
    return names and is_naturals([value["first"]]) and is_naturals(value["pages"])


def _check_tables(
    cache: Any, tables: list[dict[str, Any]], lengths: list[int], groups: list[Group]
) -> None:
    """Raise unless each row has the pages of its tokens, or of its window, and open ones alone."""
    size = cache.pool.page_size
    codes = [group.codes for group in groups for _ in range(group.size)]
    count = len(codes)
    uses: dict[int, set[bool]] = {}
    for table, length in zip(tables, lengths, strict=True):
        first, stop = table["first"], -(-length // size)
        oldest = 0 if cache.window is None else max(0, length - cache.window + 1)
        if first + len(table["pages"]) != stop or first > oldest // size:
            raise ValueError(
                f"a row of {length} tokens has pages from {oldest // size} or before to {stop}, "
                f"got {len(table['pages'])} from {first} on"
            )
        for number, page in enumerate(table["pages"], first):
            full = (number + 1) * size <= length
            if page >= count or (page in uses and not (full and uses[page] == {True})):
                raise ValueError(f"page {page} of {count} is in several places, or is not there")
            if codes[page] and not full:
                raise ValueError(f"page {page} has codes, and only {length - number * size} tokens")
            uses.setdefault(page, set()).add(full)
    if len(uses) != count:
        raise ValueError(f"{count} pages are stored and {len(uses)} in use")
