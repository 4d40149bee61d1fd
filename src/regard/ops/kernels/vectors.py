"""Instructions of LLVM on vectors of float32, emitted one by one.

Nothing depends on LLVM's auto-vectoriser. A vector has as many lanes as the tile says, which need
not be the machine's: LLVM divides a vector that is wider than the machine's.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils
from numba.core.registry import cpu_target

from regard.ops.kernels.tiles import EXP2, LINE, STEP, Format
from regard.rates import is_made_by

FLOAT, BYTE, INT16 = ir.FloatType(), ir.IntType(8), ir.IntType(16)
INT32, INT64 = ir.IntType(32), ir.IntType(64)
ROUNDS = 12582912.0  # 1.5 * 2**23: a float32 plus this has the nearest integer in its low bits
ROUNDS_BITS = 0x4B400000  # the bits of that float32
BIAS = 127  # of a float32's exponent
MANTISSA = 23  # bits of a float32's mantissa

Value = Any  # an ir.Value: llvmlite has no types for mypy
Kind = Any  # an ir.Type
Words = Iterator[tuple[int, Value]]  # a channel, and the vector that begins with it
binding.initialize_native_asmparser()  # LLVM reads the text of `InlineAsm`


# ---- the processor that numba compiles for: `NUMBA_CPU_FEATURES` may leave out some of it --------


@functools.cache
def machine_lanes() -> int:
    """Float32 lanes of a vector of the processor: 16, 8 or 4."""
    features = machine_features()
    return 16 if "+avx512f" in features else 8 if "+avx2" in features else 4


@functools.cache
def multiplies_pairs() -> bool:
    """Whether the processor has AVX-512's instructions for products of bfloat16 pairs."""
    wanted = {"+avx512f", "+avx512bw", "+avx512dq", "+avx512vl", "+avx512bf16"}
    return wanted <= machine_features()


@functools.cache
def multiplies_words(lanes: int) -> bool:
    """Whether one instruction adds products of pairs of 16-bit integers in vectors of so many lanes
    (AVX-512's VNNI). With AVX2 it takes two, and no less time than float32."""
    return lanes == 16 and {"+avx512bw", "+avx512vnni"} <= machine_features()


@functools.cache
def memory_streams() -> int:
    """Streams as which memory is read quickest (`scattered_reads.py`): measured on an Intel Xeon
    with AMX, for which all of Intel's are taken, and on an AMD EPYC of Zen 4, as for all others."""
    return 4 if is_made_by("GenuineIntel") else 1


def machine_features() -> set[str]:
    """The features of the processor, by LLVM's names."""
    return {*cpu_target.target_context.codegen().magic_tuple()[2].split(",")}


