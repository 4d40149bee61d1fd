"""Matrix products of a prefill kernel with float32 sums, as intrinsics of numba.

Of packed bfloat16 blocks `c [32, 32] = a [32, 32 steps] b [32 steps, 32]`, by AMX tiles or dot
products of pairs. Both read the same blocks: of `a` 16 rows of 32 columns after each other, of `b`
rows of 32 pairs, a pair being two elements of a column. Of float32 the right operand has the same
rows of 32 numbers, and keys and values are read where they lie, one number at a time.
"""

from typing import no_type_check

from llvmlite import ir
from numba import types

from regard.ops.kernels.columns import blocks
from regard.ops.kernels.intrinsics import emits
from regard.ops.kernels.panels import HALVES, ROW, SIDE, TILE
from regard.ops.kernels.vectors import BYTE, FLOAT, INT32, INT64, call

ROWS = 8  # of `a` whose dot products with 32 columns are in registers: 16 of 32 vectors
STEP = ROW * SIDE // 2  # bytes of 32 rows of `b`: 16 rows of pairs


# ---- AMX: tiles 0-3 are sums, 4 and 5 blocks of `a`, 6 and 7 of `b` ----------------------------


@emits(types.void)
@no_type_check
def begin_tiles(e, panel, palette, kept):
    """Configure this thread's AMX tiles; the former one is stored at the address `kept`."""
    if panel.amx:
        call(e, "sttilecfg", ir.VoidType(), e.pointer(BYTE, kept))
        call(e, "ldtilecfg", ir.VoidType(), e.pointer(BYTE, palette))


@emits(types.void)
@no_type_check
def end_tiles(e, panel, kept):
    """Restore the configuration: torch's kernels on this thread may rely on theirs."""
    if panel.amx:
        call(e, "ldtilecfg", ir.VoidType(), e.pointer(BYTE, kept))


