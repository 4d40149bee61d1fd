"""The memory of a pool: for each kind of page one slab, in which pages lie one after another."""

import contextlib
import math
import mmap
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.cache.codes import QuantizedStream, bytes_of
from regard.cache.paging.formats import PageFormat
from regard.cache.quantizing import quantized
from regard.cache.streams import writable

_LARGE = 4 << 20  # bytes of a buffer, from which huge pages of 2 MiB are asked for
_FIRST_CAPACITY = 16  # pages of the first buffers; they double when they are full


class Outline(NamedTuple):
    """The shape and dtype of one stream of a layer, and how a sealed page stores it."""

    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device
    bits: int | None = None  # of its codes; None where it is stored as it is
    group: int = 0
    rotation: tuple[int, ...] = ()

    @property
    def plain(self) -> "Outline":
        """The same stream stored as it is."""
        return self._replace(bits=None, group=0, rotation=())

    def empty(self, rows: int, tokens: int) -> Tensor:
        """A tensor of such a stream, not initialised."""
        shape = rows, self.heads, tokens, self.width
        return writable(lambda: torch.empty(shape, dtype=self.dtype, device=self.device))


def outlines_of(
    streams: Sequence[Tensor], form: PageFormat, pieces: Sequence[int] | None
) -> tuple[Outline, ...]:
    """The outlines of streams `[B, G, L, W]` in pages of a format.

    Args:
        streams: of one update.
        form: of sealed pages.
        pieces: the widths of the pieces that one joined stream consists of, if a layer announced
            them; only the first piece is rotated then.
    """
    return tuple(
        _outline(each, index, len(streams), form, pieces) for index, each in enumerate(streams)
    )


def _outline(
    stream: Tensor, index: int, count: int, form: PageFormat, pieces: Sequence[int] | None
) -> Outline:
    _, heads, _, width = stream.shape
    plain = Outline(heads, width, stream.dtype, stream.device)
    bits = form.bits_of_stream(index) if stream.is_floating_point() else None
    if bits is None:
        return plain
    rotation = form.rotation_of(index, count, width, pieces)
    return plain._replace(bits=bits, group=form.group, rotation=rotation)


class Slab:
    """Pages of one kind; page i of a stream is its tokens `i * page_size .. (i + 1) * page_size`.

    Buffers double when they are full. Tensors that were read from the old ones stay valid.
    """

    most = 1 << 62  # pages that buffers need room for at most
    read_on: torch.device | None = None  # the device to which tokens are copied; None: they stay

    def __init__(self, outlines: tuple[Outline, ...], page_size: int, *, sealed: bool) -> None:
        self.outlines, self.page_size, self.sealed = outlines, page_size, sealed
        self.capacity = 0  # pages
        self.streams: tuple[Tensor | QuantizedStream, ...] = ()
        self._free: list[int] = []  # a heap, some of whose numbers are in use again
        self._is_free: set[int] = set()

    @property
    def in_use(self) -> int:
        """The number of pages in use."""
        return self.capacity - len(self._is_free)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one row."""
        total = 0
        for each in self.outlines:
            if each.bits is None:
                total += each.heads * each.width * each.dtype.itemsize
            else:
                groups = -(-each.width // each.group)
                total += each.heads * (bytes_of(each.width, each.bits) + 4 * groups)
        return total

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_size * self.token_bytes

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
        """Write streams `[G, n, W]` to the tokens `at` of the slab, without a gradient."""
        for held, outline, new in zip(self.streams, self.outlines, tokens, strict=True):
            for buffer, values in zip(_buffers(held), _stored(new.detach(), outline), strict=True):
                buffer[0].index_copy_(1, at.to(buffer.device), values)

    def put(self, start: int, tokens: Sequence[Tensor]) -> None:
        """Write streams `[G, n, W]` to the tokens from `start` on, without a gradient."""
        for held, outline, new in zip(self.streams, self.outlines, tokens, strict=True):
            for buffer, values in zip(_buffers(held), _stored(new.detach(), outline), strict=True):
                buffer[0].narrow(1, start, values.shape[1]).copy_(values)

    def read(self, at: Int64[Tensor, " n"]) -> tuple[Tensor, ...]:
        """The values of the tokens `at`, as streams `[G, n, W]` in new tensors."""
        chosen = []
        for held in self.streams:
            parts = [buffer.index_select(2, at.to(buffer.device)) for buffer in _buffers(held)]
            if isinstance(held, QuantizedStream):
                parts = [held._replace(codes=parts[0], scales=parts[1]).dequantized()]
            chosen.append(parts[0][0].to(self.read_on))
        return tuple(chosen)

    def stored(self, number: int) -> tuple[Tensor, ...]:
        """What a page stores, as views `[G, page_size, w]`: values, or codes and scales."""
        start, size = number * self.page_size, self.page_size
        buffers = (buffer for held in self.streams for buffer in _buffers(held))
        return tuple(buffer[0].narrow(1, start, size) for buffer in buffers)

    def clear(self, start: int, stop: int) -> None:
        """Write zeros to the tokens `start..stop`."""
        for held in self.streams:
            for buffer in _buffers(held):
                buffer.narrow(2, start, stop - start).zero_()

    def _grown(self, index: int, outline: Outline, capacity: int) -> Tensor | QuantizedStream:
        tokens = capacity * self.page_size
        new = self._allocated(outline, tokens)
        if self.capacity:
            for buffer, old in zip(_buffers(new), _buffers(self.streams[index]), strict=True):
                buffer.narrow(2, 0, old.shape[2]).copy_(old)
        return new

    def _allocated(self, outline: Outline, tokens: int) -> Tensor | QuantizedStream:
        bits, group = outline.bits, outline.group

        def memory(width: int, dtype: torch.dtype) -> Tensor:
            return self.memory((1, outline.heads, tokens, width), dtype, outline.device)

        if bits is None:
            return memory(outline.width, outline.dtype)
        codes = memory(bytes_of(outline.width, bits), torch.uint8)
        scales = memory(2 * -(-outline.width // group), torch.bfloat16)
        return QuantizedStream(
            codes, scales, bits, group, outline.width, outline.dtype, outline.rotation
        )

    def memory(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer, not initialised."""
        if device.type == "cpu" and math.prod(shape) * dtype.itemsize >= _LARGE:
            return writable(lambda: _in_huge_pages(shape, dtype))
        return writable(lambda: torch.empty(shape, dtype=dtype, device=device))


def _in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A buffer in the system's huge pages where it has any (Linux): a table leads to tokens that
    lie far apart, and each small page of the system that is read first costs a look-up."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device="cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    area = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    with contextlib.suppress(OSError):  # a kernel without them
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=dtype).view(shape)


def _buffers(stream: Tensor | QuantizedStream) -> tuple[Tensor, ...]:
    return (stream,) if isinstance(stream, Tensor) else (stream.codes, stream.scales)


def _stored(values: Tensor, outline: Outline) -> tuple[Tensor, ...]:
    """Values `[G, n, W]` as they are stored: themselves, or codes and scales."""
    if outline.bits is None:
        return (values,)
    return quantized(values, outline.bits, outline.group, outline.rotation)
