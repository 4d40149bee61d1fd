"""Loops over the lanes of vectors, emitted for LLVM as numba intrinsics.

Nothing is left to an auto-vectoriser. Each intrinsic's first argument is the number of lanes of a
vector, which need not be the machine's: LLVM splits a vector where the machine's are narrower. What
numba compiles is marked `no_type_check`: its types are LLVM's.
"""

import functools
from typing import no_type_check

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

F, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
EXP2 = [  # 2**f on [-1/2, 1/2], minimax, relative error 2**-28.9
    1.0, 0.6931472028550832, 0.24022647913626496, 0.05550332471100074,
    0.009618437357826595, 0.0013398874422279362, 0.0001535336188694808,
]  # fmt: skip


@functools.cache
def machine_lanes() -> int:
    """Lanes of float32 in a vector of the processor that numba compiles for (`NUMBA_CPU_NAME` and
    `NUMBA_CPU_FEATURES` may choose another than this machine's): 16, 8 or 4."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return 16 if "+avx512f" in features else 8 if "+avx2" in features else 4


def sums_in_registers(lanes: int) -> int:
    """Vectors of sums that stay in registers: AVX2 has 16 of them, AVX-512 and NEON have 32."""
    return 12 if lanes == 8 else 24


# ---- emitting: e holds llvmlite's builder, addresses are int64 --------------------------------


class Emitter:
    """llvmlite's builder, and the types of vectors of so many lanes."""

    def __init__(self, builder, lanes):
        self.builder, self.lanes = builder, lanes
        self.floats, self.words = ir.VectorType(F, lanes), ir.VectorType(I32, lanes)

    def __getattr__(self, name):
        return getattr(self.builder, name)

    def all(self, x):
        """A vector with the float x in every lane."""
        return ir.Constant(self.floats, [x] * self.lanes)

    def all_words(self, x):
        """A vector with the int32 x in every lane."""
        return ir.Constant(self.words, [x] * self.lanes)


def _at(e, kind, address, offset=0):
    place = e.add(address, offset if isinstance(offset, ir.Value) else I64(offset))
    return e.inttoptr(place, kind.as_pointer())


def _read(e, address, offset=0):
    return e.load(_at(e, e.floats, address, offset), align=4)


def _write(e, x, address, offset=0):
    e.store(x, _at(e, x.type, address, offset), align=4)


def _fma(e, x, y, z):
    """x y + z; rounded once where the machine has an instruction for it, never by a library."""
    kind, name = ir.FunctionType(e.floats, [e.floats] * 3), f"llvm.fmuladd.v{e.lanes}f32"
    return e.call(cgutils.get_or_insert_function(e.module, kind, name), [x, y, z])


def _shuffle(e, x, y, lanes):
    return e.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _spread(e, scalar):
    none = ir.Constant(e.floats, ir.Undefined)
    return _shuffle(e, e.insert_element(none, scalar, I32(0)), none, [0] * e.lanes)


def _row(e, address, count, half):
    """One or two vectors of elements as float32; of two of bfloat16 the even elements first, then
    the odd."""
    if not half:
        return [_read(e, address, 4 * i) for i in range(0, count, e.lanes)]
    if count == e.lanes:
        x = e.load(_at(e, ir.VectorType(I16, e.lanes), address), align=2)
        return [e.bitcast(e.shl(e.zext(x, e.words), e.all_words(16)), e.floats)]
    x = e.load(_at(e, e.words, address), align=2)
    even, odd = e.shl(x, e.all_words(16)), e.and_(x, e.all_words(-65536))
    return [e.bitcast(y, e.floats) for y in (even, odd)]


