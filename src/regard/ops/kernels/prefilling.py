"""Attention of many queries in bfloat16 or float32 on a CPU, compiled by LLVM through numba.

A task is some blocks of 32 queries of the heads that share a key head. For each block of keys that
they may attend to, a task computes the transposed scores, k q^T, and their powers of 2, which are
then the right operand of v^T p^T. That is FlashAttention's online softmax (arXiv:2205.14135).
"""

import functools
from typing import Any, no_type_check

import numba
import numpy as np
from numba import carray, types

from regard.compiling import compiled_from
from regard.ops.kernels import columns, intrinsics, panels, products, tiles, vectors
from regard.ops.kernels.columns import (
    begin_sums,
    hide,
    ints,
    pack_keys,
    pack_queries,
    pack_values,
    powers,
    raise_maxima,
    store_rows,
)
from regard.ops.kernels.intrinsics import floats, next_number
from regard.ops.kernels.panels import BLOCK, PREFILL, ROW, SIDE, TILE, Panel
from regard.ops.kernels.products import (
    add_product,
    add_rows,
    begin_tiles,
    end_tiles,
    product,
    score_keys,
)
from regard.ops.kernels.tiles import LOWEST

phase = numba.njit(inline="always")  # LLVM's inlining would double the kernel's machine code
SIGNATURE = types.void(types.CPointer(numba.from_dtype(PREFILL)))
MODULES = columns, intrinsics, panels, products, tiles, vectors  # that the kernels contain
PACKED = 8  # groups of keys that one task packs


@functools.cache
@no_type_check
def packing(panel: Panel) -> Any:
    """The machine code that packs keys and values: a C function of a `Prefill` record."""

    def pack(data):
        call = carray(data, 1)[0]
        groups = (call.keys + SIDE - 1) // SIDE
        tasks = (groups + PACKED - 1) // PACKED
        while True:
            task = next_number(call.counters)
            if task >= call.pairs * tasks:
                break
            pair = task // tasks
            batch = (call.first + pair) // call.kv_heads
            head = (call.first + pair) % call.kv_heads
            k = call.k + 2 * (batch * call.k_batch + head * call.k_head)
            v = call.v + 2 * (batch * call.v_batch + head * call.v_head)
            low = (task - pair * tasks) * PACKED
            for group in range(low, min(groups, low + PACKED)):
                first, place = group * SIDE, pair * groups + group
                pack_keys(panel, first, call.keys, k, 2 * call.k_row,
                          call.packed_keys + place * panel.key_bytes)  # fmt: skip
                pack_values(panel, first, call.keys, v, 2 * call.v_row,
                            call.packed_values + place * panel.value_bytes)  # fmt: skip

    return compiled_from(pack, SIGNATURE, *MODULES)


@functools.cache
@no_type_check
def attending(panel: Panel) -> Any:
    """The machine code that attends to packed keys: a C function of a `Prefill` record."""
    square = panel._replace(width=SIDE)  # products with a row for each key, of a block of queries

    def prefill(data):
        call = carray(data, 1)[0]
        scratch = call.scratch + next_number(call.counters + 24) * call.scratch_bytes
        parts, scores = scratch + TILE, scratch + call.scratch_bytes - BLOCK * ROW
        begin_tiles(panel, call.palette, scratch)
        blocks = (call.queries + SIDE - 1) // SIDE
        tasks = (blocks + call.blocks - 1) // call.blocks
        while True:
            task = next_number(call.counters + 16)
            if task >= call.pairs * tasks:
                break
            pair = task // tasks
            first = (tasks - 1 - (task - pair * tasks)) * call.blocks  # the longest first
            attend(panel, square, call, pair, first, min(blocks, first + call.blocks), parts,
                   scores)  # fmt: skip
        end_tiles(panel, scratch)

    return compiled_from(prefill, SIGNATURE, *MODULES)


