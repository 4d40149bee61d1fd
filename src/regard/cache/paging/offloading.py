"""Offloaded pages: sealed pages in the memory of the host, behind a bounded hot set.

Which pages are hot follows from when they were last used. A page is moved while nothing reads it:
the parts of a cache's last call, as long as they exist, hold its pages where they are.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol, runtime_checkable

from torch import Tensor

from regard.cache.codes import QuantizedStream
from regard.cache.paging.pages import Page, PageTable, Slab
from regard.cache.parts import Part
from regard.cache.streams import check_whole

_AHEAD = 8  # a move makes room for an eighth of the hot pages, so that moves are few


@dataclass(frozen=True)
class Offload:
    """Sealed pages that have not been used for the longest time go to the memory of the host.

    Pages that are open, that are being read or that one call writes are hot, however many they are.
    On the CPU cold pages are read where they lie; elsewhere copies of them, a piece at a time.

    Args:
        hot_pages: pages in the memory of the layers' device.

    Raises:
        ValueError: if `hot_pages` is below 1.

    Examples:
        >>> import torch
        >>> from regard import PagedCache, PagePool
        >>> from regard.cache import Offload
        >>> pool = PagePool(num_pages=100, page_size=4, offload=Offload(hot_pages=4))
        >>> cache, k = PagedCache(pool), torch.randn(1, 2, 40, 8)
        >>> parts = cache.update(k, k)
        >>> del parts  # pages that are being read are not moved
        >>> parts = cache.update(k[:, :, :1], k[:, :, :1])
        >>> pool.pages_in_use, pool.cold_pages
        (11, 7)
        >>> torch.equal(torch.cat([part.streams[0] for part in parts], 2)[:, :, :40], k)
        True
    """

    hot_pages: int

    def __post_init__(self) -> None:
        check_whole("hot_pages", self.hot_pages, least=1)


class Reading:
    """Weak references to the parts that a cache returned last, in the operation number `used`."""

    def __init__(self, used: int = 0, parts: Iterable[Part] = ()) -> None:
        self.used = used
        self._anchors = [weakref.ref(each) for part in parts for each in _anchors(part)]

    @property
    def is_going_on(self) -> bool:
        """Whether a caller still holds one of the parts, which may then be read."""
        return any(each() is not None for each in self._anchors)


def _anchors(part: Part) -> Iterator[object]:
    """Objects of which one exists as long as a part is read."""
    if isinstance(part.streams, tuple):
        yield from part.streams
        return
    yield part.streams
    for each in part.stored:
        if isinstance(each, QuantizedStream | Tensor):
            yield each.codes if isinstance(each, QuantizedStream) else each


@runtime_checkable
class Reader(Protocol):
    """The tables of a cache, and the parts that it returned last."""

    tables: list[PageTable]
    retired: list[Page]
    reading: Reading


class Offloading:
    """The slabs of cold pages, and the choice of the pages that move there; the pool is locked."""

    def __init__(self, offload: Offload, num_pages: int) -> None:
        self.offload, self._num_pages = offload, num_pages
        self.moves = 0  # tables that were read before another move are read again
        self.slabs: dict[Slab, Slab] = {}  # of cold pages, by the slab whose pages they take
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()

    @property
    def cold_pages(self) -> int:
        """The number of cold pages."""
        return sum(slab.in_use for slab in self.slabs.values())

    def watch(self, reader: Reader) -> None:
        """Count the pages of a cache's tables as in use, as long as the cache exists."""
        self._readers.add(reader)

    def add(self, hot: Slab) -> None:
        """Let sealed pages of a slab be moved."""
        self.slabs[hot] = Slab(
            hot.outlines, hot.page_size, sealed=hot.sealed, host_of=hot, most=self._num_pages
        )

    def make_room(self, pages: Collection[Page], needed: Sequence[Slab]) -> None:
        """Move some of the pages in use, so that there is room for more hot ones in the slabs that
        are needed; pages that are being read stay."""
        new = sum(slab.host_of is None for slab in needed)
        excess = len(pages) - self.cold_pages + new - self.offload.hot_pages
        if excess <= 0:
            return
        chosen = self._movable(pages)[: excess + self.offload.hot_pages // _AHEAD]
        for slab, cold in self.slabs.items():
            count = sum(page.slab is slab for page in chosen)
            if count:
                cold.reserve(count)
        last: dict[Slab, int] = {}  # the number of the page that was moved before
        for page in chosen:
            cold = self.slabs[page.slab]
            last[cold] = _move(page, cold, last.get(cold))
        self.moves += bool(chosen)

    def _movable(self, pages: Collection[Page]) -> list[Page]:
        """Sealed hot pages that nothing reads, least recently used first, then as in a table."""
        used = {page: page.used for page in pages if page.sealed and page.slab in self.slabs}
        in_tables: dict[Page, None] = {}
        for reader in self._readers:
            reading = reader.reading
            columns = zip_longest(*(table.pages for table in reader.tables))
            for page in (*reader.retired, *(each for column in columns for each in column)):
                if page in used and reading.is_going_on:
                    del used[page]
                elif page in used:
                    used[page] = max(used[page], reading.used)
                    in_tables[page] = None
        # The first pages of all rows first: so neighbours are moved together, and rows have few
        # pages of one number in different slabs, which are copied when they are read.
        order = [page for page in used if page not in in_tables]
        order += [page for page in in_tables if page in used]
        return sorted(order, key=used.__getitem__)


def _move(page: Page, cold: Slab, after: int | None) -> int:
    """Copy the memory of a page to a cold slab, where there is room; returns the new number."""
    hot, before = page.slab, page.index
    number = cold.take(after)
    for source, target in zip(hot.stored(before), cold.stored(number), strict=True):
        target.copy_(source)
    page.slab, page.index = cold, number
    hot.give(before)
    return number
