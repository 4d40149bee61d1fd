"""Pages: the memory in which they lie, one kind in each slab, and the table of a row's pages."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.cache.codes import QuantizedStream, bytes_of, quantize_channels
from regard.cache.paging.formats import PageFormat
from regard.cache.quantizing import quantized
from regard.cache.streams import writable
from regard.huge_pages import zeros_in_huge_pages

_FIRST_CAPACITY = 16  # pages of the first buffers; they double when they are full


class Outline(NamedTuple):
    """The shape and dtype of one stream of a layer, and how a sealed page stores it."""

    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device
    bits: int | None = None  # of a code; None where values are stored
    group: int = 0  # channels that share a scale
    rotation: tuple[int, ...] = ()
    run: int = 1  # tokens that share scales: those of a page, or one

    @property
    def plain(self) -> "Outline":
        """The outline of the stream in open pages, which store values."""
        return self._replace(bits=None, group=0, rotation=(), run=1)

    def buffers(self, tokens: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes `[G, tokens, w]` and dtypes of the memory of so many tokens: values, or codes and
        scales."""
        if self.bits is None:
            return [((self.heads, tokens, self.width), self.dtype)]
        groups = -(-self.width // self.group)
        codes = self.heads, tokens, bytes_of(self.width, self.bits)
        scales = self.heads, tokens // self.run, 2 * groups
        return [(codes, torch.uint8), (scales, torch.bfloat16)]

    def empty(self, rows: int) -> Tensor:
        """A tensor `[rows, G, 0, W]` of the stream."""
        shape = rows, self.heads, 0, self.width
        return writable(lambda: torch.empty(shape, dtype=self.dtype, device=self.device))


def outlines_of(
    streams: Sequence[Tensor], form: PageFormat, page_size: int, pieces: Sequence[int] | None
) -> tuple[Outline, ...]:
    """The outlines of the streams `[B, G, L, W]` of one update in sealed pages of a format.

    `pieces` are the widths of the pieces that one joined stream consists of, if a layer announced
    them; only the first piece is rotated then.
    """
    found = []
    for index, stream in enumerate(streams):
        _, heads, _, width = stream.shape
        outline = Outline(heads, width, stream.dtype, stream.device)
        bits = form.bits_of_stream(index) if stream.dtype.is_floating_point else None
        if bits is not None:  # rotated where each token has scales
            run, group = form.shares(index, page_size)
            rotation = form.rotation_of(index, len(streams), width, pieces) if run == 1 else ()
            outline = outline._replace(bits=bits, group=group, rotation=rotation, run=run)
        found.append(outline)
    return tuple(found)


class Slab:
    """Pages of one kind; page i of a stream is its tokens `i * page_size .. (i + 1) * page_size`.

    If it is `sealed`, all pages are, and stored in the pool's format. A slab with `host_of` has
    pages of that slab, moved to the memory of the host. Buffers have room for `most` pages at most;
    they double when they are full, and tensors that were read from the old ones stay valid.
    """

    def __init__(
        self,
        outlines: tuple[Outline, ...],
        page_size: int,
        *,
        sealed: bool,
        host_of: "Slab | None" = None,
        most: int = 1 << 62,
    ) -> None:
        self.outlines, self.page_size, self.sealed = outlines, page_size, sealed
        self.host_of, self.most = host_of, most
        self.read_on: torch.device | None = None  # device to which tokens are copied, if not here
        self._pinned = False
        if host_of is not None:
            (device,) = {each.device for each in outlines}
            self.read_on = None if device.type == "cpu" else device
            self._pinned = device.type == "cuda"
        # whether the tokens of a page share scales: such codes stand for finite numbers alone
        self.shares_scales = any(each.run > 1 for each in outlines)
        self.capacity = 0  # pages
        self.streams: tuple[Tensor | QuantizedStream, ...] = ()
        self._free: list[int] = []  # a heap, some of whose numbers are in use again
        self._is_free: set[int] = set()

    @property
    def in_use(self) -> int:
        """The number of pages in use."""
        return self.capacity - len(self._is_free)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        buffers = (each for outline in self.outlines for each in outline.buffers(self.page_size))
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in buffers)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers."""
        return self.capacity * self.page_bytes

    def reserve(self, pages: int) -> None:
        """Allocate buffers in which so many more pages are free."""
        wanted = self.in_use + pages
        if wanted <= self.capacity:
            return
        capacity = max(wanted, min(self.most, max(_FIRST_CAPACITY, 2 * self.capacity)))
        self.streams = tuple(
            self._grown(index, each, capacity) for index, each in enumerate(self.outlines)
        )
        added = range(self.capacity, capacity)
        self._is_free.update(added)
        self._free += added
        heapify(self._free)
        self.capacity = capacity

    def take(self, after: int | None = None) -> int:
        """The number of a free page: the one after page `after` if it is free."""
        if after is not None and after + 1 in self._is_free:
            self._is_free.remove(after + 1)
            return after + 1
        while True:
            number = heappop(self._free)
            if number in self._is_free:
                self._is_free.remove(number)
                return number

    def give(self, number: int) -> None:
        """Free a page. When none is in use, the buffers are freed."""
        assert number not in self._is_free, "a page is freed once"
        self._is_free.add(number)
        heappush(self._free, number)
        if len(self._free) > 2 * self.capacity:  # most of them in use again, or there twice
            self._free = sorted(self._is_free)
        if not self.in_use:
            self.capacity, self.streams = 0, ()
            self._free, self._is_free = [], set()

    def write(self, at: Int64[Tensor, " n"], tokens: Sequence[Tensor]) -> None:
        """Write streams `[G, n, W]` to the tokens `at` of the slab, without a gradient: where
        tokens share scales, whole pages."""
        for buffer, values, run in self._coded(tokens):
            places = at.to(buffer.device)[::run] // run
            buffer[0].index_copy_(1, places, values)

    def put(self, start: int, tokens: Sequence[Tensor]) -> None:
        """`write` to the tokens from `start` on."""
        for buffer, values, run in self._coded(tokens):
            buffer.narrow(2, start // run, values.shape[1]).copy_(values)

    def _coded(self, tokens: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Each buffer, streams `[G, n, W]` as it stores them, and the tokens that share a row."""
        for stream, outline, values in zip(self.streams, self.outlines, tokens, strict=True):
            buffers, stored = _buffers(stream), _stored(values, outline)
            yield from zip(buffers, stored, (1, outline.run)[: len(buffers)], strict=True)

    def read(self, at: Int64[Tensor, " n"]) -> tuple[Tensor, ...]:
        """The values of the tokens `at`, as streams `[G, n, W]` in new tensors."""
        chosen = []
        for stream in self.streams:
            if isinstance(stream, QuantizedStream):
                codes = stream.codes.index_select(2, at.to(stream.codes.device))
                scales = stream.scales.index_select(2, at.to(codes.device) // stream.run)
                values = stream._replace(codes=codes, scales=scales, run=1).to_tensor()
            else:
                values = stream.index_select(2, at.to(stream.device))
            chosen.append(values[0].to(self.read_on))
        return tuple(chosen)

    def stored(self, number: int) -> tuple[Tensor, ...]:
        """The memory of a page, as views: values `[G, page_size, w]`, or codes and scales."""
        buffers = (buffer[0] for stream in self.streams for buffer in _buffers(stream))
        return tuple(each.unflatten(1, (self.capacity, -1))[:, number] for each in buffers)

    def clear(self, start: int, stop: int) -> None:
        """Write zeros to the tokens `start..stop`, of values."""
        for stream in self.streams:
            assert isinstance(stream, Tensor), "sealed pages are written whole"
            stream.narrow(2, start, stop - start).zero_()

    def _grown(self, index: int, outline: Outline, capacity: int) -> Tensor | QuantizedStream:
        buffers = [
            self._allocate((1, *shape), dtype, outline.device)
            for shape, dtype in outline.buffers(capacity * self.page_size)
        ]
        if self.capacity:
            for buffer, old in zip(buffers, _buffers(self.streams[index]), strict=True):
                buffer.narrow(2, 0, old.shape[2]).copy_(old)
        _, width, dtype, _, bits, group, rotation, run = outline
        if bits is None:
            return buffers[0]
        codes, scales = buffers
        return QuantizedStream(codes, scales, bits, group, width, dtype, rotation, run)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer, whatever it holds."""
        if self.host_of is not None:
            device = torch.device("cpu")
        elif device.type == "cpu":
            return writable(lambda: zeros_in_huge_pages(shape, dtype))
        pin = self._pinned
        return writable(lambda: torch.empty(shape, dtype=dtype, device=device, pin_memory=pin))


def _buffers(stream: Tensor | QuantizedStream) -> tuple[Tensor, ...]:
    return (stream,) if isinstance(stream, Tensor) else (stream.codes, stream.scales)


def _stored(values: Tensor, outline: Outline) -> tuple[Tensor, ...]:
    """Values `[G, n, W]` as they are stored: themselves, or codes and scales."""
    if values.requires_grad:
        values = values.detach()
    if outline.bits is None:
        return (values,)
    if outline.run > 1:
        return quantize_channels(values, outline.bits, outline.run)
    return quantized(values, outline.bits, outline.group, outline.rotation)


class Page:
    """`page_size` tokens of one row of one layer."""

    __slots__ = ("index", "node", "references", "sealed", "slab", "used")

    def __init__(self, slab: Slab, index: int) -> None:
        self.slab, self.index = slab, index  # the memory, and the number of the page in it
        self.references = 0  # tables that hold the page
        self.used = 0  # number of the pool's operation that last found or stored it as a prefix
        self.sealed = False  # whether it is full, and so immutable: several tables may hold it
        self.node: Any = None  # of a stored prefix that holds the page

    @property
    def start(self) -> int:
        """The number of the page's first token in the slab."""
        return self.index * self.slab.page_size

    @property
    def tokens(self) -> Int64[Tensor, " page_size"]:
        """The numbers of the page's tokens in the slab."""
        return torch.arange(self.start, self.start + self.slab.page_size, device="cpu")

    @property
    def is_private(self) -> bool:
        """Whether the page is in one table, and in no stored prefix."""
        return self.references == 1 and self.node is None

    def __repr__(self) -> str:
        state = "sealed" if self.sealed else "open"
        return f"Page({self.index}, {state}, references={self.references})"


@dataclass
class PageTable:
    """The pages of one row, in order."""

    # the pages that are held; those before a window are released
    pages: list[Page] = field(default_factory=list)
    first: int = 0  # number of pages of the row before the first that is held

    @property
    def stop(self) -> int:
        """One past the number of the last page."""
        return self.first + len(self.pages)

    def at(self, number: int) -> Page | None:
        """The page of that number; None if the row does not have it."""
        index = number - self.first
        return self.pages[index] if 0 <= index < len(self.pages) else None

    def cut(self, length: int, page_size: int) -> "PageTable":
        """A new table of the pages of the first `length` tokens."""
        stop = -(-length // page_size)
        if stop <= self.first:
            return PageTable([], length // page_size)
        return PageTable(self.pages[: stop - self.first], self.first)

    def since(self, number: int) -> "PageTable":
        """The table without the pages before that number; the same object if there are none."""
        count = min(number - self.first, len(self.pages))
        return self if count <= 0 else PageTable(self.pages[count:], self.first + count)

    def copied(self) -> "PageTable":
        """A new table of the same pages."""
        return PageTable(list(self.pages), self.first)
