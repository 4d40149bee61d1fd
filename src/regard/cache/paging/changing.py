"""Changes of page tables: cut, chosen anew, forked. Sealed pages are shared, open ones copied.

Each function returns new tables, and counts the references of their pages. Where the pool has too
few pages it raises before anything is changed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from regard.cache.paging.bookkeeping import Kind, Pages
from regard.cache.paging.pages import Page, PageTable


def pages_of(tables: Iterable[PageTable]) -> Iterator[Page]:
    """The pages of all rows; one that rows share comes once for each."""
    return (page for table in tables for page in table.pages)


def cut(
    pool: Pages, kind: Kind, tables: Sequence[PageTable], lengths: Sequence[int]
) -> list[PageTable]:
    """The tables with these many tokens in each row.

    A sealed page that is cut becomes an open one again, a copy unless no other table has it.
    """
    size = pool.page_size
    new = [_cut(table, length, size) for table, length in zip(tables, lengths, strict=True)]
    cuts = [
        table
        for table, length in zip(new, lengths, strict=True)
        if length % size and table.pages and _must_be_copied(kind, table.pages[-1])
    ]
    left = Counter(pages_of(tables)) - Counter(pages_of(new))
    pool.check_room(len(cuts), freed=_freed(left))
    for page in left.elements():
        pool.release(page)
    pool.reserve([kind.open] * len(cuts))
    for table in cuts:
        page = table.pages[-1]
        tokens = torch.arange(page.start, page.start + size, device="cpu")
        copy = pool.take(kind.open)
        kind.open.put(copy.start, page.slab.read(tokens))
        table.pages[-1] = copy
        pool.release(page)
    for table, length in zip(new, lengths, strict=True):
        if length % size and table.pages:
            table.pages[-1].sealed = False
    return new


def _cut(table: PageTable, length: int, size: int) -> PageTable:
    stop = -(-length // size)  # one past the last page
    if stop <= table.first:
        return PageTable([], length // size)
    return PageTable(table.pages[: stop - table.first], table.first)


def _must_be_copied(kind: Kind, page: Page) -> bool:
    return page.sealed and not (page.is_private and page.slab is kind.open)


def chosen(pool: Pages, tables: Sequence[PageTable], rows: Sequence[int]) -> list[PageTable]:
    """The tables of these rows; where a row comes several times, its open page is copied."""
    new = [tables[row].copied() for row in rows]
    before, after = Counter(pages_of(tables)), Counter(pages_of(new))
    copies = [page for page, count in after.items() if not page.sealed for _ in range(count - 1)]
    left = before - after
    pool.check_room(len(copies), freed=_freed(left))
    for page in (after - before).elements():
        pool.retain(page)
    for page in left.elements():
        pool.release(page)
    pool.reserve([page.slab for page in copies])
    _copy_open(pool, new)
    return new


def forked(pool: Pages, tables: Sequence[PageTable]) -> list[PageTable]:
    """Tables of the same pages, with copies of open ones."""
    new = [table.copied() for table in tables]
    pool.reserve([page.slab for page in pages_of(new) if not page.sealed])
    for page in pages_of(new):
        pool.retain(page)
    _copy_open(pool, new)
    return new


def _copy_open(pool: Pages, tables: Sequence[PageTable]) -> None:
    """Give each table an open page of its own."""
    for table in tables:
        for index, page in enumerate(table.pages):
            if not page.sealed and page.references > 1:
                table.pages[index] = pool.copied(page)
                pool.release(page)


def _freed(left: "Counter[Page]") -> int:
    """Pages that are free once these references are released."""
    return sum(count == page.references and page.node is None for page, count in left.items())
