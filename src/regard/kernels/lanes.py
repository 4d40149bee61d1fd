"""Loops over the lanes of vectors, emitted for LLVM as numba intrinsics.

Nothing is left to an auto-vectoriser; LLVM splits a vector where the machine's are narrower. What
numba compiles is marked `no_type_check`: its types are LLVM's.
"""

import functools
from typing import no_type_check

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

F, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FEATURES = llvm.get_host_cpu_features()
W = 16 if FEATURES.get("avx512f") else 8 if FEATURES.get("avx2") else 4  # lanes of a vector
SUMS = 12 if W == 8 else 24  # vectors of sums that stay in registers
VEC, WORDS = ir.VectorType(F, W), ir.VectorType(I32, W)
EXP2 = [  # 2**f on [-1/2, 1/2], minimax, relative error 2**-28.9
    1.0, 0.6931472028550832, 0.24022647913626496, 0.05550332471100074,
    0.009618437357826595, 0.0013398874422279362, 0.0001535336188694808,
]  # fmt: skip

# ---- emitting: b is llvmlite's builder, addresses are int64 -----------------------------------


def _all(x, kind=VEC):
    return ir.Constant(kind, [x] * W)


def _at(b, kind, address, offset=0):
    place = b.add(address, offset if isinstance(offset, ir.Value) else I64(offset))
    return b.inttoptr(place, kind.as_pointer())


def _read(b, address, offset=0):
    return b.load(_at(b, VEC, address, offset), align=4)


def _write(b, x, address, offset=0):
    b.store(x, _at(b, x.type, address, offset), align=4)


