"""Streams whose tokens lie in pages: found through a table, and gathered where a tensor is needed.

Consecutive pages are a plain view of the memory; pages elsewhere are copied side by side. Rows that
share their pages have one table, expanded: these pages are copied once, and the copy is expanded.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.cache.codes import QuantizedStream

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
        """Whether all of several rows read the same pages, because the table is one row's."""
        return self.table.shape[0] > 1 and self.table.stride(0) == 0

    @property
    def kinds(self) -> tuple[type, ...]:
        """Its class, and that of codes in its pages."""
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
        """Its tokens are found through a table."""
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

    def expanded(self, batch: int) -> "PagedStream":
        """One row as the pages of so many rows."""
        return self._replace(table=self.table.expand(batch, -1))

    def viewed(self) -> Values | None:
        """The stream as a view of the slab, without a copy; None unless it is read where it is, the
        pages of each row are consecutive, and the rows equally far apart."""
        if self.device is not None:
            return None
        table = self.table[:1] if self.is_shared else self.table
        if not table.numel() or bool((table.diff(dim=1) != 1).any()):
            return None
        step = pages_apart(table[:, 0])
        if step is None:
            return None
        first, size = int(table[0, 0]) * self.page_size + self.start, self.page_size

        def of_rows(x: Tensor, whole: Tensor) -> Tensor:
            across = step * (whole.shape[2] // (self._tokens // size)) * x.stride(2)
            shape = self.table.shape[0], *x.shape[1:]
            return x.as_strided(shape, (across, *x.stride()[1:]))

        if isinstance(self.slab, Tensor):
            return of_rows(self.slab.narrow(2, first, self.length), self.slab)
        found = self.slab.narrow(first, self.length)
        codes = of_rows(found.codes, self.slab.codes)
        return found._replace(codes=codes, scales=of_rows(found.scales, self.slab.scales))

    def copied(self) -> Values:
        """The stream in new tensors, as it is stored; of shared pages, one copy, expanded."""
        table = self.table[:1] if self.is_shared else self.table
        found = _each(self.slab, lambda x: self._selected(x, table).to(self.device))
        if isinstance(found, Tensor):
            found = found.narrow(2, self.start, self.length)
        else:
            found = found.narrow(self.start, self.length)
        if table.shape[0] == self.table.shape[0]:
            return found
        return _each(found, lambda x: x.expand(self.table.shape[0], -1, -1, -1))

    def in_one(self) -> Values:
        """The same tokens side by side: a view if the pages are consecutive, else a copy."""
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
            if last - first >= most and pages_apart(table[:, begin]) is not None:
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

    @property
    def _tokens(self) -> int:
        """Tokens of the slab."""
        return (self.slab if isinstance(self.slab, Tensor) else self.slab.codes).shape[2]

    def _selected(self, x: Tensor, table: Tensor) -> Tensor:
        """Whole pages of one tensor of the slab, copied."""
        _, heads, stored, width = x.shape
        pages = self._tokens // self.page_size
        a_page = stored // pages  # tokens, or runs of tokens that share scales
        head = torch.arange(heads, device="cpu")[:, None] * pages
        at = (table[:, None] + head).flatten().to(x.device)
        memory = x.view(heads * pages, a_page * width)
        shape = table.shape[0], heads, table.shape[1] * a_page, width
        return memory.index_select(0, at).view(shape)


def pages_apart(column: Int64[Tensor, " B"]) -> int | None:
    """From the page of one row to that of the next; None if rows are not equally far apart."""
    steps = set(column.diff().tolist()) or {0}
    step = steps.pop()
    return None if steps or step < 0 else step


def _each(values: Values, change: Callable[[Tensor], Tensor]) -> Values:
    """The tensors of a stream changed: itself, or its codes and scales."""
    if isinstance(values, Tensor):
        return change(values)
    return values._replace(codes=change(values.codes), scales=change(values.scales))
