"""The functions that a kernel is made of, each a loop over vectors, as intrinsics of numba.

The first argument is the tile, known at compile time. Addresses are int64. What numba compiles is
marked `no_type_check`: its types are LLVM's, and a wrapper that checks types cannot be compiled.
"""

import inspect
from collections.abc import Callable
from typing import Any, no_type_check

from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
)

from regard.ops.kernels.panels import Panel
from regard.ops.kernels.tiles import BFLOAT16, HIDDEN, LINE, LOG2E, STEP, Format, Tile
from regard.ops.kernels.vectors import BYTE, FLOAT, INT16, INT32, INT64, Value, Vectors

# ---- a Tile or Panel in compiled code: a value of no size, its attributes are constants --------


class TileType(types.Opaque):  # type: ignore[misc]  # numba has no types for mypy
    """numba's type of one `Tile` or `Panel`, or of a format in it."""

    def __init__(self, tile: Tile | Panel | Format) -> None:
        self.tile = tile
        super().__init__(name=repr(tile))


register_model(TileType)(models.OpaqueModel)


@typeof_impl.register(Tile)
@typeof_impl.register(Panel)
@no_type_check
def _type_of(tile, context):
    return TileType(tile)


@infer_getattr
class _TileAttributes(AttributeTemplate):  # type: ignore[misc]
    key = TileType

    @no_type_check
    def generic_resolve(self, kind, name):
        found = getattr(kind.tile, name)
        return TileType(found) if isinstance(found, Format) else types.literal(found)


@lower_getattr_generic(TileType)
@no_type_check
def _attribute(context, builder, kind, value, name):
    found = getattr(kind.tile, name)
    if isinstance(found, Format):
        return context.get_dummy_value()
    return context.get_constant(types.literal(found).literal_type, found)


def emits(result: Any) -> Callable[[Callable[..., Value | None]], Any]:
    """A decorator: what the function emits becomes an intrinsic with a result of this type.

    The function gets `Vectors`, then the arguments: a tile as itself, others as LLVM's values.
    """

    @no_type_check
    def wrap(emit):
        def typed(context, *kinds):
            rest = [types.float32 if k == types.float32 else types.int64 for k in kinds]
            rest = [k if isinstance(k, TileType) else r for k, r in zip(kinds, rest, strict=True)]
            lanes = kinds[0].tile.lanes if isinstance(kinds[0], TileType) else 1

            def generate(context, builder, signature, values):
                pairs = zip(kinds, values, strict=True)
                given = [k.tile if isinstance(k, TileType) else value for k, value in pairs]
                return emit(Vectors(builder, lanes), *given) or context.get_dummy_value()

            return result(*rest), generate

        typed.__name__ = emit.__name__
        typed.__signature__ = inspect.signature(emit)  # numba binds the arguments of calls to it
        return intrinsic(typed)

    return wrap


# ---- score -------------------------------------------------------------------------------------


@emits(types.void)
@no_type_check
def load_query(e, tile, source, target, scale):
    """target[:] = scale * source[:] in float32, in the order in which keys are read."""
    together = 2 * e.lanes if tile.k == BFLOAT16 else e.lanes  # elements that are read at once

    def body(first, count):
        place, size = e.advance(source, first, tile.item), min(count, together)
        starts = [e.builder.add(place, INT64(tile.item * i)) for i in range(0, count, size)]
        xs = [x for start in starts for x in e.elements(start, size, tile.half)]
        for i, x in enumerate(xs):
            scaled = e.builder.fmul(x, e.broadcast(scale))
            e.write(scaled, e.advance(target, first, 4), 4 * e.lanes * i)

    e.columns(tile.width, body)