def _fma(b, x, y, z):
    kind = ir.FunctionType(VEC, [VEC] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{W}f32"), [x, y, z])


def _shuffle(b, x, y, lanes):
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _spread(b, scalar):
    none = ir.Constant(VEC, ir.Undefined)
    return _shuffle(b, b.insert_element(none, scalar, I32(0)), none, [0] * W)


def _row(b, address, lanes, half):
    """W or 2 W elements as float32 vectors; of 2 W bfloat16 the even ones first, then the odd."""
    if not half:
        return [_read(b, address, 4 * i) for i in range(0, lanes, W)]
    if lanes == W:
        x = b.zext(b.load(_at(b, ir.VectorType(I16, W), address), align=2), WORDS)
        return [b.bitcast(b.shl(x, _all(16, WORDS)), VEC)]
    x = b.load(_at(b, WORDS, address), align=2)
    return [b.bitcast(y, VEC) for y in (b.shl(x, _all(16, WORDS)), b.and_(x, _all(-65536, WORDS)))]


def _columns(b, width, body):
    """body(first element, elements) over a row: steps of 2 W, in a loop if many, then W."""
    pairs, rest = divmod(width, 2 * W)
    unroll = next(u for u in (4, 3, 2, 1) if pairs % u == 0) if pairs > 4 else max(pairs, 1)
    with cgutils.for_range(b, I64(pairs // unroll)) as loop:
        for u in range(unroll if pairs else 0):
            body(b.add(b.mul(loop.index, I64(unroll * 2 * W)), I64(u * 2 * W)), 2 * W)
    if rest:
        body(I64(pairs * 2 * W), rest)


def _totals(b, xs):
    """The lane sums of n = 2**i vectors as one vector of n lanes, by a tree of shuffles."""
    n, part = len(xs), W
    while len(xs) > 1:
        part //= 2
        low = [g + i for g in range(0, W, 2 * part) for i in range(part)]
        low += [W + i for i in low]
        halves = [low, [i + part for i in low]]
        xs = [b.fadd(*[_shuffle(b, x, y, h) for h in halves])
              for x, y in zip(xs[::2], xs[1::2], strict=True)]  # fmt: skip
    x = _fold(b, xs[0], b.fadd, part)
    return _shuffle(b, x, x, list(range(0, W, W // n)))


def _fold(b, x, join, part=W):
    while part > 1:
        part //= 2
        x = join(x, _shuffle(b, x, x, [i ^ part for i in range(W)]))
    return x


def _greater(b, x, y):  # y where that is NaN
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _exp2(b, x):
    """2**x of x <= 0, to about an ulp; 0 below -127."""
    x, magic = _greater(b, _all(-127.0), x), _all(12582912.0)  # 1.5 * 2**23: rounds
    whole = b.fadd(x, magic)
    f, y = b.fsub(x, b.fsub(whole, magic)), _all(EXP2[-1])
    for c in EXP2[-2::-1]:
        y = _fma(b, y, f, _all(c))
    bits = b.add(b.bitcast(whole, WORDS), _all(127 - 0x4B400000, WORDS))
    return b.fmul(y, b.bitcast(b.shl(bits, _all(23, WORDS)), VEC))


def _ask(b, nbytes, address):
    byte = ir.IntType(8)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), I32, I32, I32])
    ask = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    for i in range(0, nbytes, 64):
        b.call(ask, [_at(b, byte, address, i), I32(0), I32(3), I32(1)])


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


@_emitted(types.void, 5)
@no_type_check
def dots(b, rows, keys, width, half, room, q, k, stride, j, last, s):
    """s[m, j + i] = q[m] . k[j + i] for `rows` m and `keys` i; keys past `last` repeat it."""
    cells = [cgutils.alloca_once(b, VEC) for _ in range(rows * keys)]
    for cell in cells:
        b.store(_all(0.0), cell)
    nexts = [b.add(j, I64(i)) for i in range(keys)]
    nexts = [b.select(b.icmp_signed("<", i, last), i, last) for i in nexts]
    at = [b.add(k, b.mul(i, stride)) for i in nexts]

    def body(start, lanes):
        xs = [_row(b, b.add(a, b.mul(start, I64(2 if half else 4))), lanes, half) for a in at]
        for m in range(rows):
            ys = _row(b, b.add(b.add(q, I64(4 * width * m)), b.mul(start, I64(4))), lanes, False)
            for x, cell in zip(xs, cells[m * keys : (m + 1) * keys], strict=True):
                for u, y in zip(x, ys, strict=True):
                    b.store(_fma(b, u, y, b.load(cell)), cell)

    _columns(b, width, body)
    for m in range(rows):
        x = _totals(b, [b.load(c) for c in cells[m * keys : (m + 1) * keys]])
        _write(b, x, b.add(s, b.mul(j, I64(4))), 4 * room * m)


@_emitted(types.void, 6)
@no_type_check
def gather(b, rows, lanes, width, half, room, soon, n, p, v, stride, acc, ahead, pace):
    """acc[m, :lanes] += sum over j < n of p[m, j] v[j, :lanes].

    Meanwhile `soon` bytes of each row at `ahead`, `pace` apart, are asked for from memory.
    """
    places = [4 * (width * m + c) for m in range(rows) for c in range(0, lanes, W)]
    cells = [cgutils.alloca_once(b, VEC) for _ in places]
    for cell, place in zip(cells, places, strict=True):
        b.store(_read(b, acc, place), cell)
    with cgutils.for_range(b, n) as loop:
        _ask(b, soon, b.add(ahead, b.mul(loop.index, pace)))
        row, weight, xs = b.add(v, b.mul(loop.index, stride)), b.mul(loop.index, I64(4)), []
        for e in range(0, lanes, 2 * W):
            at = b.add(row, I64(e * (2 if half else 4)))
            xs += _row(b, at, min(2 * W, lanes - e), half)
        for m in range(rows):
            w = _spread(b, b.load(_at(b, F, b.add(p, weight), 4 * room * m), align=4))
            for x, cell in zip(xs, cells[m * len(xs) : (m + 1) * len(xs)], strict=True):
                b.store(_fma(b, x, w, b.load(cell)), cell)
    for cell, place in zip(cells, places, strict=True):
        _write(b, b.load(cell), acc, place)


@_emitted(types.float32, 1)
@no_type_check
def peak(b, n, s, least):
    """The greatest of `least` and s[:n]."""
    x = _spread(b, least)
    for i in range(0, n, W):
        x = _greater(b, _read(b, s, 4 * i), x)
    return b.extract_element(_fold(b, x, functools.partial(_greater, b)), I32(0))


@_emitted(types.float32, 1)
@no_type_check
def weigh(b, n, s, top):
    """s[:n] = 2 ** (s[:n] - top); their sum."""
    top, total = _spread(b, top), _all(0.0)
    for i in range(0, n, W):
        x = _exp2(b, b.fsub(_read(b, s, 4 * i), top))
        _write(b, x, s, 4 * i)
        total = b.fadd(total, x)
    return b.extract_element(_fold(b, total, b.fadd), I32(0))


@_emitted(types.float32, 0)
@no_type_check
def power(b, x):
    """2**x of x <= 0."""
    return b.extract_element(_exp2(b, _spread(b, x)), I32(0))


@_emitted(types.void, 2)
@no_type_check
def widen(b, width, half, source, target, scale):
    """A row of queries, scaled, in the order of _row."""

    def body(start, lanes):
        at = b.add(source, b.mul(start, I64(2 if half else 4)))
        for i, x in enumerate(_row(b, at, lanes, half)):
            _write(b, b.fmul(x, _spread(b, scale)), b.add(target, b.mul(start, I64(4))), 4 * W * i)

    _columns(b, width, body)


@_emitted(types.void, 2)
@no_type_check
def tidy(b, width, half, source, target):
    """A row of sums, back in the order of the model."""

    def body(start, lanes):
        at = b.mul(start, I64(4))
        xs = _row(b, b.add(source, at), lanes, False)
        if half and lanes == 2 * W:
            xs = [_shuffle(b, *xs, [i // 2 + W * (i % 2) for i in range(2 * W)])]
        for i, x in enumerate(xs):
            _write(b, x, b.add(target, at), 4 * W * i)

    _columns(b, width, body)


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
