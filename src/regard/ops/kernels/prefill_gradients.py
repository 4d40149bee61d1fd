"""Gradients of attention of many queries in float32 on a CPU, compiled by LLVM through numba.

A task is a query head. For each block of keys, and of 32 queries that may attend to them, it
computes the transposed scores again, their weights from the log-sum-exps of the forward pass, the
slopes of both, and parts of the gradients of values, keys and queries: five products
(FlashAttention-2, arXiv:2307.08691, algorithm 2).
"""

import functools
from typing import Any, no_type_check

import numba
from numba import carray, types

from regard.compiling import compiled_from
from regard.ops.kernels import columns, intrinsics, panels, prefilling, products, tiles, vectors
from regard.ops.kernels.columns import hide, pack_queries, slopes
from regard.ops.kernels.intrinsics import next_number
from regard.ops.kernels.panels import BLOCK, GRADIENTS, ROW, SIDE, Panel
from regard.ops.kernels.prefilling import phase, visible
from regard.ops.kernels.products import add_rows, score_keys

SIGNATURE = types.void(types.CPointer(numba.from_dtype(GRADIENTS)))
MODULES = columns, intrinsics, panels, prefilling, products, tiles, vectors  # in the kernel


@functools.cache
@no_type_check
def gradient_code(panel: Panel) -> Any:
    """The machine code that computes gradients: a C function of a `Gradients` record."""
    values = panel._replace(width=panel.value_width)  # products with rows as wide as values

    def gradients(data):
        call = carray(data, 1)[0]
        scratch = call.scratch + next_number(call.counters + 8) * call.scratch_bytes
        while True:
            task = next_number(call.counters)
            if task >= call.tasks:
                break
            for j in range(0, call.keys, BLOCK):
                differentiate(panel, values, call, task, j, scratch)

    return compiled_from(gradients, SIGNATURE, *MODULES)


@phase
@no_type_check
def differentiate(panel, values, call, task, j, scratch):
    """Add to the gradients the parts of a query head and the block of keys from `j` on."""
    batch, head = task // call.heads, task % call.heads
    queries, slope, scores, found = parts_of(panel, values, scratch)
    q = call.q + 4 * (batch * call.q_batch + head * call.q_head)
    k = call.k + 4 * (batch * call.k_batch + head // call.group * call.k_head)
    v = call.v + 4 * (batch * call.v_batch + head // call.group * call.v_head)
    up = call.slope + 4 * (batch * call.slope_batch + head * call.slope_head)
    limits = 4 * (batch * call.limits_batch)
    for block in range(padded(call.queries) // SIDE):
        start, stop, inner, end = visible(panel, call, limits, block)
        start = max(j, start // SIDE * SIDE)
        stop = min(j + BLOCK, padded(stop))
        if start >= stop:
            continue
        first, at = SIDE * block, limits + 4 * SIDE * block
        row, place = task * padded(call.queries) + first, task * padded(call.keys) + start
        count, some = stop - start, min(SIDE, call.queries - first)
        pack_queries(panel, first, call.queries, q, 4 * call.q_row, queries)
        pack_queries(values, first, call.queries, up, 4 * call.slope_row, slope)
        for n in range(start, stop, SIDE):
            here, last = (n - start) * ROW, call.keys - 1 - n
            score_keys(panel, k + 4 * n * call.k_row, 4 * call.k_row, last, queries, scores + here)
            score_keys(values, v + 4 * n * call.v_row, 4 * call.v_row, last, slope, found + here)
            if n < inner or n + SIDE > end:
                hide(panel, n, call.starts + at, call.stops + at, scores + here)
        slopes(panel, count, scores, found, call.lses + 4 * row, call.totals + 4 * row, call.scale,
               call.power)  # fmt: skip
        width, v_width = 4 * panel.width, 4 * values.width  # bytes of a row of a gradient
        add_rows(values, count, some, scores, ROW, 4, up + 4 * first * call.slope_row,
                 4 * call.slope_row, call.of_v + v_width * place, v_width)  # fmt: skip
        add_rows(panel, count, some, found, ROW, 4, q + 4 * first * call.q_row, 4 * call.q_row,
                 call.of_k + width * place, width)  # fmt: skip
        add_rows(panel, SIDE, min(count, call.keys - start), found, 4, ROW,
                 k + 4 * start * call.k_row, 4 * call.k_row, call.of_q + width * row,
                 width)  # fmt: skip


@phase
@no_type_check
def padded(count):
    """A multiple of the side of a block."""
    return (count + SIDE - 1) // SIDE * SIDE


@phase
@no_type_check
def parts_of(panel, values, scratch):
    """Addresses in a thread's scratch: queries and slopes, packed, scores, slopes of weights."""
    slope = scratch + ROW * panel.width
    scores = slope + ROW * values.width
    return scratch, slope, scores, scores + ROW * BLOCK
