"""Attention of few queries over many keys on a CPU, compiled by LLVM through numba.

A task is one range of the keys of one key head. Threads take tasks until none is left. For each
block of keys a task runs score, softmax and gather; the last task of a head to finish runs merge.
That is FlashAttention's online softmax (arXiv:2205.14135) with Flash-Decoding's ranges of keys.
`specification.py` is the same in NumPy; the package's docstring draws the memory.
"""

import functools
import math
from typing import Any, no_type_check

import numba
import numpy as np
from numba import carray, types

from regard.compiling import compiled_from
from regard.ops.kernels import intrinsics, tiles, vectors
from regard.ops.kernels.intrinsics import (
    add_bias,
    add_share,
    add_weighted,
    add_weighted_and_prefetch,
    any_visible,
    dequantize_keys,
    dequantize_values,
    dot_products,
    exp2,
    exponentials,
    floats,
    hide_from,
    load_query,
    maximum,
    next_number,
    prefetch_value,
    scale_sums,
    store_row,
)
from regard.ops.kernels.tiles import HIDDEN, LOG2E, LOWEST, RECORD, Tile

SIGNATURE = types.void(types.CPointer(numba.from_dtype(RECORD)))
phase = numba.njit(inline="always")  # compiled as a part of the kernel that calls it


@functools.cache
@no_type_check
def kernel(tile: Tile) -> Any:
    """The machine code of a tile: a C function of the address of one `Arguments` record."""

    def decode(data):
        call = carray(data, 1)[0]
        padded = (call.rows + tile.rows - 1) // tile.rows * tile.rows  # whole tiles of rows
        part_bytes, ranges = padded * tile.part_bytes, call.ranges
        k_stride, v_stride = tile.k_item * call.k_row, tile.v_item * call.v_row
        thread = next_number(call.counters + 8)
        queries = call.scratch + thread * (padded * tile.scratch_bytes + tile.block_bytes)
        scores = queries + padded * tile.query_bytes
        floating = scores + 4 * padded * tile.block
        while True:
            task = next_number(call.counters)
            if task >= call.batch * call.kv_heads * ranges:
                break
            pair = task // ranges
            batch, head = pair // call.kv_heads, pair % call.kv_heads
            first = (task - pair * ranges) * call.range_keys
            stop = min(call.keys, first + call.range_keys)
            keys = call.k + tile.k_item * (batch * call.k_batch + head * call.k_head)
            values = call.v + tile.v_item * (batch * call.v_batch + head * call.v_head)
            biases = call.bias + 4 * (batch * call.bias_batch + head * call.bias_head)
            part = call.parts + task * part_bytes
            begin(tile, call, batch, head, padded, queries, part)
            for j in range(first, stop, tile.block):
                count, bias = min(tile.block, stop - j), biases + 4 * j
                if all_hidden(tile, call, count, bias):
                    continue
                k, v = keys + j * k_stride, values + j * v_stride
                k_next = k + tile.block * k_stride
                k, k_read = floating_keys(tile, call, batch, head, j, count, k, floating)
                score(tile, padded, count, queries, k, k_read, v, v_stride, scores)
                softmax(tile, call, padded, count, bias, scores, part)
                v, v_read = floating_values(tile, call, batch, head, j, count, v, floating)
                gather(tile, padded, count, scores, v, v_read, part, k_next, k_stride)
            finished = next_number(call.counters + 16 + 8 * pair)
            if finished == ranges - 1:
                merge(tile, call, padded, pair, part_bytes)

    return compiled_from(decode, SIGNATURE, intrinsics, tiles, vectors)


@phase
@no_type_check
def begin(tile, call, batch, head, padded, queries, part):
    """The scaled queries in scratch, and a part that holds no key yet."""
    sums, maxima = floats(part), floats(part + padded * tile.sum_bytes)
    for i in range(padded * (tile.value_width + 2 * tile.lanes)):
        sums[i] = np.float32(0)
    for i in range(padded):
        maxima[i] = LOWEST
        row = batch * call.q_batch + head * call.q_head + min(i, call.rows - 1) * call.q_row
        load_query(tile, call.q + tile.item * row, queries + i * tile.query_bytes, call.scale)


@phase
@no_type_check
def all_hidden(tile, call, count, bias):
    """Whether the bias hides the block's keys from all rows: they are not read then."""
    for i in range(call.rows if call.bias_row else 1):
        if any_visible(tile, count, bias + 4 * i * call.bias_row):
            return False
    return True