@phase
@no_type_check
def attend(panel, square, call, pair, first, last, parts, scores):
    """Blocks first ... last - 1 of the queries of a key head."""
    batch = (call.first + pair) // call.kv_heads
    head = (call.first + pair) % call.kv_heads * call.group
    keys, key_pace, values, value_pace = keys_of(panel, call, pair, batch)
    limits = 4 * (batch * call.limits_batch)
    begin(panel, call, batch, head, first, last, parts)
    low, high = call.keys, 0
    for block in range(first, last):
        start, stop, _, _ = visible(panel, call, limits, block)
        low, high = min(low, start), max(high, stop)
    for j in range(low // SIDE * SIDE, high, BLOCK):
        for block in range(first, last):
            start, stop, inner, end = visible(panel, call, limits, block)
            start = max(j, start // SIDE * SIDE)
            stop = min(j + BLOCK, (stop + SIDE - 1) // SIDE * SIDE)
            if start >= stop:
                continue
            k, v = keys + start // SIDE * key_pace, values + start // SIDE * value_pace
            at = limits + 4 * SIDE * block
            for i in range(call.group):
                part = parts + ((block - first) * call.group + i) * panel.part_bytes
                for n in range(start, stop, SIDE):
                    at_n, found = k + (n - start) // SIDE * key_pace, scores + (n - start) * ROW
                    if panel.full:
                        score_keys(panel, at_n, key_pace // SIDE, call.keys - 1 - n, part, found)
                    else:
                        product(panel, panel.steps, at_n, 2 * TILE, part, found)
                    if n < inner or n + SIDE > end:
                        hide(
                            panel, n, call.starts + at, call.stops + at, scores + (n - start) * ROW
                        )
                sums, state, count = part + panel.sums_at, part + panel.state_at, stop - start
                raise_maxima(panel, count, scores, state, sums, call.scale)
                powers(panel, count, scores, state, call.scale)
                if panel.full:
                    add_rows(square, panel.value_width, min(count, call.keys - start), v, 4,
                             value_pace // SIDE, scores, ROW, sums, ROW)  # fmt: skip
                else:
                    for c in range(panel.strips):
                        add_product(panel, count // SIDE, v + 2 * TILE * c, value_pace, scores,
                                    sums + SIDE * ROW * c)  # fmt: skip
    finish(panel, call, batch, head, first, last, parts)


@phase
@no_type_check
def keys_of(panel, call, pair, batch):
    """The addresses of the keys and values of a key head, and the bytes of `SIDE` of each: packed,
    or where float32 ones lie."""
    if panel.full:
        head = (call.first + pair) % call.kv_heads
        keys = call.k + 4 * (batch * call.k_batch + head * call.k_head)
        values = call.v + 4 * (batch * call.v_batch + head * call.v_head)
        return keys, 4 * SIDE * call.k_row, values, 4 * SIDE * call.v_row
    groups = (call.keys + SIDE - 1) // SIDE
    keys = call.packed_keys + pair * groups * panel.key_bytes
    values = call.packed_values + pair * groups * panel.value_bytes
    return keys, panel.key_bytes, values, panel.value_bytes


@phase
@no_type_check
def begin(panel, call, batch, head, first, last, parts):
    """Pack the queries of a block and set the sums to zero; a sink is a score without a value."""
    for block in range(first, last):
        for i in range(call.group):
            part = parts + ((block - first) * call.group + i) * panel.part_bytes
            q = call.q + panel.read * (batch * call.q_batch + (head + i) * call.q_head)
            pack_queries(panel, block * SIDE, call.queries, q, panel.read * call.q_row, part)
            maximum, total = LOWEST, np.float32(0)
            if call.sinks != 0:
                maximum, total = floats(call.sinks)[head + i], np.float32(1)
            begin_sums(panel, part + panel.sums_at, part + panel.state_at, maximum, total)


@phase
@no_type_check
def visible(panel, call, limits, block):
    """The ranges of keys that some, and that all, queries of a block may attend to."""
    starts = ints(panel, call.starts + limits + 4 * SIDE * block)
    stops = ints(panel, call.stops + limits + 4 * SIDE * block)
    low, high, inner, end = call.keys, 0, 0, call.keys
    for i in range(min(SIDE, call.queries - block * SIDE)):
        start, stop = np.int64(starts[i]), np.int64(stops[i])
        inner, end = max(inner, start), min(end, stop)
        if start < stop:
            low, high = min(low, start), max(high, stop)
    return low, high, inner, end


@phase
@no_type_check
def finish(panel, call, batch, head, first, last, parts):
    """Store the output, and the maxima and totals if the log-sum-exp is wanted."""
    padded = (call.queries + SIDE - 1) // SIDE * SIDE
    for block in range(first, last):
        for i in range(call.group):
            part = parts + ((block - first) * call.group + i) * panel.part_bytes
            out = batch * call.out_batch + (head + i) * call.out_head + block * SIDE * call.out_row
            store_rows(panel, call.queries - block * SIDE, part + panel.sums_at,
                       part + panel.state_at, call.out + panel.item * out,
                       panel.item * call.out_row)  # fmt: skip
            if call.state != 0:
                row = (batch * call.kv_heads * call.group + head + i) * 2 * padded + block * SIDE
                kept, found = floats(call.state + 4 * row), floats(part + panel.state_at)
                for n in range(SIDE):
                    kept[n], kept[padded + n] = found[n], found[SIDE + n]
