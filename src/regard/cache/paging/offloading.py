"""Offloaded pages: sealed pages in the memory of the host, behind a bounded hot set.

Which pages are hot follows from when they were last used. A page is moved while nothing reads it:
the parts of a cache's last call, as long as they exist, hold its pages where they are.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.cache.codes import QuantizedStream
from regard.cache.paging.pages import Page, PageTable
from regard.cache.paging.slabs import Slab
from regard.cache.parts import Part
from regard.cache.streams import check_whole, writable

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
        >>> from regard.cache.paging.offloading import Offload
        >>> pool = PagePool(num_pages=100, page_size=4, offload=Offload(hot_pages=4))
        >>> cache, k = PagedCache(pool), torch.randn(1, 2, 40, 8)
        >>> parts = cache.update(k, k)
        >>> del parts  # what is being read is not moved
        >>> parts = cache.update(k[:, :, :1], k[:, :, :1])
        >>> pool.pages_in_use, pool.cold_pages
        (11, 7)
        >>> torch.equal(torch.cat([part.streams[0] for part in parts], 2)[:, :, :40], k)
        True
    """

    hot_pages: int

    def __post_init__(self) -> None:
        check_whole("hot_pages", self.hot_pages, least=1)


@runtime_checkable
class Reader(Protocol):
    """The tables of a cache, and what it read last."""

    tables: list[PageTable]
    retired: list[Page]
    reading: "Reading"


class Reading:
    """The parts that a cache returned last, by weak references.

    Args:
        used: the number of the operation.
        parts: that were returned.
    """

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


class ColdSlab(Slab):
    """Pages of one kind in host memory.

    Args:
        like: the slab whose pages are moved here.
        most: pages at most.
    """

    def __init__(self, like: Slab, most: int) -> None:
        host = tuple(each._replace(device=torch.device("cpu")) for each in like.outlines)
        super().__init__(host, like.page_size, sealed=like.sealed)
        self.most = most
        self._pinned = any(each.device.type == "cuda" for each in like.outlines)
        (device,) = {each.device for each in like.outlines}
        self.read_on = None if device.type == "cpu" else device

    def memory(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer, not initialised."""
        pin = self._pinned
        return writable(lambda: torch.empty(shape, dtype=dtype, device=device, pin_memory=pin))


class Offloading:
    """The cold pages of a pool, and what decides which ones these are; used with its lock held.

    Args:
        offload: how many pages are hot, and where the others go.
        num_pages: of the pool.

    Attributes:
        moves: how often pages were moved; tables read before another move are read again.
    """

    def __init__(self, offload: Offload, num_pages: int) -> None:
        self.offload, self.moves = offload, 0
        self._num_pages = num_pages
        self._cold: dict[Slab, ColdSlab] = {}  # by the slab whose pages they take
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()

    @property
    def slabs(self) -> list[ColdSlab]:
        """The slabs of cold pages."""
        return list(self._cold.values())

    @property
    def cold_pages(self) -> int:
        """The number of cold pages."""
        return sum(slab.in_use for slab in self._cold.values())

    def watch(self, reader: Reader) -> None:
        """Let the tables of a cache count, as long as it exists."""
        self._readers.add(reader)

    def add(self, slab: Slab) -> None:
        """Let sealed pages of a slab be moved."""
        self._cold[slab] = ColdSlab(slab, self._num_pages)

    def hot_of(self, slab: Slab) -> Slab:
        """The slab whose pages a cold slab takes; another slab itself."""
        return next((hot for hot, cold in self._cold.items() if cold is slab), slab)

    def cold_of(self, slab: Slab) -> Slab:
        """The slab that takes the pages of a slab; if none does, itself."""
        return self._cold.get(slab, slab)

    def make_room(self, pages: Collection[Page], needed: Sequence[Slab]) -> None:
        """Move pages, so that there is room for more hot ones; those being read stay.

        Args:
            pages: all that are in use.
            needed: the slabs of those that will be taken.
        """
        new = sum(not isinstance(slab, ColdSlab) for slab in needed)
        excess = len(pages) - self.cold_pages + new - self.offload.hot_pages
        if excess <= 0:
            return
        chosen = self._movable(pages)[: excess + self.offload.hot_pages // _AHEAD]
        for slab, cold in self._cold.items():
            count = sum(page.slab is slab for page in chosen)
            if count:
                cold.reserve(count)
        last: dict[Slab, int] = {}  # where the page before went
        for page in chosen:
            cold = self._cold[page.slab]
            last[cold] = _move(page, cold, last.get(cold))
        self.moves += bool(chosen)

    def _movable(self, pages: Collection[Page]) -> list[Page]:
        """Sealed hot pages that nothing reads, least recently used first, then as in a table."""
        used = {page: page.used for page in pages if page.sealed and page.slab in self._cold}
        for reader in self._readers:
            reading = reader.reading
            for page in (*reader.retired, *(p for table in reader.tables for p in table.pages)):
                if page not in used:
                    continue
                if reading.is_going_on:
                    del used[page]
                else:
                    used[page] = max(used[page], reading.used)
        return sorted(_as_in_tables(self._readers, used), key=used.__getitem__)


def _as_in_tables(readers: Iterable[Reader], pages: Iterable[Page]) -> list[Page]:
    """Pages in the order of the tables that they are in, the first pages of all rows first.

    So neighbours are moved together, and rows have few pages of one number in different slabs,
    which are copied when they are read.
    """
    left = dict.fromkeys(pages)
    found = []
    for reader in readers:
        for column in zip_longest(*(table.pages for table in reader.tables)):
            for page in column:
                if page in left:
                    del left[page]
                    found.append(page)
    return [*left, *found]


def _move(page: Page, cold: ColdSlab, after: int | None) -> int:
    """Copy what a page stores to a cold slab, where there is room for it; returns its number."""
    hot, before = page.slab, page.index
    number = cold.take(after)
    for source, target in zip(hot.stored(before), cold.stored(number), strict=True):
        target.copy_(source)
    page.slab, page.index = cold, number
    hot.give(before)
    return number
