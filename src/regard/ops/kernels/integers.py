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
A thread's memory for all that lies where blocks of other kernels are dequantised (`room`).
"""

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
from regard.ops.kernels.tiles import LINE, Format, Tile
from regard.ops.kernels.vectors import FLOAT, INT16, INT32, INT64

ERROR = 2e-3  # of a score, in powers of 2: the output is wrong by about as much of the largest
# value, and by 4e-3 since it is rounded to bfloat16
FINER = 2 * LARGEST  # of the integers that remain, for 1 of the others


class Room(NamedTuple):
    """Bytes from the start of the memory to each of its arrays."""

    queries: int  # [rows, D] of int16, in the order of `paired`
    residuals: int  # [rows, D] of int16 as well: queries less these integers
    query_scales: int  # [rows]
    query_sums: int  # [rows, groups]: sums of q, or of q z of a page
    key_scales: int  # [groups, block]
    key_zeros: int
    value_scales: int  # [groups of values, block]
    value_zeros: int
    weights: int  # [groups of values, rows, block] of int16
    weight_scales: int  # [groups of values, rows]
    offsets: int  # [groups of values, rows]: sums of p z
    size: int  # of all


def room(tile: Tile) -> Room:
    """The arrays for one block of keys and all rows of a tile."""
    of_k, of_v = k_groups(tile), v_groups(tile)
    rows, block = tile.rows, tile.block
    sizes = [2 * rows * tile.width] * 2 + [4 * rows, 4 * rows * of_k]
    sizes += [4 * of_k * block] * 2 + [4 * of_v * block] * 2
    sizes += [2 * of_v * rows * block, 4 * of_v * rows, 4 * of_v * rows]
    places, at = [], 0
    for size in sizes:
        places.append(at)
        at += -(-size // LINE) * LINE
    assert at <= tile.block_bytes, "a block of codes takes less memory than one of float32"
    return Room._make([*places, at])


def k_groups(tile: Tile) -> int:
    """Groups of channels of a key; one where its scales are the page's, 0 of other products."""
    return 1 if tile.k.by_page else _groups(tile.k_integers, tile.width, tile.k)


def v_groups(tile: Tile) -> int:
    """Groups of channels of a value; 0 of other products."""
    return _groups(tile.v_integers, tile.value_width, tile.v)


