"""The pages that a repeated decoding step reads and writes, and the tokens that it counts."""

from collections.abc import Sequence

from torch import Tensor

from regard.cache.codes import QuantizedStream
from regard.cache.paging.memory import Kind, Memory
from regard.cache.paging.reading import Segment, by_slab
from regard.cache.paging.tables import Tables
from regard.cache.parts import AnyStream
from regard.cache.streams import Lengths


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
        until a page is added. Empty, and an `update` is needed, if the token opens a page, or fills
        one that codes replace, if rows differ in length, there is a window or offloading, or no
        page was read before.
        """
        size, place = self.memory.page_size, self._lengths.longest % self.memory.page_size
        kind = self._kind
        if kind is None or self._lengths.rows is not None:
            return ()
        if not 0 < place < (size if kind.sealed is kind.open else size - 1):
            return ()
        simple = self.window is None and self.memory.offloading is None
        return self._rows.segments if simple else ()

    def pages_of_step(self) -> list[Sequence[AnyStream]]:
        """The streams of `segments_of_step` by slab, that of open pages last; none if rows share
        pages, or have a page in different slabs."""
        size, stop = self.memory.page_size, self._lengths.longest + 1
        segments = self.segments_of_step
        if any(each.table is None for each in segments):
            return []
        found = [each.paged(size, each.first * size, stop) for each in segments]
        return [] if any(streams[0].is_shared for streams in found) else by_slab(found)

    def count(self, new: int) -> None:
        """Count tokens that have been written to the open pages, and seal those that are full."""
        self._lengths = self._lengths.grown(new)
        if not self._lengths.longest % self.memory.page_size:
            for table in self._rows.tables:
                table.pages[-1].sealed = True
