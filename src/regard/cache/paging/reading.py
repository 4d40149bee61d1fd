"""Reading pages: streams that are found through a table, and the parts of a batch of tables.

Consecutive pages are a plain view of the memory; pages elsewhere are copied side by side. Rows that
share their pages have one table, expanded: these pages are copied once, and the copy is expanded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.cache.codes import QuantizedStream
from regard.cache.paging.pages import Page, PageTable, Slab
from regard.cache.parts import AnyStream, Part, Streams, streams_of

Values = Tensor | QuantizedStream  # of a stream


class PagedStream(NamedTuple):
    """A stream `[B, G, length, W]` in pages of a slab."""

    slab: Values  # [1, G, pages x page_size, W], contiguous; page i is the i-th run of tokens
    table: Int64[Tensor, "B n"]  # the pages of each row, in order, on the CPU
    page_size: int  # tokens of a page
    start: int  # tokens of the first page that are left out
    length: int  # tokens
    device: torch.device | None = None  # where it is read; None: where the slab is

    @property
    def is_shared(self) -> bool:
        """Whether several rows read the same pages: the table is one row, expanded."""
        return self.table.shape[0] > 1 and self.table.stride(0) == 0

    @property
    def kinds(self) -> tuple[type, ...]:
        """`PagedStream`, and the class of the codes in its pages."""
        return (PagedStream,) if isinstance(self.slab, Tensor) else (PagedStream, *self.slab.kinds)

    @property
    def bits(self) -> int | None:
        """The bits of the codes in its pages; None for values."""
        return None if isinstance(self.slab, Tensor) else self.slab.bits

    @property
    def rotation(self) -> tuple[int, ...]:
        """Widths of the blocks of channels that are rotated."""
        return () if isinstance(self.slab, Tensor) else self.slab.rotation

    @property
    def is_scattered(self) -> bool:
        """True: the tokens are found through a table."""
        return True

    @property
    def outline(self) -> Tensor:
        """A tensor of the shape and dtype of the values, which are all zero."""
        slab = self.slab
        like = slab if isinstance(slab, Tensor) else slab.scales
        width = slab.shape[-1] if isinstance(slab, Tensor) else slab.width
        device = self.device or like.device
        row = like.new_zeros(width, dtype=slab.dtype, device=device)  # columns side by side
        return row.expand(self.table.shape[0], like.shape[1], self.length, width)

    def narrow(self, start: int, size: int) -> "PagedStream":
        """The tokens `start..start + size`."""
        if not size:
            return self._replace(table=self.table[:, :0], start=0, length=0)
        pages, start = divmod(self.start + start, self.page_size)
        table = self.table.narrow(1, pages, -(-(start + size) // self.page_size))
        return self._replace(table=table, start=start, length=size)

    def rows(self, start: int, size: int) -> "PagedStream":
        """The rows `start..start + size` of the batch."""
        return self._replace(table=self.table.narrow(0, start, size))

    def viewed(self) -> Values | None:
        """The stream as a view of the slab, without a copy; None unless it is read where it is, the
        pages of each row are consecutive, and the rows equally far apart."""
        if self.device is not None:
            return None
        table = self.table[:1] if self.is_shared else self.table
        if not table.numel() or bool((table.diff(dim=1) != 1).any()):
            return None
        step = _pages_apart(table[:, 0])
        if step is None:
            return None
        first, rows = int(table[0, 0]) * self.page_size + self.start, len(self.table)
        return _side_by_side(self.slab, first, self.length, rows, step * self.page_size)

    def copied(self) -> Values:
        """The stream in new tensors, as it is stored; of shared pages, one copy, expanded."""
        table = self.table[:1] if self.is_shared else self.table
        found = _each(self.slab, lambda x: self._selected(x, table).to(self.device))
        found = _narrowed(found, self.start, self.length)
        if len(table) == len(self.table):
            return found
        return _each(found, lambda x: x.expand(len(self.table), -1, -1, -1))

    def in_one(self) -> Values:
        """The tokens side by side: a view if the pages are consecutive, else a copy."""
        view = self.viewed()
        return self.copied() if view is None else view

    def cuts(self, most: int) -> Iterator[tuple[int, int]]:
        """Runs of at least `most` tokens that are views, and between them ranges of fewer."""
        at = 0
        for first, last in [*self._long_runs(most), (self.length, self.length)]:
            while at < first:
                stop = min(at + most, first)
                yield at, stop
                at = stop
            if first < last:
                yield first, last
            at = last
        if not self.length:
            yield 0, 0

    def _long_runs(self, most: int) -> Iterator[tuple[int, int]]:
        """Runs of at least `most` tokens that are views: the pages of every row are consecutive,
        and rows equally far apart."""
        table = self.table[:1] if self.is_shared else self.table
        breaks = (table.diff(dim=1) != 1).any(0)
        ends = [*(breaks.nonzero().flatten() + 1).tolist(), table.shape[1]]
        begin = 0
        for end in ends:
            first = max(begin * self.page_size - self.start, 0)
            last = min(end * self.page_size - self.start, self.length)
            if last - first >= most and _pages_apart(table[:, begin]) is not None:
                yield first, last
            begin = end

    def to_tensor(self) -> Tensor:
        """The values, in a new tensor."""
        found = self.copied()
        if isinstance(found, Tensor):
            return found
        if not self.is_shared:
            return found.to_tensor()
        one = _each(found, lambda x: x[:1])
        assert isinstance(one, QuantizedStream)
        return one.to_tensor().expand(self.table.shape[0], -1, -1, -1)

    def _selected(self, x: Tensor, table: Tensor) -> Tensor:
        """Whole pages of one tensor of the slab, copied."""
        _, heads, stored, width = x.shape
        pages = _tokens(self.slab) // self.page_size
        a_page = stored // pages  # tokens, or runs of tokens that share scales
        head = torch.arange(heads, device="cpu")[:, None] * pages
        at = (table[:, None] + head).flatten().to(x.device)
        memory = x.view(heads * pages, a_page * width)
        shape = table.shape[0], heads, table.shape[1] * a_page, width
        return memory.index_select(0, at).view(shape)


def _pages_apart(column: Int64[Tensor, " B"]) -> int | None:
    """From the page of one row to that of the next; None if rows are not equally far apart."""
    steps = set(column.diff().tolist()) or {0}
    step = steps.pop()
    return None if steps or step < 0 else step


def _side_by_side(slab: Values, first: int, size: int, rows: int, apart: int = 0) -> Values:
    """A view of `size` tokens of each row; those of the first row begin at token `first` of the
    slab, the next row's `apart` tokens later."""
    found = _narrowed(slab, first, size)
    if not apart:
        return found if rows == 1 else _each(found, lambda x: x.expand(rows, -1, -1, -1))

    def of_rows(x: Tensor) -> Tensor:
        run = slab.run if isinstance(slab, QuantizedStream) and x.dtype != torch.uint8 else 1
        across = apart // run * x.stride(2)
        return x.as_strided((rows, *x.shape[1:]), (across, *x.stride()[1:]))

    return _each(found, of_rows)


