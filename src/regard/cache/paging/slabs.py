"""The memory of a pool: for each kind of page one slab, in which pages lie one after another."""

import contextlib
import math
import mmap
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.cache.codes import QuantizedStream, bytes_of, quantize_channels
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
    group: int = 0  # channels that share a scale
    rotation: tuple[int, ...] = ()
    run: int = 1  # tokens that share scales: those of a page, or one

    @property
    def plain(self) -> "Outline":
        """The same stream stored as it is."""
        return self._replace(bits=None, group=0, rotation=(), run=1)

    def buffers(self, tokens: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes `[G, tokens, w]` and dtypes of what stores so many tokens: values, or codes and
        scales."""
        if self.bits is None:
            return [((self.heads, tokens, self.width), self.dtype)]
        groups = -(-self.width // self.group)
        codes = self.heads, tokens, bytes_of(self.width, self.bits)
        scales = self.heads, tokens // self.run, 2 * groups
        return [(codes, torch.uint8), (scales, torch.bfloat16)]

    def empty(self, rows: int, tokens: int) -> Tensor:
        """A tensor of such a stream, not initialised."""
        shape = rows, self.heads, tokens, self.width
        return writable(lambda: torch.empty(shape, dtype=self.dtype, device=self.device))


def outlines_of(
    streams: Sequence[Tensor], form: PageFormat, page_size: int, pieces: Sequence[int] | None
) -> tuple[Outline, ...]:
    """The outlines of streams `[B, G, L, W]` in pages of a format.

    Args:
        streams: of one update.
        form: of sealed pages.
        page_size: tokens of a page.
        pieces: the widths of the pieces that one joined stream consists of, if a layer announced
            them; only the first piece is rotated then.
    """
    found = []
    for index, stream in enumerate(streams):
        _, heads, _, width = stream.shape
        plain = Outline(heads, width, stream.dtype, stream.device)
        rotation = form.rotation_of(index, len(streams), width, pieces)
        found.append(coded(plain, index, form, page_size, rotation))
    return tuple(found)


def coded(
    plain: Outline, index: int, form: PageFormat, page_size: int, rotation: tuple[int, ...]
) -> Outline:
    """The outline of a stream in sealed pages of a format.

    Args:
        plain: its outline as it is.
        index: of the stream.
        form: of the pages.
        page_size: tokens of a page.
        rotation: of its channels, where each token has scales.
    """
    bits = form.bits_of_stream(index) if plain.dtype.is_floating_point else None
    if bits is None:
        return plain
    run, group = form.shares(index, page_size)
    return plain._replace(bits=bits, group=group, rotation=() if run > 1 else rotation, run=run)


class Slab:
    """Pages of one kind; page i of a stream is its tokens `i * page_size .. (i + 1) * page_size`.

    Buffers double when they are full. Tensors that were read from the old ones stay valid.
    """

    most = 1 << 62  # pages that buffers need room for at most
    read_on: torch.device | None = None  # the device to which tokens are copied; None: they stay

    def __init__(self, outlines: tuple[Outline, ...], page_size: int, *, sealed: bool) -> None:
        self.outlines, self.page_size, self.sealed = outlines, page_size, sealed
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
        for buffer, values, run in self._written(tokens):
            places = at.to(buffer.device)[::run] // run
            buffer[0].index_copy_(1, places, values)

    def put(self, start: int, tokens: Sequence[Tensor]) -> None:
        """`write` to the tokens from `start` on."""
        for buffer, values, run in self._written(tokens):
            buffer[0].narrow(1, start // run, values.shape[1]).copy_(values)

    def _written(self, tokens: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Each buffer, what it stores of streams `[G, n, W]`, and how many tokens share that."""
        for held, outline, values in zip(self.streams, self.outlines, tokens, strict=True):
            buffers, stored = _buffers(held), _stored(values.detach(), outline)
            yield from zip(buffers, stored, (1, outline.run)[: len(buffers)], strict=True)

    def read(self, at: Int64[Tensor, " n"]) -> tuple[Tensor, ...]:
        """The values of the tokens `at`, as streams `[G, n, W]` in new tensors."""
        chosen = []
        for held in self.streams:
            if isinstance(held, QuantizedStream):
                codes = held.codes.index_select(2, at.to(held.codes.device))
                scales = held.scales.index_select(2, at.to(codes.device) // held.run)
                values = held._replace(codes=codes, scales=scales, run=1).to_tensor()
            else:
                values = held.index_select(2, at.to(held.device))
            chosen.append(values[0].to(self.read_on))
        return tuple(chosen)

    def stored(self, number: int) -> tuple[Tensor, ...]:
        """What a page stores, as views: values `[G, page_size, w]`, or codes and scales."""
        pages = self.capacity
        buffers = (buffer[0] for held in self.streams for buffer in _buffers(held))
        return tuple(each.unflatten(1, (pages, -1))[:, number] for each in buffers)

    def clear(self, start: int, stop: int) -> None:
        """Write zeros to the tokens `start..stop`, of values."""
        for held in self.streams:
            assert isinstance(held, Tensor), "sealed pages are written whole"
            held.narrow(2, start, stop - start).zero_()

    def _grown(self, index: int, outline: Outline, capacity: int) -> Tensor | QuantizedStream:
        tokens = capacity * self.page_size
        new = self._allocated(outline, tokens)
        if self.capacity:
            for buffer, old in zip(_buffers(new), _buffers(self.streams[index]), strict=True):
                buffer.narrow(2, 0, old.shape[2]).copy_(old)
        return new

    def _allocated(self, outline: Outline, tokens: int) -> Tensor | QuantizedStream:
        buffers = [
            self.memory((1, *shape), dtype, outline.device)
            for shape, dtype in outline.buffers(tokens)
        ]
        _, width, dtype, _, bits, group, rotation, run = outline
        if bits is None:
            return buffers[0]
        codes, scales = buffers
        return QuantizedStream(codes, scales, bits, group, width, dtype, rotation, run)

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
    if outline.run > 1:
        return quantize_channels(values, outline.bits, outline.run)
    return quantized(values, outline.bits, outline.group, outline.rotation)
