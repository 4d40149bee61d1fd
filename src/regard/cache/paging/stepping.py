"""The pages that a repeated decoding step reads and writes, and the tokens that it counts."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.cache.codes import QuantizedStream
from regard.cache.paging.memory import Kind, Memory
from regard.cache.paging.reading import Segment, Values
from regard.cache.paging.tables import Tables
from regard.cache.streams import Lengths


class PagedRange(NamedTuple):
    """Tokens of all rows in pages of one slab: its streams, the pages of each row, a count."""

    streams: tuple[Values, ...]
    table: Int64[Tensor, "rows n"]
    tokens: int


class Stepping:
    """The methods of a `PagedCache` for steps that write to its open pages without an `update`."""

    memory: Memory
    window: int | None
    _kind: Kind | None
    _lengths: Lengths
    _rows: Tables

    @property
    def buffers(self) -> tuple[Tensor | QuantizedStream, ...]:
        """The memory `[1, G, tokens of all pages, W]` of the streams in open pages."""
        return () if self._kind is None else self._kind.open.streams

    @property
    def segments_of_step(self) -> Sequence[Segment]:
        """The segments, with room for one more token in the last page of each row: the same list
        until a page is added. Empty, and an `update` is needed, if the token opens or fills a page,
        rows differ in length, there is a window or offloading, or no page was read before.
        """
        size, place = self.memory.page_size, self._lengths.longest % self.memory.page_size
        if not 0 < place < size - 1 or self._lengths.rows is not None:
            return ()
        simple = self.window is None and self.memory.offloading is None
        return self._rows.segments if simple else ()

    def pages_of_step(self) -> list[PagedRange]:
        """The pages of `segments_of_step` by slab; none if rows share pages. The order of the keys
        is not kept: attention that sees all of them does not depend on it."""
        size, stop = self.memory.page_size, self._lengths.longest + 1
        ranges = [_range(each, size, stop) for each in self.segments_of_step]
        found = [each for each in ranges if each is not None]
        return _by_slab(found) if found and len(found) == len(ranges) else []

    def count(self, new: int) -> None:
        """Count tokens that have been written to the open pages."""
        self._lengths = self._lengths.grown(new)


def _range(segment: Segment, page_size: int, stop: int) -> PagedRange | None:
    """The slots of a segment before `stop`; None of pages in several slabs, or that rows share."""
    slab, table = segment.slab, segment.table
    if slab is None or table is None or (table.shape[0] > 1 and table.stride(0) == 0):
        return None
    tokens = min(segment.size * page_size, stop - segment.first * page_size)
    return PagedRange(slab.streams, table, tokens)


def _by_slab(ranges: Sequence[PagedRange]) -> list[PagedRange]:
    """The ranges of each slab as one; the slab of the last range, with the open pages, is last."""
    groups: dict[int, list[PagedRange]] = {}
    for each in ranges:
        groups.setdefault(id(each.streams), []).append(each)
    last = groups.pop(id(ranges[-1].streams))
    return [_joined(group) for group in (*groups.values(), last)]


def _joined(ranges: Sequence[PagedRange]) -> PagedRange:
    tables = [each.table for each in ranges]
    table = torch.cat(tables, 1) if len(tables) > 1 else tables[0]
    return PagedRange(ranges[0].streams, table, sum(each.tokens for each in ranges))
