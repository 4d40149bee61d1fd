"""The memory of a pool: its pages, how many tables each is in, and which are evicted."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from regard.cache.paging.formats import PageFormat, format_of
from regard.cache.paging.offloading import Offload, Offloading
from regard.cache.paging.pages import Outline, Page, PageTable, Slab
from regard.cache.paging.prefixes import Prefixes
from regard.cache.streams import check_whole
from regard.words import counted


class PoolBytes(NamedTuple):
    """Bytes of the pages of a pool.

    Attributes:
        held: of pages that sequences hold; a page that several hold is counted once.
        reusable: of stored prefixes that no sequence holds; they are evicted where room is needed.
        free: allocated, and in no use.

    Examples:
        >>> import torch
        >>> from regard import PagedCache, PagePool
        >>> pool = PagePool(num_pages=8, page_size=4)
        >>> cache = PagedCache(pool)
        >>> _ = cache.update(torch.zeros(1, 1, 6, 8))
        >>> pool.nbytes.held == 2 * 4 * 8 * 4  # two pages
        True
    """

    held: int
    reusable: int
    free: int


class Kind(NamedTuple):
    """The memory of layers whose streams have the same shapes."""

    open: Slab
    sealed: Slab


class Change:
    """A `with` block that changes tables, with the memory's lock held. Pages that it takes and that
    are in no table when it ends, also by an error, are free again."""

    def __init__(self, memory: "Memory") -> None:
        self.memory = memory
        self.taken: list[Page] = []

    def __enter__(self) -> None:
        self.memory.lock.acquire()
        assert not self.taken, "one change at a time"

    def __exit__(self, *_: object) -> None:
        for page in self.taken:
            if not page.references and page.node is None:
                self.memory.free(page)
        self.taken.clear()
        self.memory.lock.release()


class Memory:
    """The pages of a pool. Methods are called with `lock` held."""

    def __init__(
        self, num_pages: int, page_size: int, format: str | PageFormat, offload: Offload | None
    ) -> None:
        check_whole("num_pages", num_pages, least=1)
        check_whole("page_size", page_size, least=1)
        if not isinstance(offload, Offload | None):
            raise TypeError(f"offload is Offload(hot_pages), or None, got {offload!r}")
        self.num_pages, self.page_size, self.format = num_pages, page_size, format_of(format)
        self.lock = threading.RLock()
        self.change = Change(self)
        self.prefixes = Prefixes(page_size, clock=self.operation)
        self.offloading = None if offload is None else Offloading(offload, num_pages)
        self.pages: set[Page] = set()  # in use
        self._kinds: dict[tuple[Outline, ...], Kind] = {}
        self._operations = 0
        self._dropped: deque[Page] = deque()  # references of caches that were garbage collected

    def operation(self) -> int:
        """The number of this operation: pages used last have the greatest."""
        self._operations += 1
        return self._operations

    # ---- slabs ----

    def slabs(self) -> list[Slab]:
        """The slabs of all kinds."""
        found = {id(each): each for kind in self._kinds.values() for each in kind}
        return [*found.values(), *(self.offloading.slabs.values() if self.offloading else ())]

    def kind_of(self, outlines: tuple[Outline, ...]) -> Kind:
        """The memory of layers with these streams."""
        if outlines not in self._kinds:
            plain = tuple(each.plain for each in outlines)
            slab = sealed = Slab(plain, self.page_size, sealed=False)
            if outlines != plain:
                sealed = Slab(outlines, self.page_size, sealed=True)
            self._kinds[outlines] = Kind(slab, sealed)
            if self.offloading is not None:
                self.offloading.add(sealed)
        return self._kinds[outlines]

    def kind_with(self, slab: Slab) -> Kind:
        """The kind that has this slab, or the slab whose copy in host memory it is."""
        return next(kind for kind in self._kinds.values() if (slab.host_of or slab) in kind)

    def in_order(self) -> list[Page]:
        """The pages in use, in the order of their places."""
        self.settle()
        order = {id(slab): number for number, slab in enumerate(self.slabs())}
        return sorted(self.pages, key=lambda page: (order[id(page.slab)], page.index))

    def nbytes(self) -> PoolBytes:
        """Bytes of pages held, reusable and free."""
        self.settle()
        held = sum(page.slab.page_bytes for page in self.pages if page.references)
        used = sum(page.slab.page_bytes for page in self.pages)
        allocated = sum(slab.allocated_bytes for slab in self.slabs())
        return PoolBytes(held, used - held, allocated - used)

    # ---- room ----

    def check_room(self, needed: int, freed: int = 0) -> None:
        """Raise unless so many pages can be taken, after `freed` pages are free.

        Raises:
            ValueError: if there are too few, even without the reusable pages; nothing changes.
        """
        self.settle()
        room = self.num_pages - len(self.pages) + freed
        if needed <= room:
            return
        reusable = sum(not page.references for page in self.pages)
        if needed > room + reusable:
            raise ValueError(
                f"this call needs {counted(needed, 'page')} more, and of num_pages="
                f"{self.num_pages} {room} are free and {reusable} reusable: sequences hold "
                f"{len(self.pages) - reusable}; release() caches that are done, or make a larger "
                "PagePool"
            )

    def fits(self, needed: int, freed: int) -> bool:
        """Whether so many pages can be taken before `freed` others are free. Raises as
        `check_room`."""
        self.check_room(needed, freed)
        if needed <= self.num_pages - len(self.pages):
            return True
        return needed <= self.num_pages - sum(page.references > 0 for page in self.pages)

    def reserve(self, needed: Sequence[Slab]) -> None:
        """Make room for one more page in each of these slabs.

        Raises:
            ValueError: as `check_room`.
        """
        self.check_room(len(needed))
        self.evict(len(needed) - (self.num_pages - len(self.pages)))
        if self.offloading is not None:
            self.offloading.make_room(self.pages, needed)
        for slab in set(needed):
            slab.reserve(sum(each is slab for each in needed))

    def evict(self, count: int) -> None:
        """Free this many reusable pages, least recently used first, or all there are."""
        while count > 0 and (pages := self.prefixes.evict(count)):
            for page in pages:
                self.free(page)
            count -= len(pages)

    # ---- pages ----

    def take(self, slab: Slab, after: Page | None = None) -> Page:
        """A page that `reserve` made room for, beside `after` if that place is free."""
        beside = after.index if after is not None and after.slab is slab else None
        page = Page(slab, slab.take(beside))
        self.pages.add(page)
        self.change.taken.append(page)
        return page

    def copy(self, page: Page, slab: Slab) -> Page:
        """A page that `reserve` made room for, with the values of another."""
        new = self.take(slab, after=page)
        slab.put(new.start, page.slab.read(page.tokens))
        return new

    def retain(self, page: Page) -> None:
        """Count one more table that a page is in."""
        assert page in self.pages, "a page of this pool that is in use"
        page.references += 1

    def release(self, page: Page) -> None:
        """Count one table less; a page that is in none is free, or reusable if it is stored."""
        assert page.references > 0, "a page is released as often as it was retained"
        page.references -= 1
        if not page.references and page.node is None:
            self.free(page)

    def free(self, page: Page) -> None:
        """Free a page that is in no table, and in no stored prefix."""
        assert not page.references and page.node is None, "nothing refers to a free page"
        self.pages.remove(page)
        page.slab.give(page.index)

    def drop(self, tables: list[PageTable], retired: list[Page]) -> None:
        """Release the pages of a cache that was garbage collected, at the next operation: this may
        be called at any time, also while the lock is held."""
        for table in tables:
            self._dropped.extend(table.pages)
        self._dropped.extend(retired)

    def settle(self) -> None:
        """Release the pages of caches that were garbage collected."""
        while self._dropped:
            self.release(self._dropped.popleft())
