"""Changes of page tables: cut, chosen anew, forked. Sealed pages are shared, open ones copied.

Those functions that take a pool return new tables and count the references of their pages, as part
of a `Change`; where the pool has too few pages they raise before anything is changed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from regard.cache.paging.bookkeeping import Kind, Pages
from regard.cache.paging.pages import Page, PageTable


def pages_of(tables: Iterable[PageTable]) -> Iterator[Page]:
    """The pages of all rows; one that rows share comes once for each."""
    return (page for table in tables for page in table.pages)


def cut(tables: Sequence[PageTable], lengths: Sequence[int], size: int) -> list[PageTable]:
    """The pages of the first so many tokens of each row, the last one of each as it is."""
    return [_cut(table, length, size) for table, length in zip(tables, lengths, strict=True)]


def _cut(table: PageTable, length: int, size: int) -> PageTable:
    stop = -(-length // size)  # one past the last page
    if stop <= table.first:
        return PageTable([], length // size)
    return PageTable(table.pages[: stop - table.first], table.first)


def cut_pages(
    kind: Kind, tables: Sequence[PageTable], lengths: Sequence[int], size: int
) -> list[Page]:
    """The last pages of tables that end within a page, where appending to them needs a copy."""
    ends = [table.pages[-1] for table in _open_ended(tables, lengths, size)]
    return [page for page in ends if _must_be_copied(kind, page)]


def opened(
    pool: Pages, kind: Kind, tables: Sequence[PageTable], lengths: Sequence[int]
) -> list[PageTable]:
    """The tables, whose last pages are open where they are cut: copies unless no other table has
    them. Raises as `Pages.reserve`."""
    size = pool.page_size
    new = [table.copied() for table in tables]
    pool.reserve([kind.open] * len(cut_pages(kind, tables, lengths, size)))
    for table in _open_ended(new, lengths, size):
        page = table.pages[-1]
        if _must_be_copied(kind, page):
            tokens = torch.arange(page.start, page.start + size, device="cpu")
            table.pages[-1] = copy = pool.take(kind.open)
            kind.open.put(copy.start, page.slab.read(tokens))
            pool.release(page)
    for table in _open_ended(new, lengths, size):
        table.pages[-1].sealed = False
    return new


def _open_ended(tables: Sequence[PageTable], lengths: Sequence[int], size: int) -> list[PageTable]:
    rows = zip(tables, lengths, strict=True)
    return [table for table, length in rows if length % size and table.pages]


def _must_be_copied(kind: Kind, page: Page) -> bool:
    return page.sealed and not (page.is_private and page.slab is kind.open)


def copies(tables: Sequence[PageTable], rows: Sequence[int]) -> list[Page]:
    """The open pages that these rows need copies of, because a row comes several times."""
    found = Counter(page for row in rows for page in tables[row].pages if not page.sealed)
    return [page for page, count in found.items() for _ in range(count - 1)]


def left_by(tables: Sequence[PageTable], new: Sequence[PageTable]) -> "Counter[Page]":
    """The pages that are not in the new tables, or less often."""
    return Counter(pages_of(tables)) - Counter(pages_of(new))


def chosen(pool: Pages, tables: Sequence[PageTable], rows: Sequence[int]) -> list[PageTable]:
    """The tables of these rows; where a row comes several times, its open page is copied. Raises as
    `Pages.reserve`."""
    new = [tables[row].copied() for row in rows]
    pool.reserve([page.slab for page in copies(tables, rows)])
    more = Counter(pages_of(new)) - Counter(pages_of(tables))
    left = left_by(tables, new)
    _copy_open(pool, new, {page for page in pages_of(new) if not page.sealed})
    for page in more.elements():
        if page.sealed:
            pool.retain(page)
    for page in left.elements():
        pool.release(page)
    return new


def forked(pool: Pages, tables: Sequence[PageTable]) -> list[PageTable]:
    """Tables of the same pages, with copies of open ones. Raises as `Pages.reserve`."""
    new = [table.copied() for table in tables]
    pool.reserve([page.slab for page in pages_of(new) if not page.sealed])
    _copy_open(pool, new, set())
    for page in pages_of(tables):
        if page.sealed:
            pool.retain(page)
    return new


def _copy_open(pool: Pages, tables: Sequence[PageTable], stay: set[Page]) -> None:
    """Give each table an open page of its own: those that stay are the first table's."""
    for table in tables:
        for index, page in enumerate(table.pages):
            if page.sealed:
                continue
            if page in stay:
                stay.remove(page)
            else:
                table.pages[index] = pool.copied(page)


def freed(left: "Counter[Page]") -> int:
    """Pages that are free once these references are released."""
    return sum(count == page.references and page.node is None for page, count in left.items())
