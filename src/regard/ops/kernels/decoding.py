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

from regard.compiling import compiled_from, part
from regard.ops.kernels import (
    code_words,
    gathering,
    integers,
    intrinsics,
    rebuilding,
    tiles,
    vectors,
)
from regard.ops.kernels.gathering import (
    add_weighted,
    add_weighted_and_prefetch,
    add_weighted_codes,
)
from regard.ops.kernels.integers import (
    add_residuals,
    add_weighted_integers,
    integer_scores,
    loses_much,
    round_queries,
    round_weights,
    spread_key_scales,
    spread_value_scales,
)
from regard.ops.kernels.intrinsics import (
    add_bias,
    add_share,
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
    numbers,
    prefetch_far,
    prefetch_scales,
    prefetch_value,
    scale_sums,
    store_row,
    visible_keys,
)
from regard.ops.kernels.rebuilding import rebuild_keys, turn_weights
from regard.ops.kernels.tiles import FAR, HIDDEN, LOG2E, LOWEST, RECORD, Tile

SOURCES = code_words, gathering, integers, intrinsics, rebuilding, tiles, vectors
SIGNATURE = types.void(types.CPointer(numba.from_dtype(RECORD)))


@functools.cache
@no_type_check
def kernel(tile: Tile) -> Any:
    """The machine code of a tile: a C function of the address of one `Decode` record."""

    def decode(data):
        call = carray(data, 1)[0]
        padded = (call.rows + tile.rows - 1) // tile.rows * tile.rows  # whole tiles of rows
        part_bytes, ranges = padded * tile.part_bytes, call.ranges
        thread = next_number(call.counters + 8)
        queries = call.scratch + thread * (padded * tile.scratch_bytes + tile.block_bytes)
        turned = -1  # the key head whose weights are transposed
        while True:
            task = next_number(call.counters)
            if task >= call.batch * call.kv_heads * ranges:
                break
            pair = task // ranges
            if tile.k.rebuilt and pair % call.kv_heads != turned:
                turned = pair % call.kv_heads
                at = queries + padded * tile.scratch_bytes + tile.block_bytes - tile.weights_bytes
                turn_weights(tile, call.weights + turned * tile.stored_bytes, at)
            first = (task - pair * ranges) * call.range_keys
            attend(tile, call, padded, pair, first, queries, call.parts + task * part_bytes)
            finished = next_number(call.counters + 16 + 8 * pair)
            if finished == ranges - 1:
                merge(tile, call, padded, pair, part_bytes)

    return compiled_from(decode, SIGNATURE, *SOURCES)


@part
@no_type_check
def attend(tile, call, padded, pair, first, queries, part):
    """A range of keys, from `first` on: a block at a time."""
    batch, head = pair // call.kv_heads, pair % call.kv_heads
    scores = queries + padded * tile.query_bytes
    integers = scores + 4 * padded * tile.block  # those of the rows
    floating = integers + padded // tile.rows * tile.integer_bytes
    keys = call.k + tile.k.item * (batch * call.k_batch + head * call.k_head)
    values = call.v + tile.v.item * (batch * call.v_batch + head * call.v_head)
    k_scales = call.k_scales + 2 * (batch * call.k_scales_batch + head * call.k_scales_head)
    v_scales = call.v_scales + 2 * (batch * call.v_scales_batch + head * call.v_scales_head)
    biases = call.bias + 4 * (batch * call.bias_batch + head * call.bias_head)
    k_stride, v_stride = tile.k.item * call.k_row, tile.v.item * call.v_row
    k_pace, v_pace = 2 * call.k_scales_row, 2 * call.v_scales_row
    begin(tile, call, batch, head, padded, queries, part)
    if not tile.k.by_page:
        round_all(tile, padded, queries, 0, integers)
    j, stop = first, min(call.keys, first + call.range_keys)
    while j < stop:
        at, count = block_at(tile, call, batch, j, stop)
        bias, j = biases + 4 * j, j + count
        count = visible(tile, call, count, bias)
        if count == 0:
            continue
        ahead, far = next_blocks(tile, call, batch, at, j)
        prefetch_scales(tile, k_scales + k_row(tile, call, ahead) * k_pace, k_pace,
                        v_scales + ahead * v_pace, v_pace)  # fmt: skip
        k_far, v_far = 0, 0
        if is_far(tile, ahead, far):
            k_far = keys + far * k_stride
            v_far = 0 if tile.joined else values + far * v_stride
            prefetch_scales(tile, k_scales + k_row(tile, call, far) * k_pace, k_pace,
                            v_scales + far * v_pace, v_pace)  # fmt: skip
        k, of_k = keys + at * k_stride, k_scales + k_row(tile, call, at) * k_pace
        v, of_v = values + at * v_stride, v_scales + at * v_pace
        apart = 0 if tile.k.by_page else k_pace  # from the scales of a key to those of the next
        k, k_read = floating_keys(tile, count, k, k_stride, of_k, apart, floating)
        if tile.k.rebuilt:
            place = call.positions + 4 * (batch * call.positions_batch + at * call.positions_row)
            rebuild_keys(tile, count, k, k_read, floating + tile.block_bytes - tile.weights_bytes,
                         call.cos, call.sin, place, 4 * call.positions_row, floating)  # fmt: skip
            k, k_read = floating, 4 * tile.width
        score(tile, padded, count, queries, k, k_read, of_k, apart, v, v_stride, integers, floating,
              scores, k_far, k_stride)  # fmt: skip
        softmax(tile, call, padded, count, bias, scores, part)
        v, v_read = floating_values(tile, count, v, v_stride, of_v, v_pace, floating)
        gather(tile, padded, count, scores, v, v_read, of_v, v_pace, integers, floating, part,
               keys + ahead * k_stride, k_stride, k_far, v_far)  # fmt: skip