@no_type_check
def _tiles(e, steps, a, a_stride, b, c, add):
    def move(name, number, address, offset, stride):
        place = e.pointer(BYTE, address, offset)
        call(e, name, ir.VoidType(), BYTE(number), place, INT64(stride))

    corners = [(0, 0), (0, 64), (16 * ROW, 0), (16 * ROW, 64)]
    for number, (row, column) in enumerate(corners):
        if add:
            move("tileloadd64", number, c, row + column, ROW)
        else:
            call(e, "tilezero", ir.VoidType(), BYTE(number))
    with e.loop(steps) as step:
        x = e.builder.add(a, e.builder.mul(step, a_stride))
        y = e.advance(b, step, STEP)
        move("tileloadd64", 4, x, 0, 64)
        move("tileloadd64", 6, y, 0, ROW)
        move("tileloadd64", 7, y, 64, ROW)
        move("tileloadd64", 5, x, TILE, 64)
        for number in range(4):
            left, right = BYTE(4 + number // 2), BYTE(6 + number % 2)
            call(e, "tdpbf16ps", ir.VoidType(), BYTE(number), left, right)
    for number, (row, column) in enumerate(corners):
        move("tilestored64", number, c, row + column, ROW)


# ---- dot products of pairs ---------------------------------------------------------------------


@no_type_check
def _pairs(e, steps, a, a_stride, b, c, add):
    with e.loop(INT64(SIDE // ROWS)) as part:
        c = e.advance(c, part, ROWS * ROW)
        a = e.advance(a, part, ROWS * 64)
        places = [row * ROW + column for row in range(ROWS) for column in (0, 64)]
        start = [e.read(c, place) if add else e.constant(0.0) for place in places]
        cells = [e.variable(x) for x in start]
        with e.loop(steps) as step:
            x = e.builder.add(a, e.builder.mul(step, a_stride))
            y = e.advance(b, step, STEP)
            _multiply_pairs(e, x, y, cells)
        for cell, place in zip(cells, places, strict=True):
            e.write(e.builder.load(cell), c, place)


@no_type_check
def _multiply_pairs(e, x, y, cells):
    for pair in range(SIDE // 2):
        ys = [e.builder.load(e.pointer(e.words, y, pair * ROW + i), align=4) for i in (0, 64)]
        for row in range(ROWS):
            one = e.builder.load(e.pointer(INT32, x, 64 * row + 4 * pair), align=4)
            first = e.builder.insert_element(ir.Constant(e.words, ir.Undefined), one, INT32(0))
            both = e.shuffle(first, first, [0] * e.lanes)
            for cell, other in zip(cells[2 * row : 2 * row + 2], ys, strict=True):
                e.builder.store(e.dot_pairs(both, other, e.builder.load(cell)), cell)


# ---- float32 -----------------------------------------------------------------------------------


@emits(types.void)
@no_type_check
def score_keys(e, panel, keys, stride, last, queries, scores):
    """scores[j, :32] = keys[j] . queries for 32 keys; those after `last` are read as `last`."""
    for columns in panel.together if panel.full else ():
        with e.loop(INT64(SIDE // panel.rows)) as part:
            first = e.builder.mul(part, INT64(panel.rows))
            wanted = [e.builder.add(first, INT64(m)) for m in range(panel.rows)]
            some = [e.builder.icmp_signed("<", i, last) for i in wanted]
            wanted = [e.builder.select(*pair, last) for pair in zip(some, wanted, strict=True)]
            places = [e.builder.add(keys, e.builder.mul(i, stride)) for i in wanted]
            start = [e.constant(0.0) for _ in range(panel.rows * len(columns))]
            found = _sums(
                e, INT64(panel.width), places, INT64(4), queries, INT64(ROW), columns, start
            )
            for i, x in enumerate(found):
                row, column = divmod(i, len(columns))
                e.write(x, e.advance(scores, first, ROW), ROW * row + columns[column])


@emits(types.void)
@no_type_check
def add_rows(e, panel, rows, count, a, a_row, a_column, b, b_row, sums, sums_row):
    """sums[i, :width] += the sum over j < `count` of a[i, j] b[j, :width], for a multiple of eight
    rows; all lie where their strides in bytes say."""
    if not panel.full:
        return
    size = len(panel.together[0]) * SIDE // 2  # columns at once

    def block(part, number, elements):
        columns = HALVES[: 2 * elements // SIDE]
        first = e.builder.mul(part, INT64(panel.rows))
        wanted = [e.builder.add(first, INT64(m)) for m in range(panel.rows)]
        places = [e.builder.add(a, e.builder.mul(i, a_row)) for i in wanted]
        targets = [e.builder.add(sums, e.builder.mul(i, sums_row)) for i in wanted]
        targets = [e.advance(at, number, 4 * size) for at in targets]
        start = [e.read(at, c) for at in targets for c in columns]
        right = e.advance(b, number, 4 * size)
        found = _sums(e, count, places, a_column, right, b_row, columns, start)
        for i, x in enumerate(found):
            e.write(x, targets[i // len(columns)], columns[i % len(columns)])

    with e.loop(e.builder.udiv(rows, INT64(panel.rows))) as part:
        blocks(e, panel.width, size, lambda *where: block(part, *where))


@no_type_check
def _sums(e, count, places, pace, factors, factor_pace, columns, start):
    """`start` plus the sum over j < `count` of the number at each place, `pace` bytes further for
    each j, times the columns of row j of the factors."""
    cells = [e.variable(x) for x in start]
    with e.loop(count) as j:
        row, further = (e.builder.mul(j, x) for x in (factor_pace, pace))
        row = e.builder.add(factors, row)
        ys = [e.read(row, c) for c in columns]
        for m, place in enumerate(places):
            at = e.pointer(FLOAT, place, further)
            one = e.broadcast(e.builder.load(at, align=4))
            for cell, y in zip(cells[m * len(ys) : (m + 1) * len(ys)], ys, strict=True):
                e.accumulate(cell, one, y)
    return [e.builder.load(cell) for cell in cells]


# ---- both --------------------------------------------------------------------------------------


@emits(types.void)
@no_type_check
def product(e, panel, steps, a, a_stride, b, c):
    """c = a b over so many steps of 32 columns, `a_stride` bytes apart in `a`."""
    (_tiles if panel.amx else _pairs)(e, steps, a, a_stride, b, c, False)


@emits(types.void)
@no_type_check
def add_product(e, panel, steps, a, a_stride, b, c):
    """c += a b over so many steps of 32 columns, `a_stride` bytes apart in `a`."""
    (_tiles if panel.amx else _pairs)(e, steps, a, a_stride, b, c, True)
