"""Softmax and packing of a prefill kernel as intrinsics of numba: a lane is a query.

Scores are stored by key, so maxima, powers and totals need no sums across lanes.
"""

from typing import no_type_check

from llvmlite import ir
from numba import types

from regard.ops.kernels.intrinsics import emits
from regard.ops.kernels.panels import HALVES, POWER, RISE, ROW, SIDE
from regard.ops.kernels.tiles import HIDDEN
from regard.ops.kernels.vectors import BFLOAT, FLOAT, INT16, INT32, INT64, call

HIGH = -65536  # the upper 16 bits of an int32
HALF_UNIT = 2.0**-8  # half a unit in the last place of a bfloat16 in [1, 2)
ONES = 0x3F803F80  # the bits of a pair of bfloat16 ones
TO_FLOOR, PLAIN = INT32(1), INT32(4)  # rounding of `reduce`; of `scalef`, as the machine is set
ALL = ir.Constant(INT16, -1)  # lanes that a masked instruction writes
COUNTS = tuple(range(16))


@no_type_check
def power(e, x, rounding=0.0):
    """2**x, to 2**-13.7 of itself; `rounding` is added to the mantissa, a number in [1, 2)."""
    parts = x, TO_FLOOR, e.constant(0.0), ALL, PLAIN
    fraction = call(e, "avx512.mask.reduce.ps.512", e.floats, *parts)
    y = e.constant(POWER[-1])
    for place, coefficient in enumerate(POWER[-2::-1]):
        last = place == len(POWER) - 2
        y = e.fma(y, fraction, e.constant(coefficient + (rounding if last else 0.0)))
    parts = y, x, e.constant(0.0), ALL, PLAIN
    return call(e, "avx512.mask.scalef.ps.512", e.floats, *parts)


@no_type_check
def words(e, address, offset=0):
    """A vector of int32."""
    return e.builder.load(e.pointer(e.words, address, offset), align=4)


# ---- softmax -----------------------------------------------------------------------------------


@emits(types.void)
@no_type_check
def hide(e, panel, first, starts, stops, scores):
    """Scores of keys first ... first + 31 before its start or from its stop on: -inf."""
    b = e.builder
    limits = [(words(e, starts, i), words(e, stops, i)) for i in HALVES]
    with e.loop(INT64(SIDE)) as j:
        row = e.advance(scores, j, ROW)
        key = b.trunc(b.add(first, j), INT32)
        keys = b.bitcast(e.broadcast(b.bitcast(key, FLOAT)), e.words)
        for i, (start, stop) in zip(HALVES, limits, strict=True):
            inside = b.and_(b.icmp_signed(">=", keys, start), b.icmp_signed("<", keys, stop))
            hidden = e.constant(float(HIDDEN))
            e.write(b.select(inside, e.read(row, i), hidden), row, i)


@emits(types.void)
@no_type_check
def raise_maxima(e, panel, count, scores, state, sums, scale):
    """Raise the running maximum where a score is far above it, and rescale sums and totals.

    Each query has its own factor, 1 for most: no result depends on the keys of another query.
    """
    b, scale = e.builder, e.broadcast(scale)
    tops = [b.fmul(x, scale) for x in _maxima(e, count, scores)]
    before = [e.read(state, i) for i in HALVES]
    limits = [b.fadd(x, e.constant(RISE)) for x in before]
    above = [b.fcmp_ordered(">", x, y) for x, y in zip(tops, limits, strict=True)]
    mask = b.bitcast(b.or_(*above), INT16)
    with b.if_then(b.icmp_unsigned("!=", mask, INT16(0)), likely=False):
        factors = []
        for i, x, old, higher in zip(HALVES, tops, before, above, strict=True):
            e.write(b.select(higher, x, old), state, i)
            shrunk = e.exp2(b.fsub(old, x)) if panel.full else power(e, b.fsub(old, x))
            factors.append(b.select(higher, shrunk, e.constant(1.0)))
        totals = b.add(state, INT64(ROW))
        for address, rows in ((sums, SIDE * panel.strips), (totals, 1)):
            with e.loop(INT64(rows)) as j:
                row = e.advance(address, j, ROW)
                for i, factor in zip(HALVES, factors, strict=True):
                    e.write(b.fmul(e.read(row, i), factor), row, i)


@no_type_check
def _maxima(e, count, scores):
    cells = [[e.variable(e.constant(float(HIDDEN))) for _ in HALVES] for _ in range(4)]
    with e.loop(e.builder.udiv(count, INT64(4))) as turn:
        for j, row in enumerate(cells):
            at = e.advance(scores, turn, 4 * ROW)
            for i, cell in zip(HALVES, row, strict=True):
                x = e.read(at, ROW * j + i)
                e.builder.store(e.maximum(x, e.builder.load(cell)), cell)
    columns = [[e.builder.load(row[i]) for row in cells] for i in range(2)]
    return [e.maximum(e.maximum(s, t), e.maximum(u, v)) for s, t, u, v in columns]