def _tokens(values: Values) -> int:
    return (values if isinstance(values, Tensor) else values.codes).shape[2]


def _narrowed(values: Values, start: int, size: int) -> Values:
    """The tokens `start..start + size` of a stream."""
    if isinstance(values, Tensor):
        return values.narrow(2, start, size)
    return values.narrow(start, size)


def _each(values: Values, change: Callable[[Tensor], Tensor]) -> Values:
    """The tensors of a stream changed: itself, or its codes and scales."""
    if isinstance(values, Tensor):
        return change(values)
    return values._replace(codes=change(values.codes), scales=change(values.scales))


# ---- the parts of a batch of tables ----


class Segment(NamedTuple):
    """A range of pages of all rows that can be read together."""

    first: int  # the number of the first page
    size: int  # the number of pages
    slab: Slab | None  # in which the pages lie; None where rows have pages of different slabs
    # the page of each row; of one row, expanded, where all rows share the pages
    table: Int64[Tensor, "rows n"] | None
    # the first page in the slab, if all rows have the same pages, one after another
    begin: int | None
    pages: list[list[Page | None]]  # of each row; None where a row has no such page

    def part(self, page_size: int, start: int, stop: int, *, viewed: bool) -> Part:
        """The slots `start..stop`, which lie in this segment; where it may be `viewed`, pages one
        after another are a view of the memory."""
        offset, size = start - self.first * page_size, stop - start
        slab, table, begin = self.slab, self.table, self.begin
        if slab is None or table is None:
            return Part(start, stop, self._gathered(offset, size))
        if begin is None or not viewed or slab.read_on is not None or slab.shares_scales:
            return Part(start, stop, Streams(self.paged(page_size, start, stop)))
        first, rows = begin * page_size + offset, table.shape[0]
        views = [_side_by_side(each, first, size, rows) for each in slab.streams]
        return Part(start, stop, streams_of(views))

    def paged(self, page_size: int, start: int, stop: int) -> tuple[PagedStream, ...]:
        """The streams of those of the slots `start..stop` that lie in this segment, of one slab."""
        slab, tokens = self.slab, self.size * page_size
        assert slab is not None and self.table is not None
        every = PagedStream(slab.streams[0], self.table, page_size, 0, tokens, slab.read_on)
        first = start - self.first * page_size
        shown = every.narrow(first, min(stop - start, tokens - first))  # keys and values alike
        return tuple([shown._replace(slab=each) for each in slab.streams])

    def _gathered(self, offset: int, size: int) -> tuple[Tensor, ...]:
        """The values of rows whose pages lie in different slabs: these are few, around tails."""
        columns = [_stacked(column) for column in zip(*self.pages, strict=True)]
        streams = [torch.cat(pages, 2) for pages in zip(*columns, strict=True)]
        return tuple(each.narrow(2, offset, size) for each in streams)


