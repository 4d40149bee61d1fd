"""Keys of a block from their latents, as intrinsics of numba: a product, then rotation (RoPE).

A weight matrix is transposed first, so that a vector of it belongs to neighbouring channels of a
key. Where the processor multiplies pairs of bfloat16, two neighbours in a latent are one word.
"""

from contextlib import contextmanager
from typing import no_type_check

from numba import types

from regard.ops.kernels.intrinsics import emits
from regard.ops.kernels.vectors import FLOAT, INT32, INT64

ROWS = 4  # latents that are multiplied by a row of weights while it is in registers


@emits(types.void)
@no_type_check
def turn_weights(e, tile, weights, target):
    """target[r, :width] = weights[:, r], for every number or pair r of a latent."""
    if not tile.k.rebuilt:
        return
    assert tile.words >= e.lanes, "a latent has a whole vector of numbers, or of pairs"
    half = tile.widens
    with e.loop(INT64(tile.width // e.lanes)) as c, _vectors(e, tile.words) as r:
        from_ = e.advance(weights, c, e.lanes * tile.k.bytes(tile.width))
        from_ = e.advance(from_, r, 2 if half else 4)
        rows = [e.elements(e.advance(from_, INT64(i), tile.k.bytes(tile.width)), e.lanes, half)[0]
                for i in range(e.lanes)]  # fmt: skip
        to = e.advance(e.advance(target, r, 4 * tile.width), c, 4 * e.lanes)
        for i, row in enumerate(e.transposed(rows)):
            e.write(row, to, 4 * tile.width * i)


@emits(types.void)
@no_type_check
def rebuild_keys(e, tile, count, latents, stride, weights, cos, sin, positions, apart, target):
    """target[j, :width] = latents[j] @ weights, rotated by the angles of positions[j], for `count`
    keys of a block; weights are transposed, positions `apart` bytes from one another."""
    if not tile.k.rebuilt:
        return
    b = e.builder
    if tile.widens:
        wide = b.add(target, INT64(4 * tile.block * tile.width))
        _widen(e, tile, count, latents, stride, wide)
        latents, stride = wide, INT64(tile.latent_bytes)
    whole, rest = b.udiv(count, INT64(ROWS)), b.urem(count, INT64(ROWS))
    done = b.mul(whole, INT64(ROWS))
    most = e.lanes * (2 if e.lanes == 8 else 4)  # columns: their sums of all rows fit registers
    columns = next(c for c in range(most, 0, -e.lanes) if tile.width % c == 0)
    for c in range(0, tile.width, columns):
        of_weights = b.add(weights, INT64(4 * c))
        for rows, some, first in ((ROWS, whole, INT64(0)), (1, rest, done)):
            with e.loop(some) as i:
                j = b.add(first, b.mul(i, INT64(rows)))
                from_ = b.add(latents, b.mul(j, stride))
                to = b.add(e.advance(target, j, 4 * tile.width), INT64(4 * c))
                _multiply(e, tile, rows, columns, from_, stride, of_weights, to)
    with e.loop(count) as j:
        place = e.pointer(INT32, b.add(positions, b.mul(j, apart)))
        angles = b.mul(b.sext(b.load(place, align=4), INT64), INT64(4 * tile.k.rotated))
        row = e.advance(target, j, 4 * tile.width)
        _rotate(e, tile.k.rotated // 2, row, b.add(cos, angles), b.add(sin, angles))


@no_type_check
def _widen(e, tile, count, source, stride, target):
    """target[j, :rank] = source[j, :rank] in float32."""
    b = e.builder
    with e.loop(count) as j:
        row, to = b.add(source, b.mul(j, stride)), e.advance(target, j, tile.latent_bytes)
        with _vectors(e, tile.words) as r:
            (x,) = e.elements(e.advance(row, r, 2), e.lanes, True)
            e.write(x, e.advance(to, r, 4))


@contextmanager
@no_type_check
def _vectors(e, count):
    """A loop over the vectors of so many words, by their first one; the last two may overlap."""
    b, last = e.builder, INT64(count - e.lanes)
    with e.loop(INT64(-(-count // e.lanes))) as i:
        r = b.mul(i, INT64(e.lanes))
        yield b.select(b.icmp_signed("<", r, last), r, last)


@no_type_check
def _multiply(e, tile, rows, columns, latents, stride, weights, target):
    """target[m, :columns] = latents[m] @ weights[:, :columns] for so many rows m."""
    b, places = e.builder, range(0, 4 * columns, 4 * e.lanes)
    product = e.dot_pairs if tile.k.pairs else e.fma
    cells = [[e.variable(e.constant(0.0)) for _ in places] for _ in range(rows)]
    with e.loop(INT64(tile.words)) as r:
        of_weights, of_latents = e.advance(weights, r, 4 * tile.width), e.advance(latents, r, 4)
        xs = [e.read(of_weights, place) for place in places]
        for m, row in enumerate(cells):
            one = b.load(e.pointer(FLOAT, of_latents, b.mul(stride, INT64(m))), align=4)
            y = e.broadcast(one)
            for x, cell in zip(xs, row, strict=True):
                b.store(product(x, y, b.load(cell)), cell)
    for m, row in enumerate(cells):
        for cell, place in zip(row, places, strict=True):
            e.write(b.load(cell), target, 4 * tile.width * m + place)


@no_type_check
def _rotate(e, half, row, cos, sin):
    """`(a cos - b sin, b cos + a sin)` of each pair of channels, `half` channels apart."""
    for i in range(0, half, e.lanes):
        first, second = 4 * i, 4 * (i + half)
        x, y = e.read(row, first), e.read(row, second)
        for one, other, place in ((x, y, first), (y, x, second)):
            scaled = e.builder.fmul(one, e.read(cos, place))
            e.write(e.fma(other, e.read(sin, place), scaled), row, place)
