"""What a pool counts: which pages are in use, by how many tables, and which are evicted next."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from regard.cache.paging.contexts import Context
from regard.cache.paging.formats import PageFormat, format_of
from regard.cache.paging.offloading import Offload, Offloading
from regard.cache.paging.pages import Page, PageTable
from regard.cache.paging.prefixes import Prefixes
from regard.cache.paging.slabs import Outline, Slab
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
        >>> from regard.cache import PoolBytes
        >>> pool = PagePool(num_pages=8, page_size=4)
        >>> cache = PagedCache(pool)
        >>> _ = cache.update(torch.zeros(1, 1, 6, 8))
        >>> isinstance(pool.nbytes, PoolBytes), pool.nbytes.held == 2 * 4 * 8 * 4  # two pages
        (True, True)
    """

    held: int
    reusable: int
    free: int


class Kind(NamedTuple):
    """The memory of layers whose streams have the same shapes."""

    open: Slab
    sealed: Slab


class Change:
    """A change of tables. If it fails or is interrupted, the references of all pages are as before:
    pages that it took or retained are released. Those that it releases are released at its end.

    Args:
        pool: with its lock held.
    """

    def __init__(self, pool: "Pages") -> None:
        self.pool = pool
        self.gained: list[Page] = []
        self.left: list[Page] = []

    def __enter__(self) -> None:
        assert self.pool.change is None, "one change at a time"
        self.pool.change = self

    def __exit__(self, failure: object, *_: object) -> None:
        self.pool.change = None
        for page in self.left if failure is None else self.gained:
            self.pool.release(page)