def _columns(e, width, body):
    """body(first element, elements) over a row: two vectors a step, in a loop if many, then one."""
    pairs, rest = divmod(width, 2 * e.lanes)
    unroll = next(u for u in (4, 3, 2, 1) if pairs % u == 0) if pairs > 4 else max(pairs, 1)
    with cgutils.for_range(e.builder, I64(pairs // unroll)) as loop:
        for u in range(unroll if pairs else 0):
            first = e.mul(loop.index, I64(unroll * 2 * e.lanes))
            body(e.add(first, I64(u * 2 * e.lanes)), 2 * e.lanes)
    if rest:
        body(I64(pairs * 2 * e.lanes), rest)


def _totals(e, xs):
    """The lane sums of n = 2**i vectors as one vector of n lanes, by a tree of shuffles."""
    n, part = len(xs), e.lanes
    while len(xs) > 1:
        part //= 2
        low = [g + i for g in range(0, e.lanes, 2 * part) for i in range(part)]
        low += [e.lanes + i for i in low]
        halves = [low, [i + part for i in low]]
        xs = [e.fadd(*[_shuffle(e, x, y, h) for h in halves])
              for x, y in zip(xs[::2], xs[1::2], strict=True)]  # fmt: skip
    x = _fold(e, xs[0], e.fadd, part)
    return _shuffle(e, x, x, list(range(0, e.lanes, e.lanes // n)))


def _fold(e, x, join, part=None):
    """Join neighbouring lanes, in groups of `part` (all of them, if not given)."""
    part = e.lanes if part is None else part
    while part > 1:
        part //= 2
        x = join(x, _shuffle(e, x, x, [i ^ part for i in range(e.lanes)]))
    return x


def _greater(e, x, y):  # y where that is NaN
    return e.select(e.fcmp_ordered(">", x, y), x, y)


def _exp2(e, x):
    """2**x of x <= 0, to about an ulp; 0 below -127."""
    x, magic = _greater(e, e.all(-127.0), x), e.all(12582912.0)  # 1.5 * 2**23: rounds
    whole = e.fadd(x, magic)
    f, y = e.fsub(x, e.fsub(whole, magic)), e.all(EXP2[-1])
    for c in EXP2[-2::-1]:
        y = _fma(e, y, f, e.all(c))
    bits = e.add(e.bitcast(whole, e.words), e.all_words(127 - 0x4B400000))
    return e.fmul(y, e.bitcast(e.shl(bits, e.all_words(23)), e.floats))


def _ask(e, nbytes, address):
    byte = ir.IntType(8)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), I32, I32, I32])
    ask = cgutils.get_or_insert_function(e.module, kind, "llvm.prefetch.p0")
    for i in range(0, nbytes, 64):
        e.call(ask, [_at(e, byte, address, i), I32(0), I32(3), I32(1)])


def _emitted(result, constants):
    """An intrinsic from an emitter whose first arguments are constants, the rest numbers."""

    @no_type_check
    def wrap(emit):
        def typer(*kinds):
            values = [kind.literal_value for kind in kinds[:constants]]
            rest = [types.float32 if k == types.float32 else types.int64 for k in kinds[constants:]]

            def codegen(context, b, signature, args):
                return emit(b, *values, *args[constants:]) or context.get_dummy_value()

            return result(*kinds[:constants], *rest), codegen

        names = ", ".join(emit.__code__.co_varnames[1 : emit.__code__.co_argcount])
        scope = {"typer": typer}  # numba wants the names of the arguments
        exec(f"def {emit.__name__}(context, {names}): return typer({names})", scope)
        return intrinsic(prefer_literal=True)(scope[emit.__name__])

    return wrap


@_emitted(types.void, 6)
@no_type_check
def dots(b, lanes, rows, keys, width, half, room, q, k, stride, j, last, s):
    """s[m, j + i] = q[m] . k[j + i] for `rows` m and `keys` i; keys past `last` repeat it."""
    e = Emitter(b, lanes)
    cells = [cgutils.alloca_once(e.builder, e.floats) for _ in range(rows * keys)]
    for cell in cells:
        e.store(e.all(0.0), cell)
    nexts = [e.add(j, I64(i)) for i in range(keys)]
    nexts = [e.select(e.icmp_signed("<", i, last), i, last) for i in nexts]
    at = [e.add(k, e.mul(i, stride)) for i in nexts]

    def body(start, count):
        xs = [_row(e, e.add(a, e.mul(start, I64(2 if half else 4))), count, half) for a in at]
        for m in range(rows):
            ys = _row(e, e.add(e.add(q, I64(4 * width * m)), e.mul(start, I64(4))), count, False)
            for x, cell in zip(xs, cells[m * keys : (m + 1) * keys], strict=True):
                for u, y in zip(x, ys, strict=True):
                    e.store(_fma(e, u, y, e.load(cell)), cell)

    _columns(e, width, body)
    for m in range(rows):
        x = _totals(e, [e.load(c) for c in cells[m * keys : (m + 1) * keys]])
        _write(e, x, e.add(s, e.mul(j, I64(4))), 4 * room * m)


@_emitted(types.void, 7)
@no_type_check
def gather(b, lanes, rows, count, width, half, room, soon, n, p, v, stride, acc, ahead, pace):
    """acc[m, :count] += sum over j < n of p[m, j] v[j, :count].

    Meanwhile `soon` bytes of each row at `ahead`, `pace` apart, are asked for from memory.
    """
    e = Emitter(b, lanes)
    places = [4 * (width * m + c) for m in range(rows) for c in range(0, count, lanes)]
    cells = [cgutils.alloca_once(e.builder, e.floats) for _ in places]
    for cell, place in zip(cells, places, strict=True):
        e.store(_read(e, acc, place), cell)
    with cgutils.for_range(e.builder, n) as loop:
        _ask(e, soon, e.add(ahead, e.mul(loop.index, pace)))
        row, weight, xs = e.add(v, e.mul(loop.index, stride)), e.mul(loop.index, I64(4)), []
        for c in range(0, count, 2 * lanes):
            at = e.add(row, I64(c * (2 if half else 4)))
            xs += _row(e, at, min(2 * lanes, count - c), half)
        for m in range(rows):
            w = _spread(e, e.load(_at(e, F, e.add(p, weight), 4 * room * m), align=4))
            for x, cell in zip(xs, cells[m * len(xs) : (m + 1) * len(xs)], strict=True):
                e.store(_fma(e, x, w, e.load(cell)), cell)
    for cell, place in zip(cells, places, strict=True):
        _write(e, e.load(cell), acc, place)


@_emitted(types.float32, 2)
@no_type_check
def peak(b, lanes, n, s, least):
    """The greatest of `least` and s[:n]."""
    e = Emitter(b, lanes)
    x = _spread(e, least)
    for i in range(0, n, lanes):
        x = _greater(e, _read(e, s, 4 * i), x)
    return e.extract_element(_fold(e, x, functools.partial(_greater, e)), I32(0))


@_emitted(types.float32, 2)
@no_type_check
def weigh(b, lanes, n, s, top):
    """s[:n] = 2 ** (s[:n] - top); their sum."""
    e = Emitter(b, lanes)
    top, total = _spread(e, top), e.all(0.0)
    for i in range(0, n, lanes):
        x = _exp2(e, e.fsub(_read(e, s, 4 * i), top))
        _write(e, x, s, 4 * i)
        total = e.fadd(total, x)
    return e.extract_element(_fold(e, total, e.fadd), I32(0))


@_emitted(types.float32, 1)
@no_type_check
def power(b, lanes, x):
    """2**x of x <= 0."""
    e = Emitter(b, lanes)
    return e.extract_element(_exp2(e, _spread(e, x)), I32(0))


@_emitted(types.void, 3)
@no_type_check
def widen(b, lanes, width, half, source, target, scale):
    """A row of queries, scaled, in the order of _row."""
    e = Emitter(b, lanes)

    def body(start, count):
        at = e.add(source, e.mul(start, I64(2 if half else 4)))
        for i, x in enumerate(_row(e, at, count, half)):
            _write(
                e, e.fmul(x, _spread(e, scale)), e.add(target, e.mul(start, I64(4))), 4 * lanes * i
            )

    _columns(e, width, body)


@_emitted(types.void, 3)
@no_type_check
def tidy(b, lanes, width, half, source, target):
    """A row of sums, back in the order of the model."""
    e = Emitter(b, lanes)

    def body(start, count):
        at = e.mul(start, I64(4))
        xs = _row(e, e.add(source, at), count, False)
        if half and count == 2 * lanes:
            xs = [_shuffle(e, *xs, [i // 2 + lanes * (i % 2) for i in range(2 * lanes)])]
        for i, x in enumerate(xs):
            _write(e, x, e.add(target, at), 4 * lanes * i)

    _columns(e, width, body)


@_emitted(types.void, 1)
@no_type_check
def fetch(b, nbytes, address):
    """Ask for a row from memory, before it is needed."""
    _ask(b, nbytes, address)


@_emitted(types.int64, 0)
@no_type_check
def claim(b, address):
    """The next number of a counter shared by threads."""
    return b.atomic_rmw("add", _at(b, I64, address), I64(1), "acq_rel")


@_emitted(types.CPointer(types.float32), 0)
@no_type_check
def floats(b, address):
    """An address as a pointer to float32."""
    return _at(b, F, address)