@phase
@no_type_check
def floating_keys(tile, call, batch, head, j, count, k, floating):
    """Where a block's keys lie in floating point, and the bytes from one to the next: codes are
    dequantised first."""
    at, stride = k, tile.k_item * call.k_row
    if tile.k_quantized:
        first = batch * call.k_scales_batch + head * call.k_scales_head + j * call.k_scales_row
        scales, pace = call.k_scales + 2 * first, 2 * call.k_scales_row
        dequantize_keys(tile, count, k, stride, scales, pace, floating)
        at, stride = floating, 4 * tile.width
    return at, stride


@phase
@no_type_check
def floating_values(tile, call, batch, head, j, count, v, floating):
    """The same of its values, after its keys are read; values within keys are there already."""
    at, stride = v, tile.v_item * call.v_row
    if tile.v_quantized:
        first = batch * call.v_scales_batch + head * call.v_scales_head + j * call.v_scales_row
        scales, pace = call.v_scales + 2 * first, 2 * call.v_scales_row
        dequantize_values(tile, count, v, stride, scales, pace, floating)
        at, stride = floating, 4 * tile.value_width
    elif tile.k_quantized and tile.joined:
        at, stride = floating, 4 * tile.width
    return at, stride


@phase
@no_type_check
def score(tile, padded, count, queries, k, k_stride, v, v_stride, scores):
    """Scores of all rows and the block's keys; meanwhile the block's values are prefetched."""
    for r in range(0, padded, tile.rows):
        for i in range(0, count, tile.keys):
            if r == 0 and not tile.joined:
                for u in range(i, min(count, i + tile.keys)):
                    prefetch_value(tile, v + u * v_stride)
            dot_products(tile, queries + r * tile.query_bytes, k, k_stride, i, count - 1,
                         scores + 4 * r * tile.block)  # fmt: skip


@phase
@no_type_check
def softmax(tile, call, padded, count, bias, scores, part):
    """Scores become powers of 2 below the running maximum; what was summed so far is rescaled."""
    maxima = floats(part + padded * tile.sum_bytes)
    totals = floats(part + padded * (tile.sum_bytes + 4 * tile.lanes))
    for i in range(call.rows):
        row = scores + 4 * i * tile.block
        add_bias(tile, count, bias + 4 * i * call.bias_row, row)
        hide_from(tile, count, row)
        before, maxima[i] = maxima[i], maximum(tile, row, maxima[i])
        if maxima[i] != before:
            shrink = exp2(tile, before - maxima[i])
            totals[i] *= shrink
            scale_sums(tile, part + i * tile.sum_bytes, shrink)
        totals[i] += exponentials(tile, row, maxima[i])


@phase
@no_type_check
def gather(tile, padded, count, scores, v, v_stride, part, k_next, k_stride):
    """Adds the weighted values to the sums; meanwhile the next block's keys are prefetched."""
    done = 0
    for r in range(0, padded, tile.rows):
        for c in range(0, tile.value_width, tile.strip):
            weights, values = scores + 4 * r * tile.block, v + tile.v_read * c
            sums = part + r * tile.sum_bytes + 4 * c
            if done < tile.prefetches:
                ahead = k_next + done * tile.prefetch_bytes
                add_weighted_and_prefetch(tile, count, weights, values, v_stride, sums, ahead,
                                          k_stride)  # fmt: skip
            else:
                add_weighted(tile, count, weights, values, v_stride, sums)
            done += 1


@phase
@no_type_check
def merge(tile, call, padded, pair, part_bytes):
    """The output and log-sum-exp of a head from its parts, in the order of its keys."""
    first = call.parts + pair * call.ranges * part_bytes
    maxima_at, totals_at = padded * tile.sum_bytes, padded * (tile.sum_bytes + 4 * tile.lanes)
    for i in range(call.rows):
        top, total = LOWEST, np.float32(0)
        for p in range(call.ranges):
            top = max(top, floats(first + p * part_bytes + maxima_at)[i])
        for p in range(call.ranges):
            part = first + p * part_bytes
            total += floats(part + totals_at)[i] * exp2(tile, floats(part + maxima_at)[i] - top)
        merged = first + i * tile.sum_bytes
        for p in range(call.ranges):
            part = first + p * part_bytes
            share = exp2(tile, floats(part + maxima_at)[i] - top)
            share = share / total if total != 0 else np.float32(0)
            if p == 0:
                scale_sums(tile, merged, share)
            else:
                add_share(tile, part + i * tile.sum_bytes, share, merged)
        row = pair * call.rows + i
        lse = floats(call.lse + 4 * row)
        lse[0] = (top + np.float32(math.log2(total))) / LOG2E if total != 0 else HIDDEN
        store_row(tile, merged, call.out + row * tile.sum_bytes)