@emits(types.void)
@no_type_check
def powers(e, panel, count, scores, state, scale):
    """Replace scores by weights in the same memory: bfloat16, or float32 where the panel is `full`;
    totals add up the weights as they are stored."""
    if panel.full:
        _full_powers(e, count, scores, state, scale)
        return
    b, scale, ones = e.builder, e.broadcast(scale), e.word(ONES)
    tops = [b.fsub(e.constant(-0.0), e.read(state, i)) for i in HALVES]
    totals = [e.variable(e.read(state, ROW + i)) for i in HALVES]
    with e.loop(b.udiv(count, INT64(2))) as turn:
        row, target = e.advance(scores, turn, 2 * ROW), e.advance(scores, turn, ROW)
        pairs = []
        for i, top in zip(HALVES, tops, strict=True):
            found = [e.fma(e.read(row, place + i), scale, top) for place in (0, ROW)]
            low, high = (b.bitcast(power(e, x, HALF_UNIT), e.words) for x in found)
            pairs.append(b.or_(b.lshr(low, e.word(16)), b.and_(high, e.word(HIGH))))
        for i, pair, total in zip(HALVES, pairs, totals, strict=True):
            e.write(pair, target, i)
            b.store(e.dot_pairs(pair, ones, b.load(total)), total)
    for i, total in zip(HALVES, totals, strict=True):
        e.write(b.load(total), state, ROW + i)


@no_type_check
def _full_powers(e, count, scores, state, scale):
    scale, tops = e.broadcast(scale), [e.read(state, i) for i in HALVES]
    totals = [e.variable(e.read(state, ROW + i)) for i in HALVES]
    with e.loop(count) as j:
        row = e.advance(scores, j, ROW)
        for i, top, total in zip(HALVES, tops, totals, strict=True):
            x = e.exp2(e.builder.fsub(e.builder.fmul(e.read(row, i), scale), top))
            e.write(x, row, i)
            e.builder.store(e.builder.fadd(e.builder.load(total), x), total)
    for i, total in zip(HALVES, totals, strict=True):
        e.write(e.builder.load(total), state, ROW + i)


@emits(types.void)
@no_type_check
def slopes(e, panel, count, scores, found, lses, totals, scale, power):
    """Replace scores by weights, and the slopes of weights in `found` by those of scores.

    The log-sum-exps are in powers of 2, as `power` times a score is; a total is the sum of a
    query's weights times their slopes.
    """
    b, scale, power = e.builder, e.broadcast(scale), e.broadcast(power)
    lses, totals = ([e.read(x, i) for i in HALVES] for x in (lses, totals))
    with e.loop(count) as j:
        row, slope = e.advance(scores, j, ROW), e.advance(found, j, ROW)
        for i, lse, total in zip(HALVES, lses, totals, strict=True):
            weight = e.exp2(b.fsub(b.fmul(e.read(row, i), power), lse))
            above = b.fsub(e.read(slope, i), total)
            e.write(weight, row, i)
            e.write(b.fmul(b.fmul(weight, scale), above), slope, i)


# ---- packing -----------------------------------------------------------------------------------


@no_type_check
def _row(e, base, stride, index, count):
    """The address of a row, and whether it is one of `count`; a row after them is the last one."""
    inside = e.builder.icmp_signed("<", index, count)
    index = e.builder.select(inside, index, e.builder.sub(count, INT64(1)))
    return e.builder.add(base, e.builder.mul(index, stride)), inside


@no_type_check
def _words_of(e, address, elements):
    """16 int32 lanes of a row's bfloat16 pairs, of which 16 or 32 elements exist."""
    if elements >= SIDE:
        return words(e, address)
    half = e.builder.load(e.pointer(ir.VectorType(INT32, 8), address), align=2)
    nothing = ir.Constant(half.type, [0] * 8)
    return e.shuffle(half, nothing, COUNTS)


