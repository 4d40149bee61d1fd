"""The parts that a batch of page tables makes: pages in a row that lie in one slab are one part."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.cache.codes import QuantizedStream
from regard.cache.paging.pages import Page, PageTable
from regard.cache.paging.reading import PagedStream
from regard.cache.paging.slabs import Slab
from regard.cache.parts import Part, Streams, streams_of


class Segment(NamedTuple):
    """A range of pages of all rows.

    Attributes:
        first: the number of its first page.
        size: the number of pages.
        slab: in which they lie; None where rows have pages of different slabs.
        table: the page of each row; one row where all rows share the pages.
        begin: the first page in the slab, if one row's pages follow one another there.
        rows: the batch size.
        pages: of each row; None where a row has no such page.
    """

    first: int
    size: int
    slab: Slab | None
    table: Int64[Tensor, "rows n"] | None
    begin: int | None
    rows: int
    pages: list[list[Page | None]]

    def part(self, page_size: int, start: int, stop: int) -> Part:
        """The slots `start..stop`, which lie in this segment."""
        offset, size = start - self.first * page_size, stop - start
        if self.slab is None:
            return Part(start, stop, self._gathered(offset, size))
        if self.begin is None or self.slab.read_on is not None or self.slab.shares_scales:
            assert self.table is not None
            table, device = self.table.expand(self.rows, -1), self.slab.read_on
            tokens = self.size * page_size
            streams = [
                PagedStream(each, table, page_size, 0, tokens, device).narrow(offset, size)
                for each in self.slab.streams
            ]
            return Part(start, stop, Streams(streams))
        begin = self.begin * page_size + offset
        views = [_view(each, begin, size, self.rows) for each in self.slab.streams]
        return Part(start, stop, streams_of(views))

    def _gathered(self, offset: int, size: int) -> tuple[Tensor, ...]:
        """The values of rows whose pages lie in different slabs: these are few, around tails."""
        columns = [_stacked(column) for column in zip(*self.pages, strict=True)]
        streams = [torch.cat(pages, 2) for pages in zip(*columns, strict=True)]
        return tuple(each.narrow(2, offset, size) for each in streams)


def segments_of(tables: Sequence[PageTable]) -> list[Segment]:
    """Ranges of pages that can be read together."""
    if not tables:
        return []
    first, stop = min(t.first for t in tables), max(t.stop for t in tables)
    columns = _columns(tables, range(first, stop))
    return [_segment(*group) for group in _grouped(first, columns)]


def parts_of(
    segments: Sequence[Segment], page_size: int, start: int, stop: int
) -> tuple[Part, ...]:
    """The slots `start..stop`, a part for each segment."""
    found = []
    for segment in segments:
        begin = max(start, segment.first * page_size)
        end = min(stop, (segment.first + segment.size) * page_size)
        if begin < end:
            found.append(segment.part(page_size, begin, end))
    return tuple(found)


_Key = tuple[Slab | None, bool]
_Column = list[Page | None]  # the page of each row


def _columns(tables: Sequence[PageTable], numbers: range) -> list[_Column]:
    """The pages of each number. Where no row has one, those of the number before, or the first that
    there are: the mask hides them."""
    columns: list[_Column] = [[table.at(number) for table in tables] for number in numbers]
    last = next((column for column in columns if any(column)), None)
    if last is None:
        return []
    found = []
    for column in columns:
        last = column if any(column) else last
        found.append(last)
    return found


def _grouped(first: int, columns: Sequence[_Column]) -> Iterator[tuple[_Key, int, list[_Column]]]:
    """Neighbouring columns whose pages lie in one slab, or are shared by all rows."""
    for key, group in groupby(enumerate(columns, first), key=lambda each: _key(each[1])):
        numbered = list(group)
        yield key, numbered[0][0], [column for _, column in numbered]


def _key(column: _Column) -> _Key:
    pages = [page for page in column if page is not None]
    slab = pages[0].slab if all(page.slab is pages[0].slab for page in pages) else None
    return slab, len(column) > 1 and all(page is pages[0] for page in column)


def _segment(key: _Key, first: int, columns: list[_Column]) -> Segment:
    slab, same = key
    rows, count = len(columns[0]), len(columns)
    pages = [list(row) for row in zip(*columns, strict=True)]
    if slab is None:
        return Segment(first, count, None, None, None, rows, pages)
    indices = [
        [_some(column, row).index for column in columns] for row in range(1 if same else rows)
    ]
    begin = indices[0][0]
    straight = len(indices) == 1 and indices[0] == list(range(begin, begin + count))
    table = torch.tensor(indices, dtype=torch.int64, device="cpu")
    return Segment(first, count, slab, table, begin if straight else None, rows, pages)


def _some(column: _Column, row: int) -> Page:
    """The page of a row, or that of another row where it has none: the mask hides it then."""
    page = column[row] or next(page for page in column if page is not None)
    return page


def _view(
    stream: Tensor | QuantizedStream, begin: int, size: int, rows: int
) -> Tensor | QuantizedStream:
    if isinstance(stream, Tensor):
        return stream.narrow(2, begin, size).expand(rows, -1, -1, -1)
    narrow = stream.narrow(begin, size)
    return narrow._replace(
        codes=narrow.codes.expand(rows, -1, -1, -1),
        scales=narrow.scales.expand(rows, -1, -1, -1),
    )


def _stacked(column: Sequence[Page | None]) -> tuple[Tensor, ...]:
    """The streams `[B, G, page_size, W]` of one page of each row; zeros where a row has none."""
    rows = [None if page is None else _values(page) for page in column]
    shapes = next(row for row in rows if row is not None)
    zeros = tuple(torch.zeros_like(each) for each in shapes)
    return tuple(torch.stack(each) for each in zip(*(row or zeros for row in rows), strict=True))


def _values(page: Page) -> tuple[Tensor, ...]:
    tokens = torch.arange(page.start, page.start + page.slab.page_size, device="cpu")
    return page.slab.read(tokens)