def _groups(integers: bool, width: int, form: Format) -> int:
    return -(-width // form.group) if integers else 0


# ---- score -------------------------------------------------------------------------------------


@emits(types.void)
@no_type_check
def round_queries(e, tile, queries, page_scales, memory):
    """Round the rows of float32 `queries`, times the channels' scales where those are a page's."""
    if not tile.k_integers:
        return
    at, pace = room(tile), tile.k.group if not tile.k.by_page else tile.width
    for m in range(tile.rows):
        xs, sums = {}, []
        for first in range(0, tile.width, pace):
            total = e.constant(0.0)
            for c in range(first, min(first + pace, tile.width), e.lanes):
                x = e.read(queries, tile.query_bytes * m + 4 * c)
                if tile.k.by_page:
                    scale, zero = halves(e, e.read_words(page_scales, 4 * c))
                    total, x = e.fma(x, zero, total), e.builder.fmul(x, scale)
                else:
                    total = e.builder.fadd(total, x)
                xs[c] = x
            sums.append(lane(e, e.fold(total, e.builder.fadd)))
        scale, integers, left = rounded(e, list(xs.values()))
        left = [e.rounded(e.builder.fmul(x, e.constant(FINER))) for x in left]
        for start, found in (at.queries, integers), (at.residuals, left):
            for place, words in paired(e, tile, dict(zip(xs, found, strict=True))):
                e.write(words, memory, start + 2 * (tile.width * m + place))
        _store(e, scale, memory, at.query_scales + 4 * m)
        for g, total in enumerate(sums):
            _store(e, total, memory, at.query_sums + 4 * (len(sums) * m + g))


@emits(types.void)
@no_type_check
def spread_key_scales(e, tile, count, scales, pace, memory):
    """Scales and zeros of a block's keys side by side, for each group; 0 after `count`."""
    if tile.k_integers and not tile.k.by_page:
        at = room(tile)
        _spread(e, tile, count, scales, pace, memory, (at.key_scales, at.key_zeros), k_groups(tile))


@emits(types.void)
@no_type_check
def spread_value_scales(e, tile, count, scales, pace, memory):
    """The same of its values."""
    if tile.v_integers:
        at, groups = room(tile), v_groups(tile)
        _spread(e, tile, count, scales, pace, memory, (at.value_scales, at.value_zeros), groups)


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
def loses_much(e, tile, memory):
    """Whether scores of a block may lose more than `ERROR`, as the root of the mean square of what
    is rounded, over all codes; 1 or 0."""
    if not tile.k_integers:
        return INT64(0)
    b, at = e.builder, room(tile)
    top = FLOAT(0.0)
    for m in range(tile.rows):
        own = b.load(e.pointer(FLOAT, memory, at.query_scales + 4 * m))
        top = b.select(b.fcmp_unordered("<", own, top), top, own)
    squares = FLOAT(float(tile.width))  # of scales, over all channels
    if not tile.k.by_page:
        most = e.constant(0.0)
        for i in range(0, tile.block, e.lanes):
            total = e.constant(0.0)
            for g, first in enumerate(range(0, tile.width, tile.k.group)):
                x = e.read(memory, at.key_scales + 4 * (tile.block * g + i))
                channels = float(min(tile.k.group, tile.width - first))
                total = e.fma(b.fmul(x, e.constant(channels)), x, total)
            most = e.maximum(total, most)
        squares = lane(e, e.fold(most, e.maximum))
    # an integer is wrong by up to 1/2, evenly, and codes are between 0 and the last one, evenly
    of_codes = (2.0**tile.k.bits - 1) ** 2 / 36
    lost = b.fmul(b.fmul(b.fmul(top, top), squares), FLOAT(of_codes))
    return b.zext(b.fcmp_unordered(">", lost, FLOAT(ERROR**2)), INT64)


@emits(types.void)
@no_type_check
def integer_scores(e, tile, memory, keys, stride, first, last, scores):
    """The scores of all rows and a vector of keys from `first` on; keys after `last` are read as
    `last`."""
    if not tile.k_integers:
        return
    b, at = e.builder, room(tile)
    totals = [e.constant(0.0)] * tile.rows
    for g, sums in _products(e, tile, memory, keys, stride, first, last, at.queries):
        for m, x in enumerate(sums):
            place = at.query_sums + 4 * (k_groups(tile) * m + g)
            of_zero = e.broadcast(b.load(e.pointer(FLOAT, memory, place)))
            totals[m] = _scaled(e, tile, memory, first, g, x, totals[m], of_zero)
    for m, total in enumerate(totals):
        e.write(total, e.advance(scores, first, 4), 4 * tile.block * m)


@emits(types.void)
@no_type_check
def add_residuals(e, tile, memory, keys, stride, first, last, scores):
    """Add the products of what remains of the queries to such scores."""
    if not tile.k_integers:
        return
    at, here = room(tile), e.advance(scores, first, 4)
    for g, sums in _products(e, tile, memory, keys, stride, first, last, at.residuals):
        for m, x in enumerate(sums):
            x = e.builder.fmul(x, e.constant(1 / FINER))
            total = e.read(here, 4 * tile.block * m)
            total = _scaled(e, tile, memory, first, g, x, total, e.constant(0.0))
            e.write(total, here, 4 * tile.block * m)


@no_type_check
def _products(e, tile, memory, keys, stride, first, last, start):
    """For each group of channels, the products of the rows of integers from `start` on with a
    vector of keys, times the rows' scales. A lane is a key."""
    b, at, groups = e.builder, room(tile), k_groups(tile)
    wanted = [b.add(first, INT64(i)) for i in range(e.lanes)]
    wanted = [b.select(b.icmp_signed("<", i, last), i, last) for i in wanted]
    places = [b.add(keys, b.mul(i, stride)) for i in wanted]
    for g in range(groups):
        sums = [[e.word(0)] * 2 for _ in range(tile.rows)]  # two of each: one waits for the other
        for n, (place, words) in enumerate(key_words(e, tile, places, g, groups)):
            for m, row in enumerate(sums):
                two = b.load(e.pointer(INT32, memory, start + 2 * (tile.width * m + place)))
                row[n % 2] = e.dot_words(words, e.broadcast(two), row[n % 2])
        scales = [
            b.load(e.pointer(FLOAT, memory, at.query_scales + 4 * m)) for m in range(tile.rows)
        ]
        yield (
            g,
            [
                b.fmul(b.sitofp(b.add(*row), e.floats), e.broadcast(own))
                for row, own in zip(sums, scales, strict=True)
            ],
        )


@no_type_check
def _scaled(e, tile, memory, first, group, x, total, of_zero):
    """`total` and products with a vector of codes, times the scales of keys, and their zeros."""
    if tile.k.by_page:
        return e.builder.fadd(e.builder.fadd(x, of_zero), total)
    at, here = room(tile), e.advance(memory, first, 4)
    scale, zero = (
        e.read(here, place + 4 * tile.block * group) for place in (at.key_scales, at.key_zeros)
    )
    return e.fma(of_zero, zero, e.fma(x, scale, total))


# ---- gather ------------------------------------------------------------------------------------


@emits(types.void)
@no_type_check
def round_weights(e, tile, weights, memory):
    """Round the weights of all rows times the scales of the values, for each group of channels."""
    if not tile.v_integers:
        return
    b, at = e.builder, room(tile)
    places = [(g, m) for g in range(v_groups(tile)) for m in range(tile.rows)]
    for n, (g, m) in enumerate(places):
        xs, total = [], e.constant(0.0)
        for i in range(0, tile.block, e.lanes):
            here, p = 4 * (tile.block * g + i), e.read(weights, 4 * (tile.block * m + i))
            xs.append(b.fmul(p, e.read(memory, at.value_scales + here)))
            total = e.fma(p, e.read(memory, at.value_zeros + here), total)
        scale, integers, _ = rounded(e, xs)
        for i, x in enumerate(integers):
            words = b.trunc(x, ir.VectorType(INT16, e.lanes))
            e.write(words, memory, at.weights + 2 * (tile.block * n + e.lanes * i))
        _store(e, scale, memory, at.weight_scales + 4 * n)
        _store(e, lane(e, e.fold(total, b.fadd)), memory, at.offsets + 4 * n)


@emits(types.void)
@no_type_check
def add_weighted_integers(e, tile, count, codes, stride, memory, sums, ahead, apart):
    """sums[m, :] += the rounded weights of row m times the codes of a block, scaled, and offsets;
    meanwhile requests the next block's keys, `apart` bytes apart."""
    for first in range(0, tile.value_width, tile.strip) if tile.v_integers else ():
        _add_strip(e, tile, count, codes, stride, memory, sums, first, ahead, apart)


@no_type_check
def _add_strip(e, tile, count, codes, stride, memory, sums, first, ahead, apart):
    b, at = e.builder, room(tile)
    of_row = tile.strip // e.lanes
    cells = [[e.variable(e.word(0)) for _ in range(of_row)] for _ in range(tile.rows)]
    with e.loop(b.lshr(b.add(count, INT64(1)), INT64(1))) as pair:
        j = b.shl(pair, INT64(1))
        after = b.add(j, INT64(1))
        after = b.select(b.icmp_signed("<", after, count), after, j)
        rows = [b.add(codes, b.mul(x, stride)) for x in (j, after)]
        for token in (j, after) if not first else ():
            e.prefetch(tile.prefetch_bytes, b.add(ahead, b.mul(token, apart)), 2)
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
