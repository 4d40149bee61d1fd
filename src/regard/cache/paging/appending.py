"""Appending tokens to the pages of a batch: which pages are needed, and what is written to them."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache.codes import are_codable
from regard.cache.paging.bookkeeping import Kind, Pages
from regard.cache.paging.pages import Page, PageTable
from regard.cache.paging.slabs import Slab


class Append(NamedTuple):
    """What appending `added` tokens to rows of these lengths takes.

    Attributes:
        slabs: of the pages that each row needs, in order.
        full: number of the page that each row fills, if it was open; None if it fills none.
    """

    page_size: int
    lengths: list[int]
    added: int
    slabs: list[list[Slab]]
    full: list[int | None]

    @property
    def needed(self) -> list[Slab]:
        """The slabs of all pages to take, those of sealed copies included."""
        return list(chain.from_iterable(self.slabs))


def plan(
    kind: Kind,
    page_size: int,
    tables: Sequence[PageTable],
    lengths: list[int],
    new: Sequence[Tensor],
) -> Append:
    """Which pages new tokens `[B, G, L, W]` need.

    Full pages of a pool of codes are written to sealed pages at once. In full precision are the
    first page of a row, those that stay open and, if tokens share scales, those with a number that
    has no code, because it is not finite or too large: it would spoil other tokens.
    """
    added = new[0].shape[2]
    rows = list(zip(tables, lengths, strict=True))
    spoilt = _not_codable(new) if kind.sealed.shares_scales and added > 1 else [[]] * len(rows)
    slabs = [
        _new_pages(kind, page_size, table, length, added, tokens)
        for (table, length), tokens in zip(rows, spoilt, strict=True)
    ]
    full = [_filled(kind, page_size, table, length, added) for table, length in rows]
    return Append(page_size, lengths, added, slabs, full)


def _new_pages(
    kind: Kind, size: int, table: PageTable, length: int, added: int, spoilt: Sequence[int]
) -> list[Slab]:
    stop = length + added
    numbers = range(max(table.stop, length // size), -(-stop // size))
    if not added or not numbers:
        return []
    opened = {0, *(number for number in numbers if number * size < length)}
    opened |= {stop // size, *((length + token) // size for token in spoilt)}
    return [kind.open if number in opened else kind.sealed for number in numbers]


def _not_codable(new: Sequence[Tensor]) -> list[list[int]]:
    """The new tokens of each row that have a number without a code."""
    codable = torch.stack([are_codable(each).all(-1).all(1) for each in new]).all(0)
    return [row.logical_not().nonzero().flatten().tolist() for row in codable.cpu()]


def _filled(kind: Kind, size: int, table: PageTable, length: int, added: int) -> int | None:
    """The page whose codes take the place of a full open one."""
    number = length // size
    if kind.open is kind.sealed or not length % size or number == 0:
        return None
    return number if length + added >= (number + 1) * size else None


def with_new_pages(pool: Pages, tables: Sequence[PageTable], append: Append) -> list[PageTable]:
    """The tables with the pages that the plan takes."""
    found = []
    for table, length, slabs in zip(tables, append.lengths, append.slabs, strict=True):
        new = table.copied()
        if not new.pages and slabs:
            new.first = length // append.page_size
        for slab in slabs:
            new.pages.append(pool.take(slab, new.pages[-1] if new.pages else None))
        found.append(new)
    return found


def write(tables: Sequence[PageTable], append: Append, new: Sequence[Tensor]) -> None:
    """Write the new tokens `[B, G, L, W]`; the rest of a page that is open and new is zero."""
    if append.added == 1:
        _write_step(tables, append, new)
        return
    for row, table in enumerate(tables):
        _write_row(table, append, row, [each[row] for each in new])


def _write_step(tables: Sequence[PageTable], append: Append, new: Sequence[Tensor]) -> None:
    """One token of each row; their pages lie in one slab but for those that are sealed at once."""
    size = append.page_size
    at: dict[Slab, tuple[list[int], list[int]]] = {}
    for row, (table, length) in enumerate(zip(tables, append.lengths, strict=True)):
        page = _page(table, length // size)
        if append.slabs[row] and not length % size:
            _clear_rest(page, 1, size)
        rows, places = at.setdefault(page.slab, ([], []))
        rows.append(row)
        places.append(page.start + length % size)
    for slab, (rows, places) in at.items():
        if len(places) == 1:
            slab.put(places[0], [each[rows[0]] for each in new])
            continue
        chosen = [each if len(rows) == len(tables) else each[rows] for each in new]
        tokens = [each[:, :, 0].transpose(0, 1) for each in chosen]
        slab.write(torch.tensor(places, dtype=torch.int64, device="cpu"), tokens)


def _write_row(table: PageTable, append: Append, row: int, new: Sequence[Tensor]) -> None:
    """Runs of pages that lie in one slab are written together."""
    size, start = append.page_size, append.lengths[row]
    stop = start + append.added
    while start < stop:
        pages = _run(table, start // size, -(-stop // size))
        end = min(stop, (start // size + len(pages)) * size)
        places = torch.cat([_tokens(page) for page in pages])
        places = places.narrow(0, start % size, end - start)
        taken = start - append.lengths[row]
        tokens = [each.narrow(1, taken, end - start) for each in new]
        if all(page.index == pages[0].index + i for i, page in enumerate(pages)):
            pages[0].slab.put(int(places[0]), tokens)
        else:
            pages[0].slab.write(places, tokens)
        start = end
    if append.slabs[row] and stop % size:
        _clear_rest(_page(table, stop // size), stop % size, size)


def _run(table: PageTable, first: int, stop: int) -> list[Page]:
    """The pages from `first` on that lie in one slab, each after the one before it."""
    pages = [_page(table, first)]
    for number in range(first + 1, stop):
        page = _page(table, number)
        if page.slab is not pages[0].slab:
            break
        pages.append(page)
    return pages


def _page(table: PageTable, number: int) -> Page:
    page = table.at(number)
    assert page is not None, "a page that is written was taken"
    return page


def _clear_rest(page: Page, filled: int, size: int) -> None:
    """Slots that are not written yet are finite."""
    if not page.slab.sealed:
        page.slab.clear(page.start + filled, page.start + size)


def seal(pool: Pages, kind: Kind, tables: Sequence[PageTable], append: Append) -> list[Page]:
    """Let full pages be sealed, in a pool of codes by storing them as such; returns the pages whose
    places these take in the tables."""
    left = _coded(pool, kind, tables, append) if any(n is not None for n in append.full) else []
    size = append.page_size
    for table, length in zip(tables, append.lengths, strict=True):
        for number in range(length // size, (length + append.added) // size):
            _page(table, number).sealed = True
    return left


def _coded(pool: Pages, kind: Kind, tables: Sequence[PageTable], append: Append) -> list[Page]:
    """Store full open pages as codes; returns them."""
    found = [(t, n) for t, n in zip(tables, append.full, strict=True) if n is not None]
    if kind.sealed.shares_scales:
        found = [each for each in found if _is_codable(_page(*each))]
    if not found:
        return []
    before = [_page(table, number) for table, number in found]
    places = torch.cat([_tokens(page) for page in before])
    new = [pool.take(kind.sealed, table.at(number - 1)) for table, number in found]
    targets = torch.cat([_tokens(page) for page in new])
    kind.sealed.write(targets, kind.open.read(places))
    for (table, number), page in zip(found, new, strict=True):
        table.pages[number - table.first] = page
    return before


def _tokens(page: Page) -> Tensor:
    """The numbers of a page's tokens in its slab."""
    return torch.arange(page.start, page.start + page.slab.page_size, device="cpu")


def _is_codable(page: Page) -> bool:
    return all(bool(are_codable(each).all()) for each in page.slab.stored(page.index))
