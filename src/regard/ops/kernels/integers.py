"""Products of codes as integers, where queries and weights may be rounded to 16 bits.

That is so where the queries are bfloat16, of 8 bits: those of numbers down to 1/256 of the largest
of a row are all kept. Scores of a block that might lose more than `ERROR` all the same are computed
with 16 bits more. One instruction multiplies two pairs of integers and adds the products, without
rounding: half as many instructions as in float32, and no code is dequantised. With a scale s and a
zero z for each token and group of channels, and a row q = r Q of integers Q,

    score   q . (z + s c)       =  sum over groups of  s r (Q . c) + z (sum of q)
    output  sum of p (z + s c)  =  r (sum of P c) + sum of p z,  with p s = r P in each group

A key whose scales belong to the channels of a page is multiplied by q s, rounded once for a page.

Rows are requested for the second cache: the first is read so quickly that it has no requests left.
What belongs to rows lies behind their scores (`OfRows`), what belongs to a block of keys where
other kernels dequantise it (`OfBlock`).
"""

import functools
from typing import NamedTuple, no_type_check

from llvmlite import ir
from numba import types

from regard.ops.kernels.code_words import (
    LARGEST,
    every,
    halves,
    in_order,
    key_words,
    lane,
    paired,
    rounded,
    value_words,
)
from regard.ops.kernels.intrinsics import emits
from regard.ops.kernels.tiles import Tile
from regard.ops.kernels.vectors import FLOAT, INT16, INT32, INT64

ERROR = 2e-3  # of a score, in powers of 2: an output is wrong by about as much of the largest
# value, half of what it loses when it is rounded to bfloat16
CHAINS = 8  # sums that do not wait for each other: as many as hide an instruction's latency
FINER = 2 * LARGEST  # steps of a residual in one of the queries' integers


class OfRows(NamedTuple):
    """Bytes from the start of the memory of a tile of rows to each of its arrays."""

    queries: int  # [rows, D] of int16, in the order of `paired`
    residuals: int  # [rows, D] of int16 as well: queries less these integers
    query_scales: int  # [rows]
    query_sums: int  # [rows, groups]: sums of q, or of q z of a page
    weights: int  # [groups of values, rows, block] of int16
    weight_scales: int  # [groups of values, rows]
    offsets: int  # [groups of values, rows]: sums of p z
    size: int  # of all


class OfBlock(NamedTuple):
    """Bytes from the start of the memory of a block of keys to each of its arrays."""

    key_scales: int  # [groups, block]
    key_zeros: int
    value_scales: int  # [groups of values, block]; where the tile is joined, those of the keys
    value_zeros: int
    size: int  # of all


def of_rows(tile: Tile) -> OfRows:
    """The arrays of a tile of rows."""
    (of_k, of_v), rows = tile.groups, tile.rows
    queries = 2 * rows * tile.width * tile.k_integers
    sizes = [queries, queries, 4 * rows, 4 * rows * of_k]
    sizes += [2 * of_v * rows * tile.block, 4 * of_v * rows, 4 * of_v * rows]
    places = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    assert places[-1] <= tile.integer_bytes
    return OfRows._make(places)


def of_block(tile: Tile) -> OfBlock:
    """The arrays of a block of keys."""
    of_k, of_v = (4 * groups * tile.block for groups in tile.groups)
    starts = (0, of_k) if tile.joined else (2 * of_k, 2 * of_k + of_v)
    size = 2 * of_k + (not tile.joined) * 2 * of_v
    assert size <= tile.block_bytes, "a block of codes takes less memory than one of float32"
    return OfBlock(0, of_k, *starts, size)


# ---- score -------------------------------------------------------------------------------------