# ------------------------------------------------------------------------------------------------


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types for mypy
    """LLVM's bfloat, which llvmlite does not have."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()
PAIRS = ir.VectorType(BFLOAT, 2 * 16)


def call(e: "Vectors", name: str, result: Kind, *values: Value) -> Value:
    """A call of an intrinsic of LLVM for x86."""
    kind = ir.FunctionType(result, [value.type for value in values])
    function = cgutils.get_or_insert_function(e.builder.module, kind, f"llvm.x86.{name}")
    return e.builder.call(function, values)


class Vectors:
    """Emits instructions where `builder` stands, on vectors of so many lanes.

    Addresses are int64 values, offsets are in bytes.
    """

    def __init__(self, builder: Any, lanes: int) -> None:
        self.builder, self.lanes = builder, lanes
        self.floats, self.words = ir.VectorType(FLOAT, lanes), ir.VectorType(INT32, lanes)

    # ---- constants and memory ----

    def constant(self, x: float) -> Value:
        """A vector with `x` in every lane."""
        return ir.Constant(self.floats, [x] * self.lanes)

    def word(self, x: int) -> Value:
        """A vector with the int32 `x` in every lane."""
        return ir.Constant(self.words, [x] * self.lanes)

    def broadcast(self, scalar: Value) -> Value:
        """A vector with a computed float32 or int32 in every lane."""
        undefined = ir.Constant(ir.VectorType(scalar.type, self.lanes), ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, INT32(0))
        return self.shuffle(first, undefined, [0] * self.lanes)

    def pointer(self, kind: Kind, address: Value, offset: Value | int = 0) -> Value:
        distance = INT64(offset) if isinstance(offset, int) else offset
        return self.builder.inttoptr(self.builder.add(address, distance), kind.as_pointer())

    def item(self, address: Value, index: Value) -> Value:
        """A pointer to one float32 of an array, in the form that LLVM vectorises loops over."""
        return self.builder.gep(self.pointer(FLOAT, address), [index])

    def read(self, address: Value, offset: Value | int = 0) -> Value:
        return self.builder.load(self.pointer(self.floats, address, offset), align=4)

    def read_words(self, address: Value, offset: Value | int = 0) -> Value:
        """A vector of int32, which may begin at any second byte."""
        return self.builder.load(self.pointer(self.words, address, offset), align=2)

    def write(self, x: Value, address: Value, offset: Value | int = 0) -> None:
        self.builder.store(x, self.pointer(x.type, address, offset), align=4)

    def advance(self, address: Value, count: Value, size: int) -> Value:
        """The address `count` items of `size` bytes further on."""
        return self.builder.add(address, self.builder.mul(count, INT64(size)))

    @contextmanager
    def loop(self, count: Value) -> Iterator[Value]:
        """A loop over 0 ... count - 1; what is emitted inside it is its body."""
        with cgutils.for_range(self.builder, count) as loop:
            yield loop.index

    def variable(self, start: Value) -> Value:
        """A vector that changes in a loop; LLVM keeps it in a register."""
        cell = cgutils.alloca_once(self.builder, start.type)
        self.builder.store(start, cell)
        return cell

    def accumulate(self, cell: Value, x: Value, y: Value) -> None:
        """cell += x y"""
        self.builder.store(self.fma(x, y, self.builder.load(cell)), cell)

    def prefetch(self, count: int, address: Value, level: int = 1) -> None:
        """Request the cache lines of `count` bytes before they are needed, for this cache (1 or 2)
        and those behind it."""
        kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), INT32, INT32, INT32])
        call = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        read, locality, data = INT32(0), INT32(4 - level), INT32(1)
        for offset in range(0, count, LINE):
            place = self.pointer(BYTE, address, offset)
            self.builder.call(call, [place, read, locality, data])

    def in_turns(self, j: Value, count: int, parts: int) -> Value:
        """The j-th of so many rows, of which equal parts are read in turns."""
        first = self.builder.mul(self.builder.urem(j, INT64(parts)), INT64(count // parts))
        return self.builder.add(first, self.builder.udiv(j, INT64(parts)))

    # ---- rows of elements ----

    def elements(self, address: Value, count: int, half: bool) -> list[Value]:
        """One or two vectors of a row as float32, in the order in which the kernel holds them.

        Two vectors of bfloat16 come as the even elements, then the odd ones: that takes a shift and
        a mask, where the order of memory would take shuffles.
        """
        b = self.builder
        if not half:
            return [self.read(address, 4 * i) for i in range(0, count, self.lanes)]
        if count == self.lanes:
            x = b.load(self.pointer(ir.VectorType(INT16, self.lanes), address), align=2)
            return [b.bitcast(b.shl(b.zext(x, self.words), self.word(16)), self.floats)]
        x = b.load(self.pointer(self.words, address), align=2)
        even, odd = b.shl(x, self.word(16)), b.and_(x, self.word(-65536))
        return [b.bitcast(y, self.floats) for y in (even, odd)]

    def columns(self, width: int, body: Callable[[Value, int], None]) -> None:
        """body(first element, elements) along a row: two vectors a step, and one for an odd rest.

        More than four steps are a loop of up to four steps each.
        """
        step = 2 * self.lanes
        steps, rest = divmod(width, step)
        unrolled = next(u for u in (4, 3, 2, 1) if steps % u == 0) if steps > 4 else max(steps, 1)
        with self.loop(INT64(steps // unrolled)) as turn:
            for u in range(unrolled if steps else 0):
                first = self.builder.mul(turn, INT64(unrolled * step))
                body(self.builder.add(first, INT64(u * step)), step)
        if rest:
            body(INT64(steps * step), rest)

    # ---- codes ----

    def dequantized(
        self, codes: Value, scales: Value, width: int, form: Format, wanted: range
    ) -> Words:
        """zero + scale * code of the wanted channels of a row of codes.

        With AVX-512 one vector holds the numbers of all 4-bit codes of a group: they are looked up.
        """
        of_groups: dict[tuple[int, ...], Any] = {}
        read = self._packed if form.bits < 8 else self._bytes
        words = read(codes, width, form, wanted)  # packed codes come by whole steps
        fit = form.bits == 4 and self.lanes == machine_lanes() == 16
        every = ir.Constant(self.floats, [float(code) for code in range(self.lanes)])
        for channel, word in (each for each in words if each[0] in wanted):
            groups = tuple((channel + i) // form.group for i in range(self.lanes))
            looked_up = fit and len({*groups}) == 1
            if groups not in of_groups:
                found = self._scale_and_zero(scales, groups)
                of_groups[groups] = self.fma(every, *found) if looked_up else found
            if looked_up:
                table = of_groups[groups]
                yield channel, call(self, "avx512.permvar.sf.512", self.floats, table, word)
            else:
                yield channel, self.fma(self.builder.sitofp(word, self.floats), *of_groups[groups])

    def _bytes(self, address: Value, _: int, form: Format, wanted: range) -> Words:
        for channel in range(wanted.start, wanted.stop, self.lanes):
            yield channel, self._unsigned(address, channel, self.lanes)

    def _packed(self, address: Value, width: int, form: Format, wanted: range) -> Words:
        """Codes of 4 or 6 bits, 32 channels at a time, and a rest of 16."""
        for first in range(wanted.start // STEP * STEP, wanted.stop, STEP):
            count, start = min(STEP, width - first), form.bytes(first)
            for channel, word in self._nibbles(address, start, count):
                if form.bits == 6:
                    high = self._high_bits(address, start + count // 2, count // 4, channel)
                    word = self.builder.or_(word, high)
                yield first + channel, word

    def _nibbles(self, address: Value, start: int, count: int) -> Words:
        """The low 4 bits of so many channels: byte i holds channels i and i + count / 2."""
        b, half = self.builder, count // 2
        for i in range(0, half, min(half, self.lanes)):
            x = self._unsigned(address, start + i, min(half, self.lanes))
            low = b.and_(x, ir.Constant(x.type, [15] * x.type.count))
            high = b.lshr(x, ir.Constant(x.type, [4] * x.type.count))
            if half < self.lanes:
                yield i, self.shuffle(low, high, range(self.lanes))
            else:
                yield i, low
                yield half + i, high

    def _high_bits(self, address: Value, start: int, quarter: int, channel: int) -> Value:
        """Bits 4 and 5 of a vector of 6-bit codes: byte i holds those of channels i, i + quarter,
        and so on, from its lowest bits up."""
        b, channels = self.builder, range(channel, channel + self.lanes)
        kind = ir.VectorType(BYTE, min(quarter, self.lanes))
        x = b.load(self.pointer(kind, address, start + channel % quarter), align=1)
        x = b.zext(self.shuffle(x, x, [i % kind.count for i in range(self.lanes)]), self.words)
        fields = b.lshr(x, ir.Constant(self.words, [2 * (i // quarter) for i in channels]))
        return b.shl(b.and_(fields, self.word(3)), self.word(4))

    def _unsigned(self, address: Value, offset: int, count: int) -> Value:
        """So many bytes as a vector of int32."""
        place = self.pointer(ir.VectorType(BYTE, count), address, offset)
        return self.builder.zext(self.builder.load(place, align=1), ir.VectorType(INT32, count))

    def _scale_and_zero(self, scales: Value, groups: tuple[int, ...]) -> tuple[Value, Value]:
        """Scale and zero, side by side in bfloat16, of the group of each lane."""
        b, first, count = self.builder, groups[0], groups[-1] - groups[0] + 1
        place = self.pointer(ir.VectorType(INT32, count), scales, 4 * first)
        x = b.load(place, align=2)
        x = self.shuffle(x, x, [group - first for group in groups])
        scale, zero = b.shl(x, self.word(16)), b.and_(x, self.word(-65536))
        return b.bitcast(scale, self.floats), b.bitcast(zero, self.floats)

    # ---- arithmetic ----

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """x y + z: rounded once where the machine has an instruction for it, otherwise twice."""
        kind = ir.FunctionType(self.floats, [self.floats] * 3)
        name = f"llvm.fmuladd.v{self.lanes}f32"
        call = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(call, [x, y, z])

    def dot_pairs(self, x: Value, y: Value, z: Value) -> Value:
        """z plus the products of the two bfloat16 elements of each of 16 lanes of x and y."""
        x, y = (self.builder.bitcast(each, PAIRS) for each in (x, y))
        return call(self, "avx512bf16.dpbf16ps.512", self.floats, z, x, y)

    def dot_words(self, x: Value, y: Value, z: Value) -> Value:
        """z plus the products of the two int16 halves of each lane of x and y, in int32."""
        kind = ir.FunctionType(self.words, [self.words] * 3)  # LLVM splits its own intrinsic in two
        x, y = (self.builder.bitcast(each, self.words) for each in (x, y))
        return self.builder.call(ir.InlineAsm(kind, "vpdpwssd $3, $2, $0", "=v,0,v,v"), [z, x, y])

    def rounded(self, x: Value) -> Value:
        """The nearest int32 of numbers of less than 2**22 in size."""
        b = self.builder
        return b.sub(
            b.bitcast(b.fadd(x, self.constant(ROUNDS)), self.words), self.word(ROUNDS_BITS)
        )

    def shuffle(self, x: Value, y: Value, lanes: Sequence[int]) -> Value:
        """The vector of these lanes; those of `y` are counted from the number of lanes of `x`."""
        chosen = ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes))
        return self.builder.shuffle_vector(x, y, chosen)

    def fold(
        self, x: Value, join: Callable[[Value, Value], Value], part: int | None = None
    ) -> Value:
        """Every group of `part` neighbouring lanes joined, the result in each of its lanes."""
        part = self.lanes if part is None else part
        while part > 1:
            part //= 2
            x = join(x, self.shuffle(x, x, [i ^ part for i in range(self.lanes)]))
        return x

    def sums(self, xs: list[Value], add: Callable[[Value, Value], Value] | None = None) -> Value:
        """The lane sums of 2**i vectors as one vector of so many lanes, by a tree of shuffles; of
        floats by default."""
        add = add or self.builder.fadd
        count, part = len(xs), self.lanes
        while len(xs) > 1:
            part //= 2
            low = [g + i for g in range(0, self.lanes, 2 * part) for i in range(part)]
            low += [self.lanes + i for i in low]
            high = [i + part for i in low]
            xs = [
                add(self.shuffle(x, y, low), self.shuffle(x, y, high))
                for x, y in zip(xs[::2], xs[1::2], strict=True)
            ]
        x = self.fold(xs[0], add, part)
        return self.shuffle(x, x, range(0, self.lanes, self.lanes // count))

    def transposed(self, rows: Sequence[Value]) -> list[Value]:
        """As many vectors as lanes, rows and columns exchanged; of fewer, each block of as many
        lanes as there are vectors."""
        count, far, rows = self.lanes, len(rows) // 2, list(rows)
        while far:
            low = [i if not i & far else count + i - far for i in range(count)]
            high = [i + far if not i & far else count + i for i in range(count)]
            for i in (i for i in range(len(rows)) if not i & far):
                x, y = rows[i], rows[i + far]
                rows[i], rows[i + far] = self.shuffle(x, y, low), self.shuffle(x, y, high)
            far //= 2
        return rows

    def maximum(self, x: Value, y: Value) -> Value:
        """The greater of each lane; `y` where one of them is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)

    def exp2(self, x: Value) -> Value:
        """2**x of x <= 0, to about an ulp; 0 below -127."""
        b = self.builder
        x, rounds = self.maximum(self.constant(float(-BIAS)), x), self.constant(ROUNDS)
        shifted = b.fadd(x, rounds)
        fraction, y = b.fsub(x, b.fsub(shifted, rounds)), self.constant(EXP2[-1])
        for coefficient in EXP2[-2::-1]:
            y = self.fma(y, fraction, self.constant(coefficient))
        exponent = b.add(b.bitcast(shifted, self.words), self.word(BIAS - ROUNDS_BITS))
        return b.fmul(y, b.bitcast(b.shl(exponent, self.word(MANTISSA)), self.floats))
