"""Mistakes in caches, one at a time, which the state machine must find.

Each takes pytest's monkeypatch. They are mistakes that libraries have made: an open page that a
fork shares, a reference that is counted twice or not, a window one slot too narrow.
"""

from regard import KVCache, PagedCache, SlidingCache
from regard.cache import streams
from regard.cache.paging import appending, changing
from regard.cache.paging.bookkeeping import Pages
from regard.cache.paging.rows import Rows
from regard.cache.paging.slabs import Slab


def fork_shares_the_open_page(patch):
    def shared(pool, tables, stay):
        for page in changing.pages_of(tables):
            if not page.sealed and page not in stay:
                pool.retain(page)

    patch.setattr(changing, "_copy_open", shared)


def a_released_page_is_not_counted(patch):
    patch.setattr(Pages, "retain", lambda self, page: None)


def a_page_before_the_window_is_lost(patch):
    def forgotten(self, numbers):
        for table, number in zip(self.tables, numbers, strict=True):
            count = max(0, min(number - table.first, len(table.pages)))
            del table.pages[:count]
            table.first += count
        self._segments = None

    patch.setattr(Rows, "retire_before", forgotten)


def the_window_is_a_slot_too_narrow(patch):
    right = PagedCache._needed
    patch.setattr(
        PagedCache, "_needed", lambda self, n: min(n, right(self, n) + (self.window is not None))
    )


def a_grown_slab_forgets_its_pages(patch):
    right = Slab._grown

    def grown(self, index, outline, capacity):
        before, self.capacity = self.capacity, 0
        try:
            return right(self, index, outline, capacity)
        finally:
            self.capacity = before

    patch.setattr(Slab, "_grown", grown)


def a_cut_page_is_not_copied(patch):
    patch.setattr(changing, "_must_be_copied", lambda kind, page: False)


def a_restored_cache_holds_its_new_pages(patch):
    patch.setattr(Rows, "go_back", lambda self, before: self.set(before))


def parts_are_memoised_too_long(patch):
    def same(self, tables):
        self.tables[:] = tables

    patch.setattr(Rows, "set", same)


def the_wrong_page_is_sealed(patch):
    right = appending.seal

    def sealed(pool, kind, tables, append):
        found = right(pool, kind, tables, append)
        for table in tables[1:]:
            if found and len(table.pages) > 1:
                table.pages[-1], table.pages[-2] = table.pages[-2], table.pages[-1]
        return found

    patch.setattr(appending, "seal", sealed)


def a_prefix_is_one_page_too_long(patch):
    right = PagedCache.of_pages.__func__

    def longer(cls, pool, tables, length, *more):
        return right(cls, pool, tables, length + 1, *more)

    patch.setattr(PagedCache, "of_pages", classmethod(longer))


def a_sliding_window_is_a_slot_too_narrow(patch):
    right = SlidingCache._oldest
    patch.setattr(SlidingCache, "_oldest", lambda self: min(self.length, right(self) + 1))


def rows_are_reordered_without_their_lengths(patch):
    def reorder(self, rows):
        self._held = streams.select_rows(self._held, rows)

    patch.setattr(KVCache, "reorder", reorder)


OF_POOLS = (
    fork_shares_the_open_page,
    a_released_page_is_not_counted,
    a_page_before_the_window_is_lost,
    the_window_is_a_slot_too_narrow,
    a_grown_slab_forgets_its_pages,
    a_cut_page_is_not_copied,
    a_restored_cache_holds_its_new_pages,
    parts_are_memoised_too_long,
    the_wrong_page_is_sealed,
    a_prefix_is_one_page_too_long,
)
OF_CONTIGUOUS = (
    a_sliding_window_is_a_slot_too_narrow,
    rows_are_reordered_without_their_lengths,
)
