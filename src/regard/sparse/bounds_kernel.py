"""The bounds of pages for the heads of a query, as a kernel that numba compiles.

Products are those of the decoding kernel (`regard.ops.kernels`): of queries with means, and of
their squares with spreads. Everything is in powers of 2, as there.
"""

import ctypes
import functools
import math
import struct
from typing import Any, NamedTuple, no_type_check

import numba
import numpy as np
import torch
from numba import carray, types
from torch import Tensor

from regard.compiling import compiled_from, part
from regard.ops.kernels import gathering, intrinsics, tiles, vectors
from regard.ops.kernels.intrinsics import (
    dot_products,
    exponentials,
    floats,
    hide_from,
    load_query,
    maximum,
    next_number,
    prefetch_far,
)
from regard.ops.kernels.launching import LOG2E, lanes_for, place_if_readable, workspace
from regard.ops.kernels.threads import launch
from regard.ops.kernels.tiles import FAR, HIDDEN, LINE, LOWEST, Tile, tile_for


class Shares(NamedTuple):
    """One call. Addresses are in bytes, strides in elements of their tensor."""

    heads: int  # key heads of all sequences, B x G
    kv_heads: int  # of a sequence, G
    rows: int  # heads of the query that share a key head, M
    pages: int  # n
    q: int  # address of the queries [B x G, M, D], contiguous
    mean: int  # address of the means [B, G, n, D]
    mean_batch: int
    mean_head: int
    mean_row: int
    spread: int  # address of the spreads [B, G, n, D]
    spread_batch: int
    spread_head: int
    spread_row: int
    shares: int  # address of the result [B x G, n], contiguous float32
    counters: int  # address of the next task and the next thread, in int64
    scratch: int  # address of the threads' memory
    scratch_bytes: int  # of each thread
    scale: float  # log2(e)


RECORD = np.dtype([(x, np.float32 if x == "scale" else np.int64) for x in Shares._fields],
                  align=True)  # fmt: skip  # as the kernel reads it
PACKED = struct.Struct(f"{len(Shares._fields) - 1}qf4x")  # the same, as Python packs it
LN2 = np.float32(math.log(2))
SIGNATURE = types.void(types.CPointer(numba.from_dtype(RECORD)))


def highest(q: Tensor, mean: Tensor, spread: Tensor) -> Tensor | None:
    """As `Bounds.highest`; None of tensors that the kernel does not read."""
    (batch, heads, _, width), (_, kv_heads, pages, _) = q.shape, mean.shape
    lanes, rows = lanes_for(width, width, torch.bfloat16, joined=True), heads // kv_heads
    q, dtype = q.contiguous(), torch.bfloat16
    q_at = place_if_readable(q, dtype, (batch, heads, 1, width))
    mean_at, spread_at = (place_if_readable(x, dtype, mean.shape) for x in (mean, spread))
    if width % lanes or q_at is None or mean_at is None or spread_at is None:
        return None
    tile, address = compiled(rows, width, lanes)
    shares = torch.empty(batch, kv_heads, pages, dtype=torch.float32, device="cpu")
    size = scratch_bytes(tile, rows, pages)
    threads = min(torch.get_num_threads(), batch * kv_heads)
    start = workspace(LINE + threads * size)
    sizes = batch * kv_heads, kv_heads, rows, pages
    data = PACKED.pack(*sizes, q_at[0], *mean_at, *spread_at, shares.data_ptr(), start,
                       start + LINE, size, LOG2E)  # fmt: skip
    ctypes.memset(start, 0, LINE)
    launch(address, data, threads)
    return shares