def by_slab(found: Iterable[Sequence[AnyStream]]) -> list[Sequence[AnyStream]]:
    """The streams of parts, those in pages of one slab as one, in the order of their last parts:
    attention that sees all keys does not depend on their order."""
    slabs: dict[int, Sequence[AnyStream]] = {}
    for streams in found:
        one = streams[0]
        key = id(one.slab if isinstance(one, PagedStream) else one)
        before = slabs.get(key)
        whole = None if before is None else _followed(before, streams)
        if whole is not None:
            del slabs[key]  # the joined streams are last
        slabs[key if whole or before is None else id(streams)] = whole or streams
    return [*slabs.values()]


def _followed(one: Sequence[AnyStream], two: Sequence[AnyStream]) -> Sequence[AnyStream] | None:
    """The streams in pages, followed by others in the same slab, in one table; None if the first
    end, or the others begin, within a page."""
    first, then = one[0], two[0]
    assert isinstance(first, PagedStream) and isinstance(then, PagedStream), "of one slab"
    if then.start or (first.start + first.length) % first.page_size:
        return None
    table, length = torch.cat([first.table, then.table], 1), first.length + then.length
    whole = first._replace(table=table, length=length)
    return [whole._replace(slab=each.slab) for each in one if isinstance(each, PagedStream)]


_Column = list[Page | None]  # the page of each row


def segments_of(tables: Sequence[PageTable]) -> list[Segment]:
    """Ranges of neighbouring pages that lie in one slab, or are shared by all rows."""
    if not tables:
        return []
    first, stop = min(t.first for t in tables), max(t.stop for t in tables)
    columns = _columns(tables, range(first, stop))
    found = []
    for (slab, same), group in groupby(columns, key=_slab_of):
        found.append(_segment(slab, same, first, list(group)))
        first += found[-1].size
    return found


def parts_of(
    segments: Sequence[Segment], page_size: int, start: int, stop: int
) -> tuple[Part, ...]:
    """The slots `start..stop`, a part for each segment. A single page beside others keeps its
    table, so that a kernel can read all pages of a slab in one go."""
    found, alone = [], len(segments) == 1
    for segment in segments:
        begin = max(start, segment.first * page_size)
        end = min(stop, (segment.first + segment.size) * page_size)
        if begin < end:
            found.append(segment.part(page_size, begin, end, viewed=alone or segment.size > 1))
    return tuple(found)


def _columns(tables: Sequence[PageTable], numbers: range) -> list[_Column]:
    """The pages of each number. Where no row has one, the pages before, or the first that there
    are: the mask hides them."""
    columns: list[_Column] = [[table.at(number) for table in tables] for number in numbers]
    last = next((column for column in columns if any(column)), None)
    if last is None:
        return []
    found = []
    for column in columns:
        last = column if any(column) else last
        found.append(last)
    return found


def _slab_of(column: _Column) -> tuple[Slab | None, bool]:
    """The slab of a column if it is one, and whether several rows share the page."""
    pages = [page for page in column if page is not None]
    slab = pages[0].slab if all(page.slab is pages[0].slab for page in pages) else None
    return slab, len(column) > 1 and all(page is pages[0] for page in column)


def _segment(slab: Slab | None, same: bool, first: int, columns: list[_Column]) -> Segment:
    rows, count = len(columns[0]), len(columns)
    pages = [list(row) for row in zip(*columns, strict=True)]
    if slab is None:
        return Segment(first, count, None, None, None, pages)
    some = [next(page for page in column if page is not None) for column in columns]
    # where a row has no page the mask hides that of another row
    indices = [
        [(page or other).index for page, other in zip(row, some, strict=True)]
        for row in pages[: 1 if same else rows]
    ]
    begin = indices[0][0]
    straight = len(indices) == 1 and indices[0] == list(range(begin, begin + count))
    table = torch.tensor(indices, dtype=torch.int64, device="cpu").expand(rows, -1)
    return Segment(first, count, slab, table, begin if straight else None, pages)


def _stacked(column: Sequence[Page | None]) -> tuple[Tensor, ...]:
    """The streams `[B, G, page_size, W]` of one page of each row; zeros where a row has none."""
    rows = [None if page is None else page.slab.read(page.tokens) for page in column]
    shapes = next(row for row in rows if row is not None)
    zeros = tuple(torch.zeros_like(each) for each in shapes)
    return tuple(torch.stack(each) for each in zip(*(row or zeros for row in rows), strict=True))
