"""What a paged cache holds, for its file: the tables of its rows, and each page once."""

from typing import Any

import torch
from torch import Tensor

from regard.cache.files import is_naturals
from regard.cache.paging.bookkeeping import Kind, Pages
from regard.cache.paging.changing import pages_of
from regard.cache.paging.page_files import Group, Numbered, check_shapes, groups_from, taken
from regard.cache.paging.pages import Page, PageTable
from regard.cache.paging.rows import Rows
from regard.cache.saving import Record, lengths_from, lengths_state, pieces_from
from regard.cache.stored import Stored
from regard.cache.streams import Lengths


class Recorded(Stored):
    """The side of a `PagedCache` that its file needs."""

    pool: Pages
    window: int | None
    rollback: int
    pieces: tuple[int, ...] | None
    _kind: Kind | None
    _lengths: Lengths
    _rows: Rows
    _like: tuple[Tensor, ...]

    @property
    def empty_streams(self) -> tuple[Tensor, ...]:
        return self._like

    @property
    def arguments(self) -> dict[str, Any]:
        pool = {"page_size": self.pool.page_size, "format": self.pool.format.name}
        return {**pool, "window": self.window, "rollback": self.rollback}

    def record(self) -> Record:
        """What the cache holds, for its file: each page once, as it is stored."""
        self._check_usable()
        with self.pool.lock:
            numbered = Numbered(self.pool, pages_of(self._rows.tables), self._kind)
            state = {
                **lengths_state(self._lengths),
                "tables": [_table_text(table, numbered) for table in self._rows.tables],
                "groups": numbered.text(),
                "pieces": None if self.pieces is None else list(self.pieces),
            }
            return Record(state, numbered.streams())

    def fill(self, record: Record) -> None:
        """Take what a file holds, into this new cache and into new pages of its pool.

        Args:
            record: of a cache of this kind and these arguments.

        Raises:
            ValueError: if it could not be the record of such a cache, or the pool has too few
                pages left.
        """
        self._check_usable()
        with self.pool.lock:
            new = Filled(self, record)
            self._rows.settle()
            self.pieces, self._kind, self._lengths = new.pieces, new.kind, new.lengths
            if new.kind is not None:
                outlines = new.kind.open.outlines
                self._like = tuple(each.empty(len(new.tables), 0) for each in outlines)
            self._rows.set(new.tables)

    def _check_usable(self) -> None:
        raise NotImplementedError


def _table_text(table: PageTable, numbered: Numbered) -> dict[str, Any]:
    return {"first": table.first, "pages": [numbered.numbers[page] for page in table.pages]}


class Filled:
    """The state of a paged cache that a file holds, in new pages of its pool; lock held.

    Args:
        cache: empty.
        record: of a cache with its arguments.

    Raises:
        ValueError: if it could not be the record of such a cache, or the pool has too few pages.
    """

    def __init__(self, cache: Any, record: Record) -> None:
        pool, state = cache.pool, record.state
        device = record.streams[0].device if record.streams else torch.device("cpu")
        groups = groups_from(state.get("groups"), pool.format, pool.page_size, device)
        check_shapes(groups, pool.page_size, record.streams)
        kinds = {group.outlines for group in groups}
        if len(kinds) > 1 or (state.get("tables") and not kinds):
            raise ValueError(f"the rows of a cache have pages of one kind, got {len(kinds)} kinds")
        outlines = groups[0].outlines if groups else ()
        self.pieces = pieces_from(state.get("pieces"), [each.empty(0, 0) for each in outlines])
        self.lengths, numbers = _rows_of(state)
        _check_tables(cache, state["tables"], numbers, groups)
        pages = taken(pool, groups, iter(record.streams))
        self.kind = pool.kind_of(outlines) if groups else None
        self.tables = [
            PageTable([pages[n] for n in table["pages"]], table["first"])
            for table in state["tables"]
        ]
        self._count(pool, pages, numbers)

    def _count(self, pool: Pages, pages: list[Page], lengths: list[int]) -> None:
        """Let pages have the references of the tables, and full ones be sealed."""
        for table, length in zip(self.tables, lengths, strict=True):
            for number, page in enumerate(table.pages, table.first):
                page.sealed = (number + 1) * pool.page_size <= length
                pool.retain(page)
        for page in pages:
            pool.release(page)


def _rows_of(state: dict[str, Any]) -> tuple[Lengths, list[int]]:
    """The lengths of rows, and the same as a list."""
    lengths, tables = lengths_from(state), state.get("tables")
    if not isinstance(tables, list) or not all(_is_table(each) for each in tables):
        raise ValueError(f"tables have a first page and pages, got {tables!r:.200}")
    rows = lengths.rows
    numbers: list[int] = [lengths.longest] * len(tables) if rows is None else rows.tolist()
    if len(numbers) != len(tables):
        raise ValueError(f"rows have a length each, got {numbers!r:.200} of {len(tables)} rows")
    return lengths, numbers


def _is_table(value: Any) -> bool:
    names = isinstance(value, dict) and set(value) == {"first", "pages"}
    return names and is_naturals([value["first"]]) and is_naturals(value["pages"])


def _check_tables(
    cache: Any, tables: list[dict[str, Any]], lengths: list[int], groups: list[Group]
) -> None:
    """Raise unless each row has the pages of its tokens, or of its window, and open ones alone."""
    size = cache.pool.page_size
    count = sum(group.size for group in groups)
    codes = [group.codes for group in groups for _ in range(group.size)]
    uses: dict[int, set[bool]] = {}
    for table, length in zip(tables, lengths, strict=True):
        first, stop = table["first"], -(-length // size)
        oldest = 0 if cache.window is None else max(0, length - cache.window + 1)
        if first + len(table["pages"]) != stop or first > oldest // size:
            raise ValueError(
                f"a row of {length} tokens has pages from {oldest // size} or before to {stop}, "
                f"got {len(table['pages'])} from {first} on"
            )
        for number, page in enumerate(table["pages"], first):
            full = (number + 1) * size <= length
            if page >= count or (page in uses and not (full and uses[page] == {True})):
                raise ValueError(f"page {page} of {count} is in several places, or is not there")
            if codes[page] and not full:
                raise ValueError(f"page {page} has codes, and only {length - number * size} tokens")
            uses.setdefault(page, set()).add(full)
    if len(uses) != count:
        raise ValueError(f"{count} pages are stored and {len(uses)} in use")
