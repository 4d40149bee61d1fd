"""Mistakes in caches, one at a time, which the state machine must find.

Each takes pytest's monkeypatch. They are mistakes that libraries have made: an open page that a
fork shares, a reference that is counted twice or not, a window one slot too narrow.
"""

from regard import KVCache, PagedCache, SlidingCache
from regard.cache import streams
from regard.cache.paging import appending, paged, tables
from regard.cache.paging.memory import Memory
from regard.cache.paging.pages import PageTable, Slab
from regard.cache.paging.tables import TableChange, Tables


def fork_shares_the_open_page(patch):
    def shared(tables, rows, *, copies_all=False):
        return TableChange(tables, [tables[row].copied() for row in rows], [])

    patch.setattr(paged, "select", shared)


def a_released_page_is_not_counted(patch):
    patch.setattr(Memory, "retain", lambda self, page: None)


def a_page_before_the_window_is_lost(patch):
    right = PageTable.since

    def forgotten(self, number):
        found = right(self, number)
        for page in self.pages[: found.first - self.first]:
            page.references += 1
        return found

    patch.setattr(PageTable, "since", forgotten)


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
    patch.setattr(tables, "_must_be_copied", lambda kind, page: False)


def a_restored_cache_holds_its_new_pages(patch):
    def restore(self, snapshot):
        self._rows.tables[:], self.pieces, self._kind, self._lengths, self._like = snapshot
        self._rows._read = None

    patch.setattr(PagedCache, "restore", restore)


def parts_are_memoised_too_long(patch):
    right = Tables.replace

    def same(self, new, **how):
        read = self._read
        right(self, new, **how)
        self._read = None if read is None else (self.tables, read[1])

    patch.setattr(Tables, "replace", same)


def the_wrong_page_is_sealed(patch):
    right = appending.with_codes

    def coded(memory, tables, append):
        found = right(memory, tables, append)
        for table in found[1:] if found is not tables else []:
            if len(table.pages) > 1:
                table.pages[-1], table.pages[-2] = table.pages[-2], table.pages[-1]
        return found

    patch.setattr(appending, "with_codes", coded)


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