@emits(types.void)
@no_type_check
def dot_products(e, tile, queries, keys, stride, scales, pace, first, last, scores):
    """scores[m, first + i] = queries[m] . keys[first + i] for a tile's `rows` m and `keys` i.

    Keys after `last` are read as `last`, and their scores are overwritten later. The scales, `pace`
    bytes apart, are those of keys that are dequantised here.
    """
    if tile.k_integers:
        return
    b = e.builder
    cells = [[e.variable(e.constant(0.0)) for _ in range(tile.keys)] for _ in range(tile.rows)]
    wanted = [b.add(first, INT64(i)) for i in range(tile.keys)]
    wanted = [b.select(b.icmp_signed("<", i, last), i, last) for i in wanted]
    places = [b.add(keys, b.mul(i, stride)) for i in wanted]

    def multiply(start, count, xs):
        for m, row in enumerate(cells):
            at = e.advance(b.add(queries, INT64(tile.query_bytes * m)), start, 4)
            ys = e.elements(at, count, False)
            for x, cell in zip(xs, row, strict=True):
                for u, y in zip(x, ys, strict=True):
                    e.accumulate(cell, u, y)

    def body(start, count):
        half = tile.k == BFLOAT16
        xs = [e.elements(e.advance(at, start, tile.k_read), count, half) for at in places]
        multiply(start, count, xs)

    if tile.k_direct:
        pairs = [(at, b.add(scales, b.mul(i, pace))) for at, i in zip(places, wanted, strict=True)]
        for begin in range(0, tile.width, STEP):
            some = range(begin, min(begin + STEP, tile.width))
            xs = [dict(e.dequantized(*pair, tile.width, tile.k, some)) for pair in pairs]
            for channel in some[:: e.lanes]:
                multiply(INT64(channel), e.lanes, [[x[channel]] for x in xs])
    else:
        e.columns(tile.width, body)
    for m, row in enumerate(cells):
        found = e.sums([b.load(cell) for cell in row])
        e.write(found, e.advance(scores, first, 4), 4 * tile.block * m)


@emits(types.void)
@no_type_check
def prefetch_value(e, tile, values, j, stride):
    """Request a row of values from memory before it is needed."""
    place = e.builder.add(values, e.builder.mul(e.in_turns(j, tile.block, tile.streams), stride))
    e.prefetch(tile.v.bytes(tile.value_width), place, 2 if tile.v_integers else 1)


@emits(types.void)
@no_type_check
def prefetch_far(e, tile, keys, j, stride):
    """Request a row of keys long before it is needed: for the second cache, since the first has no
    room for a page."""
    place = e.builder.add(keys, e.builder.mul(e.in_turns(j, tile.block, tile.streams), stride))
    e.prefetch(tile.k.bytes(tile.width), place, 2)


