"""Appending tokens to the pages of a batch: taking pages, writing, quantising and sealing."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache.codes import are_codable
from regard.cache.paging.memory import Kind, Memory
from regard.cache.paging.pages import Page, PageTable, Slab


class Append(NamedTuple):
    """The pages that rows of these lengths need for `added` more tokens."""

    kind: Kind
    page_size: int
    lengths: list[int]
    added: int
    slabs: list[list[Slab]]  # of the new pages of each row, in order
    # the number of the page of each row that codes replace, as it was open and is full
    full: list[int | None]
    needed: list[Slab]  # the slabs of all pages to take

    @property
    def stores_codes(self) -> bool:
        """Whether new tokens are stored as codes at once."""
        return self.kind.open is not self.kind.sealed and any(
            slab is self.kind.sealed for slabs in self.slabs for slab in slabs
        )


def plan(
    kind: Kind, tables: Sequence[PageTable], lengths: list[int], new: Sequence[Tensor]
) -> Append:
    """The pages that new tokens `[B, G, L, W]` need.

    In a pool of codes, new tokens that fill a page are stored as codes at once. Three kinds of
    pages stay in full precision: the first page of a row; open pages; and, where the tokens of a
    page share scales, pages with a number that is too large or not finite: it would spoil others.
    """
    added, page_size = new[0].shape[2], kind.open.page_size
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
    """The number of the open page that new tokens fill, if codes replace it; else None."""
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


class Run(NamedTuple):
    """New tokens of one row that lie side by side in a slab."""

    row: int
    first: int  # of the new tokens
    size: int
    place: int  # in the slab


def write(tables: Sequence[PageTable], append: Append, new: Sequence[Tensor]) -> None:
    """Write the new tokens `[B, G, L, W]`; the rest of a page that is open and new is zero."""
    size, runs = append.page_size, dict[Slab, list[Run]]()
    for row, (table, length) in enumerate(zip(tables, append.lengths, strict=True)):
        stop = length + append.added
        for number in range(length // size, -(-stop // size)):
            page, begin = _page(table, number), max(length, number * size)
            end = min(stop, (number + 1) * size)
            run = Run(row, begin - length, end - begin, page.start + begin % size)
            _add(runs.setdefault(page.slab, []), run)
        if append.slabs[row] and stop % size:
            _clear_rest(_page(table, stop // size), stop % size, size)
    for slab, found in runs.items():
        if len(found) == 1:
            ((row, first, count, place),) = found
            of_row = [each[row] for each in new]
            whole = count == append.added
            slab.put(place, of_row if whole else [x.narrow(1, first, count) for x in of_row])
        else:
            sizes, starts = torch.tensor([(r.size, r.place) for r in found], device="cpu").T
            at = (starts - sizes.cumsum(0) + sizes).repeat_interleave(sizes)
            slab.write(at + torch.arange(len(at), device="cpu"), [_joined(found, x) for x in new])


def _joined(runs: Sequence[Run], new: Tensor) -> Tensor:
    """The tokens of these runs side by side, `[G, n, W]`."""
    if [run[:3] for run in runs] == [(row, 0, new.shape[2]) for row in range(len(new))]:
        return new.transpose(0, 1).flatten(1, 2)  # all of them, as a step of a batch has them
    return torch.cat([new[r.row].narrow(1, r.first, r.size) for r in runs], 1)


def _add(runs: list[Run], run: Run) -> None:
    """Append a run to the list; two runs that lie side by side become one."""
    if runs:
        row, first, size, place = runs[-1]
        if run == (row, first + size, run.size, place + size):
            runs.pop()
            run = Run(row, first, size + run.size, place)
    runs.append(run)


def _page(table: PageTable, number: int) -> Page:
    return table.pages[number - table.first]


def _clear_rest(page: Page, filled: int, size: int) -> None:
    """Write zeros to the slots of an open page after the first `filled` ones."""
    if not page.slab.sealed:
        page.slab.clear(page.start + filled, page.start + size)


def with_codes(memory: Memory, tables: list[PageTable], append: Append) -> list[PageTable]:
    """The tables with pages of codes in place of full open pages; the same object if none is full.
    A page stays open if an infinity in it would spoil the codes of tokens with the same scale."""
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
    """Mark the pages that an append has filled as sealed: nothing is written to them again."""
    size = append.page_size
    for table, length in zip(tables, append.lengths, strict=True):
        for number in range(length // size, (length + append.added) // size):
            _page(table, number).sealed = True


def _is_codable(page: Page) -> bool:
    return all(bool(are_codable(each).all()) for each in page.slab.stored(page.index))