@emits(types.void)
@no_type_check
def round_queries(e, tile, queries, page_scales, memory):
    """Round the rows of float32 `queries`, times the channels' scales where those are a page's."""
    if not tile.k_integers:
        return
    at, groups = of_rows(tile), tile.groups[0]
    pace = tile.width // groups
    with e.loop(INT64(tile.rows)) as m:
        row = e.advance(queries, m, tile.query_bytes)
        of_groups, place = e.advance(memory, m, 4 * groups), e.advance(memory, m, 4)
        xs = {}
        for g in range(groups):
            total = e.constant(0.0)
            for c in range(g * pace, (g + 1) * pace, e.lanes):
                xs[c] = e.read(row, 4 * c)
                if tile.k.by_page:
                    scale, zero = halves(e, e.read_words(page_scales, 4 * c))
                    total = e.fma(xs[c], zero, total)
                    xs[c] = e.builder.fmul(xs[c], scale)
                else:
                    total = e.builder.fadd(total, xs[c])
            total = lane(e, e.fold(total, e.builder.fadd))
            _store(e, total, of_groups, at.query_sums + 4 * g)
        scale, integers, left = rounded(e, list(xs.values()))
        _store(e, scale, place, at.query_scales)
        left = [e.rounded(e.builder.fmul(x, e.constant(FINER))) for x in left]
        target = e.advance(memory, m, 2 * tile.width)
        for start, found in (at.queries, integers), (at.residuals, left):
            for c, words in paired(e, tile, dict(zip(xs, found, strict=True))):
                e.write(words, target, start + 2 * c)


@emits(types.void)
@no_type_check
def spread_key_scales(e, tile, count, scales, pace, block):
    """Scales and zeros of a block's keys side by side, for each group; 0 after `count`."""
    if tile.k_integers and not tile.k.by_page:
        places = of_block(tile)[:2]
        _spread(e, tile, count, scales, pace, block, places, tile.groups[0])


@emits(types.void)
@no_type_check
def spread_value_scales(e, tile, count, scales, pace, block):
    """The same of its values, unless they are of the keys."""
    if tile.v_integers and not tile.joined:
        places = of_block(tile)[2:4]
        _spread(e, tile, count, scales, pace, block, places, tile.groups[1])


@no_type_check
def _spread(e, tile, count, scales, pace, memory, places, groups):
    b, block = e.builder, tile.block
    together = b.icmp_signed("==", pace, INT64(4 * groups))
    whole = b.and_(together, b.icmp_signed("==", count, INT64(block)))
    with b.if_else(whole) as (vectors, one_by_one):
        with vectors:
            for first in range(0, block, e.lanes):
                found = [
                    e.read_words(scales, 4 * (groups * first + e.lanes * i)) for i in range(groups)
                ]
                for g in range(groups):
                    for place, x in zip(places, halves(e, every(e, found, g)), strict=True):
                        e.write(x, memory, place + 4 * (block * g + first))
        with one_by_one:
            with e.loop(count) as j:
                row = b.add(scales, b.mul(j, pace))
                for g in range(groups):
                    pair = halves(e, b.load(e.pointer(INT32, row, 4 * g), align=2))
                    for place, x in zip(places, pair, strict=True):
                        start = e.pointer(FLOAT, memory, place + 4 * block * g)
                        b.store(x, b.gep(start, [j]))
            with e.loop(b.sub(INT64(block), count)) as j:
                for place in (place + 4 * block * g for place in places for g in range(groups)):
                    b.store(FLOAT(0.0), b.gep(e.pointer(FLOAT, memory, place), [b.add(count, j)]))


@emits(types.int64)
@no_type_check
def loses_much(e, tile, memory, block):
    """Whether scores of a block may lose more than `ERROR`, as the root of the mean square of what
    is rounded, over all codes; 1 or 0."""
    if not tile.k_integers:
        return INT64(0)
    b, at, top = e.builder, of_rows(tile), FLOAT(0.0)
    for m in range(tile.rows):
        own = b.load(e.pointer(FLOAT, memory, at.query_scales + 4 * m))
        top = b.select(b.fcmp_unordered("<", own, top), top, own)
    squares = FLOAT(1.0)  # of scales, on average over channels
    if not tile.k.by_page:
        most, groups = e.constant(0.0), tile.groups[0]
        for i in range(0, tile.block, e.lanes):
            total = e.constant(0.0)
            for g in range(groups):
                x = e.read(block, of_block(tile).key_scales + 4 * (tile.block * g + i))
                total = e.fma(x, x, total)
            most = e.maximum(total, most)
        squares = b.fmul(lane(e, e.fold(most, e.maximum)), FLOAT(1 / groups))
    # an integer is wrong by up to 1/2, evenly, and codes are between 0 and the last one, evenly
    of_codes = tile.width * (2.0**tile.k.bits - 1) ** 2 / 36
    lost = b.fmul(b.fmul(b.fmul(top, top), squares), FLOAT(of_codes))
    return b.zext(b.fcmp_unordered(">", lost, FLOAT(ERROR**2)), INT64)


