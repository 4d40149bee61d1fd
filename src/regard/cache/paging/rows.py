"""The page tables of a batch, as one cache holds them: their parts, and the end of their pages."""

import weakref
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from regard.cache.paging import changing
from regard.cache.paging.bookkeeping import Change, Kind, Pages
from regard.cache.paging.offloading import Reading
from regard.cache.paging.pages import Page, PageTable
from regard.cache.paging.segments import Segment, parts_of, segments_of
from regard.cache.parts import Part


class Rows:
    """The tables of a cache. Its pages are released with `owner`, at the latest.

    Attributes:
        tables: of each row.
        retired: pages that left the tables in the last call, whose parts are read until the next.
        reading: the parts that were returned last, in a pool that offloads pages.
    """

    def __init__(self, owner: object, pool: Pages) -> None:
        self.pool = pool
        self.tables: list[PageTable] = []
        self.retired: list[Page] = []
        self.reading = Reading()
        self._segments: list[Segment] | None = None  # memoised until a table changes
        self._moves = 0  # of the pool's pages, when they were read
        if pool.offloading is not None:
            pool.offloading.watch(self)
        self._end = weakref.finalize(owner, pool.drop, self.tables, self.retired)
        self._end.atexit = False
        self.are_released = False  # a plain attribute: torch.compile cannot read the finaliser

    @property
    def page_bytes(self) -> int:
        """Bytes of the pages; those of a page that rows share are counted once."""
        return sum(page.slab.page_bytes for page in set(changing.pages_of(self.tables)))

    def token_bytes(self, lengths: Sequence[int]) -> int:
        """Bytes of the tokens of rows of these lengths, of shared pages once."""
        found: dict[Page, int] = {}
        size = self.pool.page_size
        for table, length in zip(self.tables, lengths, strict=True):
            for number, page in enumerate(table.pages, table.first):
                tokens = min(size, max(0, length - number * size))
                found[page] = max(tokens, found.get(page, 0))
        return sum(page.slab.page_bytes * tokens // size for page, tokens in found.items())

    def check_window(self, asked: object, stops: Sequence[int], window: int, length: int) -> None:
        """Raise unless the tables hold the window of the token after `stops` tokens of each row.

        Args:
            asked: what `truncate` was given.
            stops: tokens that remain in each row.
            window: counted with the query's own key.
            length: tokens so far.

        Raises:
            ValueError: if pages of a window were released, or a prefix has not been given rows yet.
        """
        size = self.pool.page_size
        if len(stops) != len(self.tables):
            raise ValueError(
                f"length={asked} is of rows, and this cache of a prefix has none before its first "
                "update; truncate to a whole number"
            )
        for table, stop in zip(self.tables, stops, strict=True):
            oldest = max(0, stop - window + 1)
            if oldest < min(stop, table.first * size):
                raise ValueError(
                    f"length={asked} needs keys from slot {oldest} on, those before "
                    f"{table.first * size} were released; give PagedCache(pool, window={window}, "
                    f"rollback={length - stop}) or more"
                )

    def set(self, tables: Sequence[PageTable]) -> None:
        """Replace the tables, whose references are counted already."""
        self.tables[:] = tables
        self._segments = None

    def settle(self) -> None:
        """Release the pages that the call before returned for the last time: a new one begins."""
        while self.retired:
            self.pool.release(self.retired.pop())
        if self.pool.offloading is not None:
            self.reading = Reading(self.pool.operation())

    def retire(self, pages: Sequence[Page]) -> None:
        """Release pages that left the tables at the next call."""
        if pages:
            self.retired += pages
            self._segments = None

    def retire_before(self, numbers: Sequence[int]) -> None:
        """Retire the pages of each row before that number."""
        for table, number in zip(self.tables, numbers, strict=True):
            count = min(number - table.first, len(table.pages))
            if count > 0:
                self.retire(table.pages[:count])
                del table.pages[:count]
                table.first += count

    def cut_fits(self, kind: Kind, lengths: Sequence[int]) -> bool:
        """Whether what a cut copies fits beside the pages that it releases.

        Raises:
            ValueError: if it does not even fit in their place.
        """
        size = self.pool.page_size
        new = changing.cut(self.tables, lengths, size)
        return self._fit(len(changing.cut_pages(kind, new, lengths, size)), new)

    def cut(self, kind: Kind, lengths: Sequence[int]) -> None:
        """Leave the first tokens of each row; all of it, or nothing if it is interrupted."""
        with Change(self.pool):
            new = changing.cut(self.tables, lengths, self.pool.page_size)
            left = changing.left_by(self.tables, new)
            new = changing.opened(self.pool, kind, new, lengths)
            for page in left.elements():
                self.pool.release(page)
        self.set(new)

    def choice_fits(self, rows: Sequence[int]) -> bool:
        """Whether the copies for these rows fit beside the other pages. Raises as `cut_fits`."""
        return self._fit(len(changing.copies(self.tables, rows)), [self.tables[n] for n in rows])

    def choose(self, rows: Sequence[int]) -> None:
        """Have these rows; all of it, or nothing if it is interrupted."""
        with Change(self.pool):
            new = changing.chosen(self.pool, self.tables, rows)
        self.set(new)

    def _fit(self, copies: int, new: Sequence[PageTable]) -> bool:
        self.pool.check_room(copies, freed=changing.freed(changing.left_by(self.tables, new)))
        return self.pool.fits(copies)

    def undo(self, before: Sequence[PageTable]) -> None:
        """Replace the tables by those before an update that failed, whose pages are released."""
        self.retired.clear()
        self.set(before)

    def go_back(self, before: Sequence[PageTable]) -> None:
        """Replace the tables by those before an update; pages that it took are released."""
        held = Counter(changing.pages_of(self.tables)) + Counter(self.retired)
        for page in (held - Counter(changing.pages_of(before))).elements():
            self.pool.release(page)
        self.retired.clear()
        self.set(before)

    def release(self) -> None:
        """Release all pages."""
        self.settle()
        for page in changing.pages_of(self.tables):
            self.pool.release(page)
        self.set([])
        self._end.detach()
        self.are_released = True

    def parts(self, start: int, stop: int, like: tuple[Tensor, ...]) -> tuple[Part, ...]:
        """The slots `start..stop`; an empty part of the streams `like` if there are none."""
        offloading = self.pool.offloading
        if offloading is not None and offloading.moves != self._moves:
            self._segments, self._moves = None, offloading.moves
        if self._segments is None:
            self._segments = segments_of(self.tables)
        parts = parts_of(self._segments, self.pool.page_size, start, stop)
        if offloading is not None:
            self.reading = Reading(self.pool.operation(), parts)
        return parts or (Part(start, start, like),)