@emits(types.void)
@no_type_check
def pack_queries(e, panel, first, count, q, stride, target):
    """Queries first ... first + 31 as rows of pairs, or of float32 numbers; those from `count` on
    repeat the last one."""
    columns = SIDE // 2 if panel.full else SIDE
    wanted = [e.builder.add(first, INT64(i)) for i in range(SIDE)]
    places = [_row(e, q, stride, i, count)[0] for i in wanted]

    def block(step, elements):
        to = e.advance(target, step, 16 * ROW)
        for offset, half in zip(HALVES, (places[:16], places[16:]), strict=True):
            rows = [
                _words_of(e, e.advance(at, step, 64), SIDE * elements // columns) for at in half
            ]
            for i, row in enumerate(e.transposed(rows)):
                e.write(row, to, ROW * i + offset)

    blocks(e, panel.width, columns, block)


@emits(types.void)
@no_type_check
def pack_keys(e, panel, first, count, k, stride, target):
    """Copy 32 keys from `first` on, zeros from `count` on, in blocks of 16 keys and 32 columns."""
    nothing = e.word(0)
    with e.loop(INT64(SIDE)) as i:
        at, inside = _row(e, k, stride, e.builder.add(first, i), count)
        to = e.advance(target, i, 64)
        for step in range(panel.steps):
            row = _words_of(e, e.builder.add(at, INT64(64 * step)), panel.width - SIDE * step)
            e.write(e.builder.select(inside, row, nothing), to, 2048 * step)


@emits(types.void)
@no_type_check
def pack_values(e, panel, first, count, v, stride, target):
    """Values first ... first + 31, zeros from `count` on, in blocks of 16 columns and 32 keys."""
    b, thin = e.builder, ir.VectorType(INT16, 16)
    zeros = ir.Constant(thin, [0] * 16)

    def half(index, offset):
        at, inside = _row(e, v, stride, b.add(first, index), count)
        x = b.load(e.pointer(thin, at, offset), align=2)
        return b.zext(b.select(inside, x, zeros), e.words)

    with e.loop(INT64(panel.value_width // 16)) as strip:
        offset, to = b.mul(strip, INT64(32)), e.advance(target, strip, 1024)
        rows = []
        for i in COUNTS:
            low, high = (half(INT64(2 * i + j), offset) for j in range(2))
            rows.append(b.or_(low, b.shl(high, e.word(16))))
        for i, row in enumerate(e.transposed(rows)):
            e.write(row, to, 64 * i)
    if panel.value_width % SIDE:
        for i in COUNTS:
            e.write(e.word(0), target, 64 * (panel.value_width + i))


# ---- results -----------------------------------------------------------------------------------


@emits(types.void)
@no_type_check
def begin_sums(e, panel, sums, state, maximum, total):
    """Set the sums to zero, and the maxima and totals to these values."""
    with e.loop(INT64(SIDE * panel.strips)) as j:
        for i in HALVES:
            e.write(e.constant(0.0), e.advance(sums, j, ROW), i)
    for i in HALVES:
        e.write(e.broadcast(maximum), state, i)
        e.write(e.broadcast(total), state, ROW + i)


@emits(types.void)
@no_type_check
def store_rows(e, panel, count, sums, state, out, stride):
    """Store sums over totals as output rows of `count` queries; 0 where no key was visible."""
    b, zero = e.builder, e.constant(0.0)
    columns = 16 if panel.wide else 32  # of a row: a vector
    for i in HALVES:
        total = e.read(state, ROW + i)
        some = b.fcmp_unordered("!=", total, zero)
        share = b.select(some, b.fdiv(e.constant(1.0), total), zero)
        here = b.add(sums, INT64(i))

        def block(number, elements, first=i // 4, here=here, share=share):
            at = e.advance(here, number, ROW * columns)
            rows = [_result(e, panel, at, j, share) for j in COUNTS]
            for j, row in enumerate(e.transposed(rows)):
                with b.if_then(b.icmp_signed("<", INT64(first + j), count)):
                    if elements < columns:
                        row = e.shuffle(row, row, COUNTS[:8])
                    to = b.add(out, b.mul(INT64(first + j), stride))
                    place = e.advance(to, number, panel.item * columns)
                    b.store(row, e.pointer(row.type, place), align=2)

        blocks(e, panel.value_width, columns, block)


@no_type_check
def blocks(e, width, size, body):
    """body(number, elements) for each block of columns; the last one may have fewer elements."""
    with e.loop(INT64(width // size)) as number:
        body(number, size)
    if width % size:
        body(INT64(width // size), width % size)


@no_type_check
def _result(e, panel, sums, j, share):
    """Column `j` of the output as int32 words: one float32 column, or two bfloat16 columns."""
    b = e.builder
    if panel.wide:
        return b.bitcast(b.fmul(e.read(sums, ROW * j), share), e.words)
    halves = []
    for place in (0, ROW):
        x = b.fmul(e.read(sums, 2 * ROW * j + place), share)
        bits = b.bitcast(b.fptrunc(x, ir.VectorType(BFLOAT, 16)), ir.VectorType(INT16, 16))
        halves.append(b.zext(bits, e.words))
    return b.or_(halves[0], b.shl(halves[1], e.word(16)))


@emits(types.CPointer(types.int32))
@no_type_check
def ints(e, panel, address):
    """An address as a pointer to int32."""
    return e.pointer(INT32, address)
