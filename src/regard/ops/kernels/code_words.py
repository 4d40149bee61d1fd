"""Words of two 16-bit integers, whose products one instruction adds: of codes, of numbers rounded.

Which two lie in a word is what takes fewest instructions: of a key, two channels; of values, the
same channel of two tokens.
"""

import math
from typing import no_type_check

from llvmlite import ir

from regard.ops.kernels.tiles import STEP
from regard.ops.kernels.vectors import BYTE, FLOAT, INT16, INT32

LARGEST = 32767.0  # the largest integer of 16 bits, which stands for the largest number of a row
SMALLEST = 1e-30  # of a row: its numbers are all 0 below that
EVEN_BYTES = 0x00FF00FF  # bytes 0 and 2 of a word
LOW_HALVES = 0x000F000F  # the low 4 bits of each of its halves
MAGNITUDE = 0x7FFFFFFF  # the bits of a float32 but its sign
UPPER = -65536  # the upper half of a word


@no_type_check
def key_words(e, tile, places, channels, most):
    """For each pair of so many channels, its place in the queries, and the codes of as many keys as
    lanes. Words of 4 bytes of the keys are transposed, up to `most` at once."""
    b, bits = e.builder, tile.k.bits
    of_key = channels * bits // 32
    at_once = math.gcd(of_key, most)
    for start in range(0, of_key, at_once):
        kind = ir.VectorType(INT32, at_once)
        rows = [b.load(e.pointer(kind, place, 4 * start), align=1) for place in places]
        rows = [side_by_side(e, rows[i::at_once]) for i in range(at_once)]
        for n, x in enumerate(e.transposed(rows), start):
            shifts, mask = ((0, 8), EVEN_BYTES) if bits == 8 else ((0, 8, 4, 12), LOW_HALVES)
            for i, shift in enumerate(shifts):
                yield 2 * (len(shifts) * n + i), b.and_(b.lshr(x, e.word(shift)), e.word(mask))


@no_type_check
def side_by_side(e, xs):
    """2**i vectors as one."""
    while len(xs) > 1:
        both = range(2 * xs[0].type.count)
        xs = [e.shuffle(x, y, both) for x, y in zip(xs[::2], xs[1::2], strict=True)]
    return xs[0]


@no_type_check
def paired(e, tile, integers):
    """The integers of all channels by twos, as `key_words` has them: bytes 0 and 2 of a word, then
    1 and 3; of 4-bit codes the low halves of all four first. Each with its first place."""
    b, four = e.builder, (0, 2, 1, 3)
    if tile.k.bits == 8:
        order = [4 * n + i for n in range(e.lanes // 4) for i in four]
        for c, x in integers.items():
            yield c, b.trunc(e.shuffle(x, x, order), ir.VectorType(INT16, e.lanes))
        return
    order = [4 * n + i + high for n in range(e.lanes // 4) for high in (0, e.lanes) for i in four]
    for start in range(0, tile.width, STEP):
        for i in range(0, STEP // 2, e.lanes):
            low, high = integers[start + i], integers[start + STEP // 2 + i]
            words = b.trunc(e.shuffle(low, high, order), ir.VectorType(INT16, 2 * e.lanes))
            yield start + 2 * i, words


@no_type_check
def value_words(e, tile, rows, first):
    """For each vector of a strip's sums, one of its channels, and the codes of two tokens as pairs.
    Words of two tokens are interleaved within 16 bytes, as one instruction does."""
    b, count = e.builder, 2 * e.lanes
    kind = ir.VectorType(BYTE, count)
    halves = [
        [i + of for at in range(start, count, 8) for i in range(at, at + 4) for of in (0, count)]
        for start in (0, 4)
    ]
    for at in range(first, first + tile.strip, count * 8 // tile.v.bits):
        xs = [b.load(e.pointer(kind, row, at * tile.v.bits // 8), align=1) for row in rows]
        xs = [b.zext(x, ir.VectorType(INT16, count)) for x in xs]
        pairs = [b.bitcast(e.shuffle(*xs, half), e.words) for half in halves]
        if tile.v.bits == 8:
            yield from ((at, x) for x in pairs)
            continue
        for shift in (0, 4):
            yield from ((at, b.and_(b.lshr(x, e.word(shift)), e.word(LOW_HALVES))) for x in pairs)


@no_type_check
def in_order(e, tile, xs, first):
    """The vectors of `value_words` in the order of channels: the first channel, and the vector."""
    lanes = e.lanes
    channels = [(i // 8 * 4 + i % 4) + (i % 8 >= 4) * lanes for i in range(2 * lanes)]
    for n, (x, y) in enumerate(zip(xs[::2], xs[1::2], strict=True)):
        for i in range(2):
            part = e.shuffle(x, y, channels[i * lanes : (i + 1) * lanes])
            if tile.v.bits == 8:
                yield first + (2 * n + i) * lanes, part
                continue
            # the bytes of so many steps of channels, first their low halves, then the high ones
            byte, high = n // 2 * 2 * lanes + i * lanes, n % 2
            step, inside = divmod(byte, STEP // 2)
            yield first + STEP * step + STEP // 2 * high + inside, part


@no_type_check
def halves(e, word):
    """Scale and zero, the lower and the upper half of a word, or of each of a vector."""
    b, vector = e.builder, isinstance(word.type, ir.VectorType)
    kind, by, upper = (
        (e.floats, e.word(16), e.word(UPPER)) if vector else (FLOAT, INT32(16), INT32(UPPER))
    )
    return b.bitcast(b.shl(word, by), kind), b.bitcast(b.and_(word, upper), kind)


@no_type_check
def rounded(e, xs):
    """The scale of some vectors, a scalar: the largest number over `LARGEST`; NaN where one is not
    finite. Then the numbers over it, rounded to integers, and what remains."""
    b, top = e.builder, e.word(0)
    for x in xs:  # as integers, NaN is above the infinite, which is above all numbers
        top = larger(e, b.and_(b.bitcast(x, e.words), e.word(MAGNITUDE)), top)
    top = e.fold(top, lambda x, y: larger(e, x, y))
    largest = b.bitcast(lane(e, top), FLOAT)
    some = b.fcmp_ordered(">", largest, FLOAT(SMALLEST))
    inverse = b.select(some, b.fdiv(FLOAT(LARGEST), largest), FLOAT(0.0))
    scale = b.fmul(largest, FLOAT(1 / LARGEST))
    scaled = [b.fmul(x, e.broadcast(inverse)) for x in xs]
    integers = [e.rounded(x) for x in scaled]
    left = [b.fsub(x, b.sitofp(i, e.floats)) for x, i in zip(scaled, integers, strict=True)]
    return scale, integers, left


@no_type_check
def larger(e, x, y):
    """The larger integer of each lane."""
    return e.builder.select(e.builder.icmp_signed(">", x, y), x, y)


@no_type_check
def every(e, vectors, first):
    """Of n vectors side by side, every n-th word from `first` on, as one vector."""
    x, n = vectors[0], len(vectors)
    places = [first + n * i for i in range(e.lanes)]
    for at, y in enumerate(vectors[1:], 1):
        kept = [place if at == 1 else i for i, place in enumerate(places)]
        new = [place - (at - 1) * e.lanes for place in places]
        x = e.shuffle(x, y, [
            old if place < at * e.lanes else one if place < (at + 1) * e.lanes else 0
            for place, old, one in zip(places, kept, new, strict=True)
        ])  # fmt: skip
    return x


@no_type_check
def lane(e, x):
    """The first number of a vector."""
    return e.builder.extract_element(x, INT32(0))
