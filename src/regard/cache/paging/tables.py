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
from regard.cache.paging.pages import Page, PageTable, Slab
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


class TableChange(NamedTuple):
    """New tables in place of others, before open pages are copied; and the cost of that."""

    before: Sequence[PageTable]
    tables: list[PageTable]
    copied: list[tuple[PageTable, int, Slab]]  # a table, the index of its page, the copy's slab
    opened: Sequence[PageTable] = ()  # whose last pages will be written

    @property
    def copies(self) -> int:
        """The number of pages that are copied."""
        return len(self.copied)

    @property
    def left(self) -> "Counter[Page]":
        """The references that the change drops."""
        return Counter(pages_of(self.before)) - Counter(pages_of(self.tables))

    @property
    def unreferenced(self) -> int:
        """Pages that are in no table once the references are dropped."""
        return sum(count == page.references for page, count in self.left.items())

    @property
    def freed(self) -> int:
        """Unreferenced pages of no stored prefix, free once the references are dropped."""
        return sum(n == page.references and page.node is None for page, n in self.left.items())

    def carry_out(self, memory: Memory) -> list[PageTable]:
        """The tables with the copies. Raises a ValueError if the pool has too few pages; nothing
        changes then."""
        memory.reserve([slab for *_, slab in self.copied])
        for table, index, slab in self.copied:
            table.pages[index] = memory.copy(table.pages[index], slab)
        for table in self.opened:
            table.pages[-1].sealed = False
        return self.tables


def cut(kind: Kind | None, tables: Sequence[PageTable], lengths: Sequence[int]) -> TableChange:
    """The pages of the first tokens of each row. Last pages that are cut are open: copies, unless
    no other table has them. A cache without a kind has no pages yet."""
    if kind is None:
        return TableChange((), [], [])
    size = kind.open.page_size
    new = [table.cut(length, size) for table, length in zip(tables, lengths, strict=True)]
    rows = zip(new, lengths, strict=True)
    opened = [table for table, length in rows if length % size and table.pages]
    last = [(table, len(table.pages) - 1, kind.open) for table in opened]
    copies = [each for each in last if _must_be_copied(kind, each[0].pages[-1])]
    return TableChange(tables, new, copies, opened)


def _must_be_copied(kind: Kind, page: Page) -> bool:
    return page.sealed and not (page.is_private and page.slab is kind.open)


def select(
    tables: Sequence[PageTable], rows: Sequence[int], *, copies_all: bool = False
) -> TableChange:
    """The tables of these rows, which may come several times, each with an open page of its own.

    The first table with an open page has it, unless `copies_all`: then every open page is copied,
    because the tables stay, too.
    """
    new = [tables[row].copied() for row in rows] if tables else []
    stay = set[Page]() if copies_all else {page for page in pages_of(new) if not page.sealed}
    copies = []
    for table in new:
        for index, page in enumerate(table.pages):
            if page in stay:
                stay.remove(page)
            elif not page.sealed:
                copies.append((table, index, page.slab))
    return TableChange(tables, new, copies)


# ---- the tables of one cache ----


class Tables:
    """The tables of a cache. Its pages are released with `owner`, at the latest."""

    def __init__(self, owner: object, memory: Memory) -> None:
        self.memory = memory
        self.tables: list[PageTable] = []  # of each row
        self.retired: list[Page] = []  # that left in the last call, whose parts are read until now
        self.reading = Reading()  # the parts that were returned last, in a pool that offloads pages
        self._read: tuple[object, list[Segment]] | None = None  # tables and their segments
        self._moves = 0  # of the pool's pages, when they were read
        if memory.offloading is not None:
            memory.offloading.watch(self)
        self._end = weakref.finalize(owner, memory.drop, self.tables, self.retired)
        self._end.atexit = False
        self.are_released = False  # a plain attribute: torch.compile cannot read the finaliser

    def replace(self, new: Sequence[PageTable], *, retires: bool = False) -> None:
        """Hold other tables, whose pages are not counted yet. With `retires`, pages that leave are
        held until `settle`, because parts of this call are read."""
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

    @property
    def segments(self) -> list[Segment]:
        """The ranges of pages that were read last; none if the tables have changed since."""
        return [] if self._read is None or self._read[0] is not self.tables else self._read[1]

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