@emits(types.void)
@no_type_check
def prefetch_scales(e, tile, of_k, k_pace, of_v, v_pace):
    """Request the scales of a block's keys, one row where they share them, and of its values."""
    b, found = e.builder, []
    if tile.k.quantized:
        found.append((tile.k, tile.width, 1 if tile.k.by_page else tile.block, of_k, k_pace))
    if tile.v_quantized:
        found.append((tile.v, tile.value_width, tile.block, of_v, v_pace))
    for form, width, rows, address, pace in found:
        size = 4 * -(-width // form.group)
        for j in range(0, rows, max(1, LINE // size)):
            e.prefetch(size, b.add(address, b.mul(INT64(j), pace)))


# ---- codes -------------------------------------------------------------------------------------


@emits(types.void)
@no_type_check
def dequantize_keys(e, tile, count, codes, stride, scales, pace, target):
    """target[j, :width] = zero + scale * code for `count` keys of a block."""
    _dequantize(e, count, codes, stride, scales, pace, target, tile.width, tile.k)


@emits(types.void)
@no_type_check
def dequantize_values(e, tile, count, codes, stride, scales, pace, target):
    """target[j, :value_width] = zero + scale * code for `count` values of a block."""
    _dequantize(e, count, codes, stride, scales, pace, target, tile.value_width, tile.v)


@no_type_check
def _dequantize(e, count, codes, stride, scales, pace, target, width, form):
    with e.loop(count) as j:
        place = e.advance(target, j, 4 * width)
        row, of_row = [
            e.builder.add(x, e.builder.mul(j, y)) for x, y in ((codes, stride), (scales, pace))
        ]
        for channel, x in e.dequantized(row, of_row, width, form, range(width * form.quantized)):
            e.write(x, place, 4 * channel)


# ---- softmax -----------------------------------------------------------------------------------


@emits(types.int64)
@no_type_check
def visible_keys(e, tile, count, bias):
    """How many of `count` keys there are up to the last whose bias is not -inf; all of them for a
    tile without biases."""
    if not tile.biased:
        return count
    found = cgutils.alloca_once_value(e.builder, INT64(0))
    with e.loop(count) as u:
        x = e.builder.load(e.item(bias, u))
        visible = e.builder.fcmp_unordered("!=", x, FLOAT(float(HIDDEN)))
        after = e.builder.add(u, INT64(1))
        e.builder.store(e.builder.select(visible, after, e.builder.load(found)), found)
    return e.builder.load(found)


@emits(types.void)
@no_type_check
def add_bias(e, tile, count, bias, scores):
    """scores[:count] += log2(e) bias[:count]; nothing for a tile without biases."""
    if not tile.biased:
        return
    with e.loop(count) as u:
        x = e.builder.load(e.item(bias, u))
        place = e.item(scores, u)
        added = e.builder.fmul(x, FLOAT(float(LOG2E)))
        e.builder.store(e.builder.fadd(e.builder.load(place), added), place)


@emits(types.void)
@no_type_check
def hide_from(e, tile, count, scores):
    """scores[count:] = -inf, up to the end of the block."""
    with e.loop(e.builder.sub(INT64(tile.block), count)) as u:
        e.builder.store(FLOAT(float(HIDDEN)), e.item(scores, e.builder.add(count, u)))


@emits(types.float32)
@no_type_check
def maximum(e, tile, scores, least):
    """The greatest of `least` and a block's scores."""
    x = e.broadcast(least)
    for i in range(0, tile.block, e.lanes):
        x = e.maximum(e.read(scores, 4 * i), x)
    return e.builder.extract_element(e.fold(x, e.maximum), INT32(0))


@emits(types.float32)
@no_type_check
def exponentials(e, tile, scores, top):
    """scores[:] = 2 ** (scores[:] - top) for a block; their sum."""
    top, total = e.broadcast(top), e.constant(0.0)
    for i in range(0, tile.block, e.lanes):
        x = e.exp2(e.builder.fsub(e.read(scores, 4 * i), top))
        e.write(x, scores, 4 * i)
        total = e.builder.fadd(total, x)
    return e.builder.extract_element(e.fold(total, e.builder.fadd), INT32(0))


@emits(types.float32)
@no_type_check
def exp2(e, tile, x):
    """2**x of one x <= 0."""
    return e.builder.extract_element(e.exp2(e.broadcast(x)), INT32(0))


@emits(types.void)
@no_type_check
def scale_sums(e, tile, sums, factor):
    """sums[:] *= factor, a row."""

    def body(first, count):
        for i in range(0, count, e.lanes):
            place = e.advance(sums, first, 4)
            scaled = e.builder.fmul(e.read(place, 4 * i), e.broadcast(factor))
            e.write(scaled, place, 4 * i)

    e.columns(tile.value_width, body)


# ---- merge -------------------------------------------------------------------------------------


@emits(types.void)
@no_type_check
def add_share(e, tile, sums, share, merged):
    """merged[:] += share sums[:], a row; each product is rounded before it is added."""

    def body(first, count):
        for i in range(0, count, e.lanes):
            x, place = e.read(e.advance(sums, first, 4), 4 * i), e.advance(merged, first, 4)
            product = e.builder.fmul(e.broadcast(share), x)
            e.write(e.builder.fadd(product, e.read(place, 4 * i)), place, 4 * i)

    e.columns(tile.value_width, body)


@emits(types.void)
@no_type_check
def store_row(e, tile, source, target):
    """target[:] = source[:], a row of sums, from the order of `Vectors.elements` to memory's."""

    def body(first, count):
        offset = e.builder.mul(first, INT64(4))
        xs = e.elements(e.builder.add(source, offset), count, False)
        if tile.v == BFLOAT16 and count == 2 * e.lanes:
            xs = [e.shuffle(*xs, [i // 2 + e.lanes * (i % 2) for i in range(2 * e.lanes)])]
        for i, x in enumerate(xs):
            e.write(x, e.builder.add(target, offset), 4 * e.lanes * i)

    e.columns(tile.value_width, body)


# ---- of one number -----------------------------------------------------------------------------


@emits(types.int64)
@no_type_check
def next_number(e, address):
    """The number in a counter that threads share, which is then one more."""
    return e.builder.atomic_rmw("add", e.pointer(INT64, address), INT64(1), "acq_rel")


@emits(types.float32)
@no_type_check
def fused(e, a, b, c):
    """`a * b + c`, rounded once."""
    return e.builder.fma(a, b, c)


@emits(types.CPointer(types.float32))
@no_type_check
def floats(e, address):
    """An address as a pointer to float32."""
    return e.pointer(FLOAT, address)


@emits(types.CPointer(types.int16))
@no_type_check
def halves(e, address):
    """An address as a pointer to the words of bfloat16."""
    return e.pointer(INT16, address)


@emits(types.CPointer(types.uint8))
@no_type_check
def octets(e, address):
    """An address as a pointer to bytes."""
    return e.pointer(BYTE, address)


@emits(types.CPointer(types.int64))
@no_type_check
def numbers(e, address):
    """An address as a pointer to int64."""
    return e.pointer(INT64, address)