@part
@no_type_check
def begin(tile, call, batch, head, padded, queries, part):
    """Write the scaled queries to the scratch memory, and begin a partial result without keys."""
    sums, maxima = floats(part), floats(part + padded * tile.sum_bytes)
    for i in range(padded * (tile.value_width + 2 * tile.lanes)):
        sums[i] = np.float32(0)
    for i in range(padded):
        maxima[i] = LOWEST
        row = batch * call.q_batch + head * call.q_head + min(i, call.rows - 1) * call.q_row
        load_query(tile, call.q + tile.item * row, queries + i * tile.query_bytes, call.scale)


@part
@no_type_check
def block_at(tile, call, batch, j, stop):
    """The position, in tokens, of the block that begins with key `j`, and its number of keys."""
    at, count = j, min(tile.block, stop - j)
    if tile.paged:
        place = call.skipped + j
        inside = place % call.page
        page = numbers(call.table + 8 * batch * call.table_batch)[place // call.page]
        at, count = page * call.page + inside, min(count, call.page - inside)
    return at, count


@part
@no_type_check
def next_blocks(tile, call, batch, at, j):
    """The position of key `j`, where the block after that at `at` begins, and of the key some
    blocks later, at most the last one."""
    following, last = at + tile.block, call.keys - 1
    if tile.paged and j < call.keys:
        following, _ = block_at(tile, call, batch, j, call.keys)
    far, _ = block_at(tile, call, batch, min(last, j + FAR * tile.block), call.keys)
    return following, far


@part
@no_type_check
def k_row(tile, call, at):
    """The row of the scales of the key at `at`: its own, or that of its page."""
    return at // call.page if tile.k.by_page else at


@part
@no_type_check
def is_far(tile, ahead, far):
    """Whether to request the block at `far`, `FAR` blocks after that at `ahead`, long before it is
    read: always of float32, else if pages between the two are not in order in memory: at a page
    that follows no other, memory is found anew and the processor foresees no read."""
    return tile.requests_all or (tile.paged and far - ahead != FAR * tile.block)


@part
@no_type_check
def visible(tile, call, count, bias):
    """The block's keys up to the last that the bias shows a row: those after it are not read."""
    shown = 0
    for i in range(call.rows if call.bias_row else 1):
        last = call.rows - 1 - i if call.bias_row else 0  # the last query may see most
        shown = max(shown, visible_keys(tile, count, bias + 4 * last * call.bias_row))
        if shown == count:
            break
    return shown


@part
@no_type_check
def floating_keys(tile, count, k, stride, scales, pace, floating):
    """The address of a block's keys, and the bytes from one key to the next. Codes are dequantised
    to scratch memory first, unless the products dequantise them."""
    if tile.k.quantized and not tile.k_direct and not tile.k_integers:
        dequantize_keys(tile, count, k, stride, scales, pace, floating)
        k, stride = floating, 4 * tile.width
    return k, stride


@part
@no_type_check
def floating_values(tile, count, v, stride, scales, pace, floating):
    """The address of a block's values, and the bytes from one value to the next."""
    if tile.v_integers:
        return v, stride
    if tile.v_quantized and not tile.v_direct:
        dequantize_values(tile, count, v, stride, scales, pace, floating)
        v, stride = floating, 4 * tile.value_width
    elif tile.k.quantized and tile.joined:
        v, stride = floating, 4 * tile.width
    return v, stride


@part
@no_type_check
def round_all(tile, padded, queries, page_scales, integers):
    """Round all queries to integers, times the scales of a page's channels."""
    for r in range(0, padded if tile.k_integers else 0, tile.rows):
        round_queries(tile, queries + r * tile.query_bytes, page_scales,
                      integers + r // tile.rows * tile.integer_bytes)  # fmt: skip


@part
@no_type_check
def score(tile, padded, count, queries, k, k_stride, of_k, k_pace, v, v_stride, integers, floating,
          scores, k_far, k_apart):  # fmt: skip
    """Scores of all rows and the block's keys; meanwhile the block's values are prefetched, all of
    them before products of integers, which wait for less; or the keys at `k_far`, if it is not 0:
    an AMD EPYC of Zen 4 reads memory faster where its rows are near those that are read now."""
    if tile.k.by_page:
        round_all(tile, padded, queries, of_k, integers)
    spread_key_scales(tile, count, of_k, k_pace, floating)
    for r in range(0, padded, tile.rows):
        for i in range(0, count, tile.keys):
            if r == 0:
                for u in range(i, min(count, i + tile.keys)):
                    if k_far and not tile.v_integers:
                        prefetch_far(tile, k_far, u, k_apart)
                    elif not tile.joined:
                        prefetch_value(tile, v, u, v_stride)
            dot_products(tile, queries + r * tile.query_bytes, k, k_stride, of_k, k_pace, i,
                         count - 1, scores + 4 * r * tile.block)  # fmt: skip
    for r in range(0, padded if tile.k_integers else 0, tile.rows):
        of_rows, found = integers + r // tile.rows * tile.integer_bytes, scores + 4 * r * tile.block
        loses = loses_much(tile, of_rows, floating)
        for i in range(0, count, tile.together):
            integer_scores(tile, of_rows, floating, k, k_stride, i, count - 1, found)
            if loses:
                add_residuals(tile, of_rows, floating, k, k_stride, i, count - 1, found)


@part
@no_type_check
def softmax(tile, call, padded, count, bias, scores, part):
    """Replace scores by powers of 2 below the running maximum; rescale earlier sums."""
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


@part
@no_type_check
def gather(tile, padded, count, scores, v, v_stride, of_v, v_pace, integers, floating, part, k_next,
           k_stride, k_far, v_far):  # fmt: skip
    """Adds the weighted values to the sums; meanwhile the next block's keys are prefetched, or the
    values at `v_far`, if it is not 0; with products of integers both, and the keys at `k_far`."""
    done = 0
    if tile.v_integers:
        spread_value_scales(tile, count, of_v, v_pace, floating)
        for r in range(0, padded, tile.rows):
            of_rows = integers + r // tile.rows * tile.integer_bytes
            round_weights(tile, scores + 4 * r * tile.block, of_rows, floating)
            add_weighted_integers(tile, count, v, v_stride, of_rows, part + r * tile.sum_bytes,
                                  k_next if r == 0 else v, k_stride, k_far or k_next,
                                  v_far or v)  # fmt: skip
        padded = 0
    elif tile.v_direct:
        add_weighted_codes(tile, count, scores, v, v_stride, of_v, v_pace, part, k_next, k_stride,
                           v_far)  # fmt: skip
        padded = 0
    for r in range(0, padded, tile.rows):
        for c in range(0, tile.value_width, tile.strip):
            weights, values = scores + 4 * r * tile.block, v + tile.v_read * c
            sums = part + r * tile.sum_bytes + 4 * c
            if done < (tile.requests if v_far else tile.prefetches):
                ahead = k_next + done * tile.prefetch_bytes
                far = v_far + done * tile.request_bytes if v_far else 0
                add_weighted_and_prefetch(tile, count, weights, values, v_stride, sums, ahead,
                                          k_stride, far)  # fmt: skip
            else:
                add_weighted(tile, count, weights, values, v_stride, sums)
            done += 1


@part
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