@emits(types.void)
@no_type_check
def integer_scores(e, tile, memory, block, keys, stride, first, last, scores):
    """The scores of a tile's rows and `together` keys from `first` on; keys after `last` are read
    as `last`."""
    if tile.k_integers:
        starts = [e.constant(0.0)] * (tile.rows * tile.together // e.lanes)
        _add_products(e, tile, memory, block, keys, stride, first, last, scores, starts, True)


@emits(types.void)
@no_type_check
def add_residuals(e, tile, memory, block, keys, stride, first, last, scores):
    """Add the products of what remains of the queries to such scores."""
    if tile.k_integers:
        here = e.advance(scores, first, 4)
        vectors = range(0, tile.together, e.lanes)
        starts = [e.read(here, 4 * (tile.block * m + i)) for m in range(tile.rows) for i in vectors]
        _add_products(e, tile, memory, block, keys, stride, first, last, scores, starts, False)


@no_type_check
def _add_products(e, tile, memory, block, keys, stride, first, last, scores, starts, whole):
    """The scores of row m are starts[m] and the products of its integers and sums, if they are the
    `whole` queries, else of its residuals, with some vectors of keys. A lane is a key."""
    b, at = e.builder, of_rows(tile)
    wanted = [b.add(first, INT64(i)) for i in range(tile.together)]
    wanted = [b.select(b.icmp_signed("<", i, last), i, last) for i in wanted]
    places = [b.add(keys, b.mul(i, stride)) for i in wanted]
    groups, vectors = tile.groups[0], range(tile.together // e.lanes)
    pace, integers = tile.width // groups, at.queries if whole else at.residuals
    totals = [e.variable(start) for start in starts]
    each = [(m, i) for m in range(tile.rows) for i in vectors]  # of totals: a row, a vector of keys
    chains = 1 if len(each) >= CHAINS else 2
    with e.loop(INT64(groups)) as g:
        some = [e.advance(place, g, pace * tile.k.bits // 8) for place in places]
        some = [some[e.lanes * i : e.lanes * (i + 1)] for i in vectors]
        of_queries = e.advance(memory, g, 2 * pace)
        sums = [[e.word(0)] * chains for _ in each]
        at_once = e.lanes // len(vectors)
        words = zip(*(key_words(e, tile, rows, pace, at_once) for rows in some), strict=True)
        for n, found in enumerate(words):
            for (m, i), row in zip(each, sums, strict=True):
                offset = integers + 2 * (tile.width * m + found[i][0])
                two = b.load(e.pointer(INT32, of_queries, offset))
                row[n % chains] = e.dot_words(found[i][1], e.broadcast(two), row[n % chains])
        for (m, i), row, total in zip(each, sums, totals, strict=True):
            own = e.broadcast(b.load(e.pointer(FLOAT, memory, at.query_scales + 4 * m)))
            x = b.fmul(b.sitofp(functools.reduce(b.add, row), e.floats), own)
            x = x if whole else b.fmul(x, e.constant(1 / FINER))
            scale, zero = e.constant(1.0), e.constant(1.0)
            if not tile.k.by_page:
                here = e.advance(e.advance(block, g, 4 * tile.block), first, 4)
                of_keys = (place + 4 * e.lanes * i for place in of_block(tile)[:2])
                scale, zero = (e.read(here, place) for place in of_keys)
            e.accumulate(total, x, scale)
            if whole:
                place = at.query_sums + 4 * groups * m
                of_zero = b.load(e.pointer(FLOAT, e.advance(memory, g, 4), place))
                e.accumulate(total, e.broadcast(of_zero), zero)
    for (m, i), total in zip(each, totals, strict=True):
        place = 4 * (tile.block * m + e.lanes * i)
        e.write(b.load(total), e.advance(scores, first, 4), place)


# ---- gather ------------------------------------------------------------------------------------


@emits(types.void)
@no_type_check
def round_weights(e, tile, weights, memory, block):
    """Round the weights of a tile's rows times the scales of values, for each group of channels."""
    if not tile.v_integers:
        return
    b, at, of_keys = e.builder, of_rows(tile), of_block(tile)
    with e.loop(INT64(tile.groups[1])) as g, e.loop(INT64(tile.rows)) as m:
        row, scales = e.advance(weights, m, 4 * tile.block), e.advance(block, g, 4 * tile.block)
        n = b.add(b.mul(g, INT64(tile.rows)), m)
        xs, total = [], e.constant(0.0)
        for i in range(0, tile.block, e.lanes):
            p = e.read(row, 4 * i)
            xs.append(b.fmul(p, e.read(scales, of_keys.value_scales + 4 * i)))
            total = e.fma(p, e.read(scales, of_keys.value_zeros + 4 * i), total)
        scale, integers, _ = rounded(e, xs)
        for i, x in enumerate(integers):
            words = b.trunc(x, ir.VectorType(INT16, e.lanes))
            e.write(words, e.advance(memory, n, 2 * tile.block), at.weights + 2 * e.lanes * i)
        _store(e, scale, e.advance(memory, n, 4), at.weight_scales)
        _store(e, lane(e, e.fold(total, b.fadd)), e.advance(memory, n, 4), at.offsets)


@emits(types.void)
@no_type_check
def add_weighted_integers(e, tile, count, codes, stride, memory, sums, ahead, apart, k_far, v_far):
    """sums[m, :] += the rounded weights of row m times the codes of a block, scaled, and offsets.
    Meanwhile requests rows at `ahead`, `apart` bytes apart: the keys of the next block; of pages,
    also keys at `k_far` and values at `v_far`."""
    b = e.builder

    def prefetch(j):
        """Request the keys and values of token j."""
        of_keys, of_k = b.mul(j, apart), tile.k.bytes(tile.width)
        e.prefetch(of_k, b.add(ahead, of_keys), 2)
        if tile.paged:
            e.prefetch(of_k, b.add(k_far, of_keys), 2)
            e.prefetch(tile.v.bytes(tile.value_width), b.add(v_far, b.mul(j, stride)), 2)

    for first in range(0, tile.value_width, tile.strip) if tile.v_integers else ():
        _add_strip(e, tile, count, codes, stride, memory, sums, first, prefetch)


@no_type_check
def _add_strip(e, tile, count, codes, stride, memory, sums, first, prefetch):
    b, at = e.builder, of_rows(tile)
    of_row = tile.strip // e.lanes
    cells = [[e.variable(e.word(0)) for _ in range(of_row)] for _ in range(tile.rows)]
    with e.loop(b.lshr(b.add(count, INT64(1)), INT64(1))) as pair:
        j = b.shl(pair, INT64(1))
        after = b.add(j, INT64(1))
        after = b.select(b.icmp_signed("<", after, count), after, j)
        rows = [b.add(codes, b.mul(x, stride)) for x in (j, after)]
        for token in (j, after) if not first else ():
            prefetch(token)
        for n, (channel, words) in enumerate(value_words(e, tile, rows, first)):
            for m in range(tile.rows):
                place = at.weights + 2 * tile.block * _number(tile, channel, m)
                two = b.load(e.pointer(INT32, e.advance(memory, j, 2), place), align=4)
                cell = cells[m][n]
                b.store(e.dot_words(words, e.broadcast(two), b.load(cell)), cell)
    for m, row in enumerate(cells):
        for channel, total in in_order(e, tile, [b.load(cell) for cell in row], first):
            n, place = _number(tile, channel, m), tile.sum_bytes * m + 4 * channel
            scale, offset = (
                e.broadcast(b.load(e.pointer(FLOAT, memory, x + 4 * n)))
                for x in (at.weight_scales, at.offsets)
            )
            x = e.fma(b.sitofp(total, e.floats), scale, e.read(sums, place))
            e.write(b.fadd(x, offset), sums, place)


@no_type_check
def _number(tile, channel, row):
    """The number of the rounded weights of a row for a channel of the values."""
    return channel // tile.v.group * tile.rows + row


@no_type_check
def _store(e, x, memory, place):
    """Write one float32."""
    e.builder.store(x, e.pointer(FLOAT, memory, place))
