"""The page tables of a cache: cut, selected, read, and released with the cache.

Sealed pages are shared and open pages copied. The references of a page count the tables that hold
it.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from regard.cache.paging.memory import Kind, Memory
from regard.cache.paging.offloading import Reading
from regard.cache.paging.pages import Page, PageTable
from regard.cache.paging.reading import Segment, parts_of, segments_of
from regard.cache.parts import Part
from regard.cache.streams import Lengths


def pages_of(tables: Iterable[PageTable]) -> Iterator[Page]:
    """The pages of all rows; one that rows share comes once for each."""
    return (page for table in tables for page in table.pages)


def each_length(lengths: Lengths, rows: int) -> list[int]:
    """The length of each of so many rows."""
    if lengths.rows is None:
        return [lengths.longest] * rows
    numbers: list[int] = lengths.rows.tolist()
    return numbers


# ---- changes: new tables, whose pages are not counted yet ----


class Cost(NamedTuple):
    """The pages that a change of tables takes, and the references that it drops."""

    copies: int
    left: "Counter[Page]"

    @property
    def unreferenced(self) -> int:
        """Pages that are in no table once the references are dropped."""
        return sum(count == page.references for page, count in self.left.items())

    @property
    def freed(self) -> int:
        """Unreferenced pages of no stored prefix, free once the references are dropped."""
        pages = self.left.items()
        return sum(count == page.references and page.node is None for page, count in pages)


def cost_of_cut(kind: Kind | None, tables: Sequence[PageTable], lengths: Sequence[int]) -> Cost:
    """The pages that `cut` copies and frees; a cache without a kind has no pages yet."""
    if kind is None:
        return Cost(0, Counter())
    size = kind.open.page_size
    new = [table.cut(length, size) for table, length in zip(tables, lengths, strict=True)]
    copies = sum(_must_be_copied(kind, t.pages[-1]) for t in _open_ended(new, lengths, size))
    return Cost(copies, Counter(pages_of(tables)) - Counter(pages_of(new)))


def cut(
    memory: Memory, kind: Kind, tables: Sequence[PageTable], lengths: Sequence[int]
) -> list[PageTable]:
    """The pages of the first tokens of each row. Last pages that are cut are open: copies, unless
    no other table has them.

    Raises:
        ValueError: if the pool has too few pages; nothing changes.
    """
    size = memory.page_size
    new = [table.cut(length, size) for table, length in zip(tables, lengths, strict=True)]
    ends = _open_ended(new, lengths, size)
    copied = [table for table in ends if _must_be_copied(kind, table.pages[-1])]
    memory.reserve([kind.open] * len(copied))
    for table in copied:
        table.pages[-1] = memory.copy(table.pages[-1], kind.open)
    for table in ends:
        table.pages[-1].sealed = False
    return new


def _open_ended(tables: Sequence[PageTable], lengths: Sequence[int], size: int) -> list[PageTable]:
    """The tables that end within a page."""
    rows = zip(tables, lengths, strict=True)
    return [table for table, length in rows if length % size and table.pages]


def _must_be_copied(kind: Kind, page: Page) -> bool:
    return page.sealed and not (page.is_private and page.slab is kind.open)


def cost_of_selection(tables: Sequence[PageTable], rows: Sequence[int]) -> Cost:
    """The cost of `select`, in which open pages stay once."""
    chosen = [tables[row] for row in rows] if tables else []
    new = Counter(pages_of(chosen))
    copies = sum(count - 1 for page, count in new.items() if not page.sealed)
    return Cost(copies, Counter(pages_of(tables)) - new)


def select(
    memory: Memory, tables: Sequence[PageTable], rows: Sequence[int], *, copies_all: bool = False
) -> list[PageTable]:
    """The tables of these rows, each with an open page of its own.

    Args:
        memory: with its lock held.
        tables: of all rows.
        rows: their numbers; one may come several times.
        copies_all: whether every open page is copied, because the tables stay, too; otherwise the
            first table with an open page has it.

    Raises:
        ValueError: if the pool has too few pages; nothing changes.
    """
    new = [tables[row].copied() for row in rows]
    stay = set[Page]() if copies_all else {page for page in pages_of(new) if not page.sealed}
    places = []
    for table in new:
        for index, page in enumerate(table.pages):
            if page in stay:
                stay.remove(page)
            elif not page.sealed:
                places.append((table, index))
    memory.reserve([table.pages[index].slab for table, index in places])
    for table, index in places:
        page = table.pages[index]
        table.pages[index] = memory.copy(page, page.slab)
    return new


# ---- the tables of one cache ----


class Tables:
    """The tables of a cache. Its pages are released with `owner`, at the latest.

    Attributes:
        tables: of each row.
        retired: pages that left the tables in the last call, whose parts are read until the next.
        reading: the parts that were returned last, in a pool that offloads pages.
    """

    def __init__(self, owner: object, memory: Memory) -> None:
        self.memory = memory
        self.tables: list[PageTable] = []
        self.retired: list[Page] = []
        self.reading = Reading()
        self._read: tuple[object, list[Segment]] | None = None  # tables and their segments
        self._moves = 0  # of the pool's pages, when they were read
        if memory.offloading is not None:
            memory.offloading.watch(self)
        self._end = weakref.finalize(owner, memory.drop, self.tables, self.retired)
        self._end.atexit = False
        self.are_released = False  # a plain attribute: torch.compile cannot read the finaliser

    def replace(self, new: Sequence[PageTable], *, retires: bool = False) -> None:
        """Hold other tables.

        Args:
            new: the tables, whose pages are not counted yet.
            retires: whether pages that leave are held until `settle`, because parts of this call
                are read.
        """
        before, after = Counter(pages_of(self.tables)), Counter(pages_of(new))
        before.update(self.retired)
        for page in (after - before).elements():
            self.memory.retain(page)
        read = self._read
        self._read = (self.tables, read[1]) if read is not None and read[0] is new else None
        self.tables[:] = new
        self.retired[:] = (before - after).elements()
        if not retires:
            self._release_retired()

    def settle(self) -> None:
        """A new call begins: release the pages that only the parts of the last one need."""
        self._release_retired()
        if self.memory.offloading is not None:
            self.reading = Reading(self.memory.operation())

    def _release_retired(self) -> None:
        while self.retired:
            self.memory.release(self.retired.pop())

    def release(self) -> None:
        """Release all pages."""
        self.replace([])
        self._end.detach()
        self.are_released = True

    def parts(
        self,
        start: int,
        stop: int,
        like: tuple[Tensor, ...],
        tables: Sequence[PageTable] | None = None,
    ) -> tuple[Part, ...]:
        """The slots `start..stop` of these tables, or of others; an empty part of the streams
        `like` if there are none."""
        offloading = self.memory.offloading
        tables = self.tables if tables is None else tables
        if offloading is not None and offloading.moves != self._moves:
            self._read, self._moves = None, offloading.moves
        if self._read is None or self._read[0] is not tables:
            self._read = tables, segments_of(tables)
        parts = parts_of(self._read[1], self.memory.page_size, start, stop)
        if offloading is not None:
            self.reading = Reading(self.memory.operation(), parts)
        return parts or (Part(start, start, like),)

    # ---- bytes ----

    def page_bytes(self) -> int:
        """Bytes of the pages; those of a page that rows share are counted once."""
        return sum(page.slab.page_bytes for page in set(pages_of(self.tables)))

    def token_bytes(self, lengths: Sequence[int]) -> int:
        """Bytes of the tokens of rows of these lengths, of shared pages once."""
        found: dict[Page, int] = {}
        size = self.memory.page_size
        for table, length in zip(self.tables, lengths, strict=True):
            for number, page in enumerate(table.pages, table.first):
                tokens = min(size, max(0, length - number * size))
                found[page] = max(tokens, found.get(page, 0))
        return sum(page.slab.page_bytes * tokens // size for page, tokens in found.items())