def scratch_bytes(tile: Tile, rows: int, pages: int) -> int:
    """Bytes of a thread: queries and their squares, the bounds of all pages in whole blocks, and
    the spreads and powers of a block."""
    padded, blocks = tile.padded(rows), -(-pages // tile.block)
    return 4 * (2 * padded * tile.width + (blocks + 1) * padded * tile.block + tile.block)


@functools.cache
def compiled(rows: int, width: int, lanes: int) -> tuple[Tile, int]:
    tile = tile_for(rows, width, width, half=True, joined=True, biased=False, lanes=lanes)
    return tile, int(kernel(tile).address)


@functools.cache
@no_type_check
def kernel(tile: Tile) -> Any:
    """The machine code of a tile: a C function of the address of one `Shares` record."""

    def find_shares(data):
        call = carray(data, 1)[0]
        scratch = call.scratch + next_number(call.counters + 8) * call.scratch_bytes
        while True:
            task = next_number(call.counters)
            if task >= call.heads:
                break
            shares_of(tile, call, task, scratch)

    return compiled_from(find_shares, SIGNATURE, gathering, intrinsics, tiles, vectors)


@part
@no_type_check
def shares_of(tile, call, task, scratch):
    """The shares of all pages, for one key head: of each the greatest of its rows."""
    padded = (call.rows + tile.rows - 1) // tile.rows * tile.rows
    squares = scratch + padded * tile.query_bytes
    spare = squares + padded * tile.query_bytes  # spreads of a block, then powers of a row
    bounds, block_bytes = spare + 4 * (padded + 1) * tile.block, 4 * padded * tile.block
    load_queries(tile, call, task, padded, scratch, squares)
    batch, head = task // call.kv_heads, task % call.kv_heads
    mean = call.mean + tile.item * (batch * call.mean_batch + head * call.mean_head)
    spread = call.spread + tile.item * (batch * call.spread_batch + head * call.spread_head)
    blocks = (call.pages + tile.block - 1) // tile.block
    for n in range(blocks):
        first = n * tile.block
        count = min(tile.block, call.pages - first)
        at = bounds + n * block_bytes
        multiply(tile, padded, count, scratch, mean + tile.item * first * call.mean_row,
                 tile.item * call.mean_row, at)  # fmt: skip
        multiply(tile, padded, count, squares, spread + tile.item * first * call.spread_row,
                 tile.item * call.spread_row, spare)  # fmt: skip
        sums, above = floats(at), floats(spare)
        for i in range(padded * tile.block):
            sums[i] += np.float32(math.sqrt(above[i]))
        for r in range(call.rows):
            hide_from(tile, count, at + 4 * r * tile.block)
    shares = floats(call.shares + 4 * task * call.pages)
    for i in range(call.pages):
        shares[i] = HIDDEN
    for r in range(call.rows):
        row = bounds + 4 * r * tile.block
        total = total_of(tile, blocks, row, block_bytes, spare)
        for n in range(blocks):
            own, first = floats(row + n * block_bytes), n * tile.block
            for i in range(min(tile.block, call.pages - first)):
                shares[first + i] = max(shares[first + i], (own[i] - total) * LN2)


@part
@no_type_check
def load_queries(tile, call, task, padded, queries, squares):
    """Write the queries of a key head, in powers of 2, and their squares."""
    for i in range(padded):
        row = call.q + tile.item * (task * call.rows + min(i, call.rows - 1)) * tile.width
        load_query(tile, row, queries + i * tile.query_bytes, call.scale)
    x, y = floats(queries), floats(squares)
    for i in range(padded * tile.width):
        y[i] = x[i] * x[i]


@part
@no_type_check
def multiply(tile, padded, count, queries, keys, stride, products):
    """products[m, j] = queries[m] . keys[j] for `count` rows j of a block."""
    for r in range(0, padded, tile.rows):
        for j in range(0, count, tile.keys):
            if r == 0:
                for i in range(j, min(count, j + tile.keys)):
                    prefetch_far(tile, keys + FAR * tile.block * stride, i, stride)
            dot_products(tile, queries + r * tile.query_bytes, keys, stride, 0, 0, j, count - 1,
                         products + 4 * r * tile.block)  # fmt: skip


@part
@no_type_check
def total_of(tile, blocks, row, block_bytes, spare):
    """The logarithm of the sum of a row's powers."""
    top, total = LOWEST, np.float32(0)
    for n in range(blocks):
        top = maximum(tile, row + n * block_bytes, top)
    powers = floats(spare)
    for n in range(blocks):
        own = floats(row + n * block_bytes)
        for i in range(tile.block):
            powers[i] = own[i]
        total += exponentials(tile, spare, top)
    return top + np.float32(math.log2(total))
