"""Streams put into pages by hand: slabs in which every token that no row holds is NaN."""

import math
import random

import torch
from torch import Tensor

from regard import Part
from regard.cache.codes import QuantizedStream, quantize, quantize_channels
from regard.cache.paging.reading import PagedStream
from regard.cache.parts import Streams
from regard.cache.rotation import hadamard


def table_of(rng: random.Random, rows: int, pages: int, *, scattered: bool) -> Tensor:
    """Pages of a slab of twice as many and three more: at random, or one after another."""
    first = rng.randint(0, 3)
    numbers = list(range(first, first + rows * pages))
    if scattered:
        numbers = rng.sample(range(2 * rows * pages + 3), rows * pages)
    return torch.tensor(numbers, dtype=torch.int64).view(rows, pages)


def slab_of(stream: Tensor, table: Tensor, page_size: int, start: int) -> Tensor:
    """A slab that holds a stream `[B, G, S, W]`, token by token; all else is NaN, or -1."""
    pages = 2 * table.numel() + 3
    shape = 1, stream.shape[1], pages * page_size, stream.shape[3]
    slab = torch.full(shape, math.nan if stream.is_floating_point() else -1, dtype=stream.dtype)
    for row, numbers in enumerate(table.tolist()):
        for token in range(stream.shape[2]):
            page, at = divmod(start + token, page_size)
            slab[0, :, numbers[page] * page_size + at] = stream[row, :, token]
    return slab


def in_pages(
    streams: tuple[Tensor, ...],
    rng: random.Random,
    *,
    page_size: int = 3,
    scattered: bool = True,
    shared: bool = False,
    start: int | None = None,
) -> Streams:
    """Streams in pages, all by one table; `shared` if all rows have the pages of the first."""
    batch, length = streams[0].shape[0], streams[0].shape[2]
    start = rng.randrange(page_size) if start is None else start
    rows = 1 if shared else batch
    table = table_of(rng, rows, -(-(start + length) // page_size), scattered=scattered)
    return Streams(
        [
            PagedStream(
                slab_of(each[:rows], table, page_size, start),
                table.expand(batch, -1),
                page_size,
                start,
                length,
            )
            for each in streams
        ]
    )


def coded(
    paged: Streams, bits: tuple[int, int], rotations: tuple, *, by_channel: bool = False
) -> Streams:
    """The same pages stored as codes, of keys with scales `by_channel` of a page."""
    found = []
    for each, number, blocks in zip(paged.stored, bits, rotations, strict=False):
        slab = each.slab.nan_to_num(0.0)
        run, group = (each.page_size, 1) if by_channel and not found else (1, 16)
        quantise, shared = (quantize, group) if run == 1 else (quantize_channels, run)
        codes, scales = quantise(hadamard(slab.float(), blocks), number, shared)
        sizes = number, group, slab.shape[-1], slab.dtype, blocks, run
        found.append(each._replace(slab=QuantizedStream(codes, scales, *sizes)))
    return Streams(found)


def part_of(paged: Streams, kv_start: int = 0) -> Part:
    return Part(kv_start, kv_start + paged.stored[0].length, paged)