class Pages:
    """What a pool counts: its pages, which tables they are in, and the slabs that they lie in.

    Methods other than properties are called with `lock` held.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 64,
        *,
        format: str | PageFormat = "plain",
        offload: Offload | None = None,
    ) -> None:
        check_whole("num_pages", num_pages, least=1)
        check_whole("page_size", page_size, least=1)
        if not isinstance(offload, Offload | None):
            raise TypeError(f"offload is Offload(hot_pages), or None, got {offload!r}")
        self.num_pages, self.page_size, self.format = num_pages, page_size, format_of(format)
        self.lock = threading.RLock()
        self.change: Change | None = None  # the one that is being made
        self.weights: str | None = None
        self.prefixes = Prefixes(page_size, clock=self.operation)
        self.offloading = None if offload is None else Offloading(offload, num_pages)
        self._kinds: dict[tuple[Outline, ...], Kind] = {}
        self._pages: set[Page] = set()  # in use
        self._operations = 0
        self._dropped: deque[Page] = deque()  # references of caches that were garbage collected

    @property
    def pages_in_use(self) -> int:
        """Pages that sequences hold, or that may be reused."""
        with self.lock:
            self.settle()
            return len(self._pages)

    @property
    def nbytes(self) -> PoolBytes:
        """Bytes of pages held, reusable and free."""
        with self.lock:
            self.settle()
            held = sum(page.slab.page_bytes for page in self._pages if page.references)
            used = sum(page.slab.page_bytes for page in self._pages)
            allocated = sum(slab.allocated_bytes for slab in self.slabs())
            return PoolBytes(held, used - held, allocated - used)

    @property
    def cold_pages(self) -> int:
        """Pages in use that are offloaded."""
        with self.lock:
            self.settle()
            return 0 if self.offloading is None else self.offloading.cold_pages

    def evict(self, keep: int = 0) -> int:
        """Free reusable pages, least recently used first, until so many are left; returns how many
        were freed.

        Args:
            keep: reusable pages that stay, at most.
        """
        check_whole("keep", keep)
        with self.lock:
            self.settle()
            before = len(self._pages)
            self._evict(sum(not page.references for page in self._pages) - keep)
            return before - len(self._pages)

    def slabs(self) -> list[Slab]:
        """The slabs of all kinds."""
        found = {id(each): each for kind in self._kinds.values() for each in kind}
        return [*found.values(), *(self.offloading.slabs if self.offloading else ())]

    def pages(self) -> list[Page]:
        """The pages in use, in the order of their places."""
        with self.lock:
            self.settle()
            order = {id(slab): number for number, slab in enumerate(self.slabs())}
            return sorted(self._pages, key=lambda page: (order[id(page.slab)], page.index))

    def kind_of(self, outlines: tuple[Outline, ...]) -> Kind:
        """The memory of layers with these streams."""
        if outlines not in self._kinds:
            opened = tuple(each.plain for each in outlines)
            slab = Slab(opened, self.page_size, sealed=False)
            codes = slab
            if outlines != opened:
                codes = Slab(outlines, self.page_size, sealed=True)
            self._kinds[outlines] = Kind(slab, codes)
            if self.offloading is not None:
                self.offloading.add(codes)
        return self._kinds[outlines]

    def kind_with(self, slab: Slab) -> Kind:
        """The memory that a slab belongs to."""
        hot = slab if self.offloading is None else self.offloading.hot_of(slab)
        return next(kind for kind in self._kinds.values() if hot in kind)

    def check_room(self, needed: int, freed: int = 0) -> None:
        """Raise unless so many pages can be taken, after `freed` pages are free.

        Raises:
            ValueError: if there are too few, even without the reusable pages; nothing changes.
        """
        self.settle()
        room = self.num_pages - len(self._pages) + freed
        if needed <= room:
            return
        reusable = sum(not page.references for page in self._pages)
        if needed > room + reusable:
            raise ValueError(
                f"this call needs {counted(needed, 'page')} more, and of num_pages="
                f"{self.num_pages} {room} are free and {reusable} reusable: sequences hold "
                f"{len(self._pages) - reusable}; release() caches that are done, or make a larger "
                "PagePool"
            )

    def fits(self, needed: int) -> bool:
        """Whether so many pages can be taken, before any other is released."""
        if needed <= self.num_pages - len(self._pages):
            return True
        return needed <= self.num_pages - sum(page.references > 0 for page in self._pages)

    def reserve(self, needed: Sequence[Slab]) -> None:
        """Make room for one more page in each of these slabs.

        Raises:
            ValueError: as `check_room`.
        """
        self.check_room(len(needed))
        self._evict(len(needed) - (self.num_pages - len(self._pages)))
        if self.offloading is not None:
            self.offloading.make_room(self._pages, needed)
        for slab in set(needed):
            slab.reserve(sum(each is slab for each in needed))

    def take(self, slab: Slab, after: Page | None = None) -> Page:
        """A page that `reserve` made room for, beside `after` if that place is free."""
        beside = after.index if after is not None and after.slab is slab else None
        page = Page(slab, slab.take(beside))
        page.references = 1
        self._pages.add(page)
        if self.change is not None:
            self.change.gained.append(page)
        return page

    def retain(self, page: Page) -> None:
        """Count one more table that a page is in."""
        assert page in self._pages, "a page of this pool that is in use"
        page.references += 1
        if self.change is not None:
            self.change.gained.append(page)

    def release(self, page: Page) -> None:
        """Count one table less; a page that is in none is free, or reusable if it is stored."""
        assert page.references > 0, "a page is released as often as it was retained"
        if self.change is not None:
            self.change.left.append(page)
            return
        page.references -= 1
        page.used = self.operation()
        if not page.references and page.node is None:
            self._free(page)

    def operation(self) -> int:
        """The number of this operation: pages used last have the greatest."""
        self._operations += 1
        return self._operations

    def drop(self, tables: list[PageTable], retired: list[Page]) -> None:
        """Release the pages of a cache that was garbage collected, at the next operation: this may
        be called at any time, also while the lock is held."""
        for table in tables:
            self._dropped.extend(table.pages)
        self._dropped.extend(retired)

    def settle(self) -> None:
        """Release what garbage collected caches held; in a change, after it."""
        while self._dropped and self.change is None:
            self.release(self._dropped.popleft())

    def copied(self, page: Page) -> Page:
        """A page that `reserve` made room for, with the content of another in its slab."""
        new = self.take(page.slab, after=page)
        size = self.page_size
        tokens = torch.arange(page.start, page.start + size, device="cpu")
        page.slab.put(new.start, page.slab.read(tokens))
        return new

    def bind(self, context: Context) -> None:
        """Let the pool belong to the model with these weights.

        Raises:
            ValueError: if it holds pages of another one.
        """
        if self._pages and self.weights is not None and self.weights != context.weights:
            raise ValueError(
                f"the pool holds pages of the model with weights {self.weights[:12]}, this one "
                f"has {context.weights[:12]}; give each model a pool of its own, and a new one "
                "after training or another dtype"
            )
        self.weights = context.weights

    def _evict(self, count: int) -> None:
        """Free this many reusable pages, least recently used first, or all there are."""
        while count > 0 and (pages := self.prefixes.evict()):
            for page in pages:
                assert isinstance(page, Page) and not page.references, "no sequence holds it"
                self._free(page)
            count -= len(pages)

    def _free(self, page: Page) -> None:
        if page.node is not None:
            self.prefixes.forget(page)
        self._pages.remove(page)
        page.slab.give(page.index)
