"""Appending tokens to the pages of a batch: which pages are needed, and what is written to them."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache.codes import are_codable
from regard.cache.paging.memory import Kind, Memory
from regard.cache.paging.pages import Page, PageTable, Slab


class Append(NamedTuple):
    """The pages that rows of these lengths need for `added` more tokens.

    Attributes:
        slabs: of the new pages of each row, in order.
        full: the number of the page of each row that codes replace, as it was open and is full.
        needed: the slabs of all pages to take.
    """

    kind: Kind
    page_size: int
    lengths: list[int]
    added: int
    slabs: list[list[Slab]]
    full: list[int | None]
    needed: list[Slab]

    @property
    def stores_codes(self) -> bool:
        """Whether new tokens are stored as codes at once."""
        return self.kind.open is not self.kind.sealed and any(
            slab is self.kind.sealed for slabs in self.slabs for slab in slabs
        )


def plan(
    kind: Kind,
    page_size: int,
    tables: Sequence[PageTable],
    lengths: list[int],
    new: Sequence[Tensor],
) -> Append:
    """The pages that new tokens `[B, G, L, W]` need.

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
    full = [_filled(kind, page_size, length, added) for length in lengths]
    needed = [*chain.from_iterable(slabs), *[kind.sealed for n in full if n is not None]]
    return Append(kind, page_size, lengths, added, slabs, full, needed)


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


def _filled(kind: Kind, size: int, length: int, added: int) -> int | None:
    """The number of the open page that is full then, where codes take its place."""
    number = length // size
    if kind.open is kind.sealed or not length % size or number == 0:
        return None
    return number if length + added >= (number + 1) * size else None


def with_new_pages(memory: Memory, tables: list[PageTable], append: Append) -> list[PageTable]:
    """The tables with the new pages; the same object if there are none."""
    if not any(append.slabs):
        return tables
    found = []
    for table, length, slabs in zip(tables, append.lengths, append.slabs, strict=True):
        new = table.copied()
        if not new.pages and slabs:
            new.first = length // append.page_size
        for slab in slabs:
            new.pages.append(memory.take(slab, new.pages[-1] if new.pages else None))
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
        places = torch.cat([page.tokens for page in pages])
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


def with_codes(memory: Memory, tables: list[PageTable], append: Append) -> list[PageTable]:
    """The tables with codes in place of open pages that are full; the same object if there are
    none. Pages with numbers that would spoil the codes of other tokens stay."""
    kind, places = append.kind, []
    for row, number in enumerate(append.full):
        if number is not None:
            page = _page(tables[row], number)
            if not kind.sealed.shares_scales or _is_codable(page):
                places.append((row, number, page))
    if not places:
        return tables
    found = [table.copied() for table in tables]
    for row, number, _ in places:
        code = memory.take(kind.sealed, tables[row].at(number - 1))
        found[row].pages[number - found[row].first] = code
    codes = [_page(found[row], number) for row, number, _ in places]
    values = kind.open.read(torch.cat([page.tokens for *_, page in places]))
    kind.sealed.write(torch.cat([page.tokens for page in codes]), values)
    return found


def seal(tables: Sequence[PageTable], append: Append) -> None:
    """Let full pages be sealed."""
    size = append.page_size
    for table, length in zip(tables, append.lengths, strict=True):
        for number in range(length // size, (length + append.added) // size):
            _page(table, number).sealed = True


def _is_codable(page: Page) -> bool:
    return all(bool(are_codable(each).all()) for each in page.slab.stored(page.index))
