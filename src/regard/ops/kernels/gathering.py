"""The weighted sums of values, as intrinsics of numba: a strip of columns stays in registers."""

from typing import no_type_check

from numba import types

from regard.ops.kernels.intrinsics import emits
from regard.ops.kernels.tiles import BFLOAT16
from regard.ops.kernels.vectors import FLOAT, INT64


@emits(types.void)
@no_type_check
def add_weighted(e, tile, count, weights, values, stride, sums):
    """sums[m, :strip] += sum over j < count of weights[m, j] values[j, :strip], for a tile's m."""
    _add_weighted(e, tile, count, weights, values, stride, sums, lambda j: None)


@emits(types.void)
@no_type_check
def add_weighted_and_prefetch(e, tile, count, weights, values, stride, sums, ahead, pace, far):
    """`add_weighted`, and meanwhile requests `prefetch_bytes` of each row at `ahead`, `pace` bytes
    apart; or a part of the values at `far`, if it is not 0."""

    def prefetch(j):
        j = e.in_turns(j, tile.block, tile.streams)
        _prefetch(e, tile, e.builder.add(ahead, e.builder.mul(j, pace)), far, j, stride)

    _add_weighted(e, tile, count, weights, values, stride, sums, prefetch)


@emits(types.void)
@no_type_check
def add_weighted_codes(e, tile, count, weights, codes, stride, scales, pace, sums, ahead, apart,
                       far):  # fmt: skip
    """`add_weighted_and_prefetch` of all columns, of codes that are dequantised in registers."""
    b = e.builder
    dequantises = tile.v_direct and not tile.v_integers
    for first in range(0, tile.value_width, tile.strip) if dequantises else ():
        columns = range(first, first + tile.strip, e.lanes)

        def values(j, columns=columns):
            row, of_row = b.add(codes, b.mul(j, stride)), b.add(scales, b.mul(j, pace))
            found = dict(e.dequantized(row, of_row, tile.value_width, tile.v, columns))
            return [found[c] for c in columns]

        def prefetch(j, first=first):
            _prefetch(e, tile, b.add(ahead, b.mul(j, apart)), far, j, stride, first // tile.strip)

        _accumulate(e, tile, count, weights, b.add(sums, INT64(4 * first)), values, prefetch)


@no_type_check
def _prefetch(e, tile, near, far, j, stride, strip=0):
    """Request a part of the row at `near`, once; or the strip's part of value j of those at `far`,
    if it is not 0."""
    b, part = e.builder, tile.request_bytes
    with b.if_else(b.icmp_signed("!=", far, INT64(0))) as (yes, no):
        with yes:
            if strip < tile.requests:
                e.prefetch(part, b.add(b.add(far, INT64(strip * part)), b.mul(j, stride)), 2)
        with no:
            if strip < tile.prefetches:
                e.prefetch(tile.prefetch_bytes, near)


@no_type_check
def _add_weighted(e, tile, count, weights, values, stride, sums, meanwhile):
    b, pair, half = e.builder, 2 * e.lanes, tile.v == BFLOAT16

    def elements(j):
        row = b.add(values, b.mul(j, stride))
        for c in range(0, tile.strip, pair):
            at = b.add(row, INT64(c * tile.v_read))
            yield from e.elements(at, min(pair, tile.strip - c), half)

    _accumulate(e, tile, count, weights, sums, elements, meanwhile)


@no_type_check
def _accumulate(e, tile, count, weights, sums, values, meanwhile):
    """sums[m, :strip] += sum over j < count of weights[m, j] values(j), for a tile's m."""
    b = e.builder
    vectors = range(0, tile.strip, e.lanes)
    places = [tile.sum_bytes * m + 4 * c for m in range(tile.rows) for c in vectors]
    cells = [e.variable(e.read(sums, place)) for place in places]
    with e.loop(count) as j:
        meanwhile(j)
        xs, weight = list(values(j)), b.add(weights, b.mul(j, INT64(4)))
        for m in range(tile.rows):
            one = b.load(e.pointer(FLOAT, weight, 4 * tile.block * m), align=4)
            w = e.broadcast(one)
            for x, cell in zip(xs, cells[m * len(xs) : (m + 1) * len(xs)], strict=True):
                e.accumulate(cell, x, w)
    for cell, place in zip(cells, places, strict=True):
        e.write(b.load(cell), sums, place)
