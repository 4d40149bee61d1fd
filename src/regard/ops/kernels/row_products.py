"""Products of few rows with the weights of linear layers: the memory's bandwidth is the limit, so
each weight is read once for all rows.

    x [rows, width]      weight [outputs, width]       out [rows, outputs]

A task is some outputs: one row of the weight after the other is multiplied by up to four rows of x,
whose sums are in registers. An Intel Xeon with AMX reads memory quicker as four streams than as
one: there outputs of four parts of a task are multiplied at once. An AMD EPYC of Zen 4 does not.
Each thread has a share of the tasks that lie side by side, and then takes what is left of the
others'. A dot product adds its terms in the same order whatever the number of rows, tasks and
threads: a row has the same bits in each.

One call runs a chain of products. A product may norm its rows first (RMSNorm, arXiv:1910.07467), be
gated by the activation of another one (arXiv:2002.05202), and be added to other rows. It may wait
for the one before it, whose results are its rows. `chaining.py` calls this.
"""

import functools
import math
import struct
from typing import Any, NamedTuple, no_type_check

import numba
import numpy as np
from numba import carray, types
from numba.extending import typeof_impl

from regard.compiling import compiled_from, part
from regard.ops.kernels import appending, encoding, intrinsics, vectors, waiting
from regard.ops.kernels.appending import put
from regard.ops.kernels.encoding import number
from regard.ops.kernels.intrinsics import _type_of, emits, floats, next_number
from regard.ops.kernels.tiles import LINE
from regard.ops.kernels.vectors import INT32, INT64
from regard.ops.kernels.waiting import current_number, wait_for

SILU, GELU, GELU_TANH = 1, 2, 3  # the activation of a gate
ROOT_HALF = math.sqrt(0.5)  # GELU(x) = x / 2 (1 + erf(x sqrt(1/2))), and about x / 2 (1 + tanh(
TANH_FACTOR, TANH_CUBE = math.sqrt(2 / math.pi), 0.044715  # sqrt(2/pi) (x + 0.044715 x**3)))


class Strip(NamedTuple):
    """The shape of the kernel's loops. Each value is a constant in its machine code."""

    lanes: int  # float32 elements of a vector: 16, 8 or 4
    half: bool  # weights are bfloat16; otherwise float32
    streams: int  # of memory, 1 or 4: outputs of a task whose weights are read at once

    @property
    def request(self) -> tuple[int, int]:
        """So many bytes before weights are read, they are requested from memory for this cache; 0
        without requests. An AMD EPYC of Zen 4 reads float32 quicker by far requests to the second
        cache, at the memory's speed (`step_shares.py`), and bfloat16 quicker without any."""
        if self.streams > 1:
            return 2048, 1
        if self.lanes < 16:
            return 1024, 1
        return (0, 0) if self.half else (3072, 2)

    @property
    def item(self) -> int:
        """Bytes of one element of a weight."""
        return 2 if self.half else 4


typeof_impl.register(Strip)(_type_of)


class Stage(NamedTuple):
    """One product of a chain, which is the same in each of its calls. Weights are contiguous, and
    their addresses are in bytes; rows are the numbers of their places in `Chain`."""

    outputs: int
    width: int  # a multiple of two vectors
    x: int  # place of [rows, width]
    x_wide: int  # whether they are float32, where weights are bfloat16
    norm: int  # address of the norm's weight [width]; 0 without
    shift: float  # added to the norm's weight
    eps: float  # of the norm
    weight: int  # address of [outputs, width]
    bias: int  # address of [outputs]; 0 without
    gate: int  # address of the gate's weight [outputs, width]; 0 without
    gate_bias: int  # address of [outputs]; 0 without
    activation: int  # of the gate
    added: int  # place of [rows, outputs], added to the products; 0 without
    added_wide: int  # whether they are float32, where weights are bfloat16
    out: int  # place of [rows, outputs]
    out_wide: int  # whether they are float32, where weights are bfloat16
    block: int  # outputs of a task
    awaited: int  # tasks of the product before, which is finished first; 0 without waiting


class Chain(NamedTuple):
    """One call. Addresses are in bytes; rows are contiguous."""

    stages: int  # products of the chain
    rows: int
    threads: int  # that run the call
    counters: int  # address of int64 counters, a cache line for each: of threads; for each product
    # of tasks finished, and of those begun of each thread's share
    scratch: int  # address of the threads' scratch
    scratch_bytes: int  # of a thread: a line of sums, the gates of a task, the rows in float32
    rows_at: int  # bytes of the scratch before the rows
    pause: int  # address of a C function that lets other threads run, for one that waits


MOST_STAGES, MOST_PLACES = 3, 6
_FLOATS = ("shift", "eps")
_STAGE = np.dtype([(name, np.float64 if name in _FLOATS else np.int64) for name in Stage._fields])
RECORD = np.dtype(  # as the kernel reads it
    [(name, np.int64) for name in Chain._fields]
    + [("places", np.int64, (MOST_PLACES,)), ("each", _STAGE, (MOST_STAGES,))]
)
# The same, as Python packs it: a call and its places, of which the first is none; each product.
PACKED = struct.Struct(f"{len(Chain._fields) + MOST_PLACES}q")
PACKED_STAGE = struct.Struct("".join("d" if name in _FLOATS else "q" for name in Stage._fields))
SIGNATURE = types.void(types.CPointer(numba.from_dtype(RECORD)))


@functools.cache
@no_type_check
def kernel(strip: Strip) -> Any:
    """The machine code: a C function of the address of one call's record."""

    def chain(data):
        call = carray(data, 1)[0]
        thread, of_stage = next_number(call.counters), LINE * (1 + call.threads)
        sums = call.scratch + thread * call.scratch_bytes
        for s in range(call.stages):
            stage, finished = call.each[s], call.counters + LINE + s * of_stage
            if stage.awaited != 0:  # each thread counts tasks that it has begun: none waits for a
                # thread that does not run
                wait_for(finished - of_stage, stage.awaited, stage.awaited, call.pause)
            rows = rows_as_floats(strip, call, stage, sums + call.rows_at)
            for turn in range(call.threads):
                share = (thread + turn) % call.threads
                multiply_share(strip, call, stage, rows, share, finished, sums)

    return compiled_from(chain, SIGNATURE, appending, encoding, intrinsics, vectors, waiting)


@part
@no_type_check
def rows_as_floats(strip, call, stage, target):
    """The address of the rows in float32, normed, in the order of `Vectors.elements`."""
    x, width = call.places[stage.x], stage.width
    if not strip.half and stage.norm == 0:
        return x
    for r in range(call.rows):
        row, first = target + 4 * r * width, r * width
        if strip.half and not stage.x_wide:
            widen(strip, x + 2 * first, width, row)
        else:
            reorder(strip, x + 4 * first, width, row)
        if stage.norm != 0:
            mean = square_sum(strip, row, width) / np.float32(width)
            factor = np.float32(1) / np.float32(math.sqrt(mean + np.float32(stage.eps)))
            scale(strip, row, width, factor, stage.norm, np.float32(stage.shift))
    return target


@part
@no_type_check
def multiply_share(strip, call, stage, rows, share, finished, sums):
    """The tasks of a thread's share that are left, one after the other."""
    tasks = (stage.outputs + stage.block - 1) // stage.block
    each = (tasks + call.threads - 1) // call.threads
    first, begun = share * each, finished + LINE * (1 + share)
    count = min(each, tasks - first)
    while current_number(begun) < count:
        taken = next_number(begun)
        if taken < count:
            multiply_task(strip, call, stage, rows, (first + taken) * stage.block, sums)
            next_number(finished)


@part
@no_type_check
def multiply_task(strip, call, stage, rows, start, sums):
    """The outputs of a task; those of the gate first."""
    stop, gates = min(start + stage.block, stage.outputs), floats(sums + LINE)
    added, out = call.places[stage.added], call.places[stage.out]
    half_added, half_out = strip.half and not stage.added_wide, strip.half and not stage.out_wide
    several = strip.streams if call.rows < 4 else (strip.streams + 1) // 2  # for want of registers
    apart, rest = (stop - start) // several, (stop - start) % several
    for gated in (True, False):
        weight, bias = (stage.gate, stage.gate_bias) if gated else (stage.weight, stage.bias)
        for turn in range(apart + rest if weight != 0 else 0):
            count = several if turn < apart else 1
            first = start + turn if turn < apart else start + turn + (several - 1) * apart
            multiply(strip, call.rows, rows, stage.width, weight, first, apart, count, sums)
            for at in range(count * call.rows):
                i, r = first + at // call.rows * apart, at % call.rows
                x, gate = biased(strip, floats(sums)[at], bias, i), (i - start) * call.rows + r
                if gated:
                    gates[gate] = activated(stage.activation, x)
                    continue
                if stage.gate != 0:
                    x *= gates[gate]
                place = r * stage.outputs + i
                if added != 0:
                    x += number(added, place, half_added)
                put(out, place, x, half_out)


@part
@no_type_check
def biased(strip, x, bias, i):
    """A sum with the bias of its output, if there is one."""
    if bias != 0:
        x += number(bias, i, strip.half)
    return x


@part
@no_type_check
def activated(activation, x):
    """The activation of one gate."""
    if activation == SILU:
        return x / (np.float32(1) + np.float32(math.exp(-x)))
    if activation == GELU:
        return x * np.float32(0.5) * np.float32(1 + math.erf(x * np.float32(ROOT_HALF)))
    inner = np.float32(TANH_FACTOR) * (x + np.float32(TANH_CUBE) * x * x * x)
    return x * np.float32(0.5) * np.float32(1 + math.tanh(inner))


@no_type_check
def _along(e, width):
    """A loop along a row, two vectors at a time; yields the index of their first element."""
    return e.loop(e.builder.udiv(width, INT64(2 * e.lanes)))


@emits(types.void)
@no_type_check
def widen(e, strip, source, width, target):
    """target[:] = source[:] in float32, in the order of `Vectors.elements`."""
    count = 2 * e.lanes
    with _along(e, width) as turn:
        first = e.builder.mul(turn, INT64(count))
        xs = e.elements(e.advance(source, first, strip.item), count, strip.half)
        for i, x in enumerate(xs):
            e.write(x, e.advance(target, first, 4), 4 * e.lanes * i)


@emits(types.void)
@no_type_check
def reorder(e, strip, source, width, target):
    """target[:] = source[:], both float32, in the order of `Vectors.elements` of the weights."""
    count = 2 * e.lanes
    with _along(e, width) as turn:
        first = e.builder.mul(turn, INT64(count))
        xs = e.elements(e.advance(source, first, 4), count, False)
        xs = [e.shuffle(*xs, range(i, count, 2)) for i in (0, 1)] if strip.half else xs
        for i, x in enumerate(xs):
            e.write(x, e.advance(target, first, 4), 4 * e.lanes * i)


@emits(types.float32)
@no_type_check
def square_sum(e, strip, row, width):
    """The sum of the squares of a row of float32."""
    cell, count = e.variable(e.constant(0.0)), 2 * e.lanes
    with _along(e, width) as turn:
        for x in e.elements(e.advance(row, e.builder.mul(turn, INT64(count)), 4), count, False):
            e.accumulate(cell, x, x)
    return e.builder.extract_element(e.fold(e.builder.load(cell), e.builder.fadd), INT32(0))


@emits(types.void)
@no_type_check
def scale(e, strip, row, width, factor, weight, shift):
    """row[:] *= factor * (weight[:] + shift), a row of float32 in the order of the weights."""
    b, count, factor, shift = e.builder, 2 * e.lanes, e.broadcast(factor), e.broadcast(shift)
    with _along(e, width) as turn:
        first = b.mul(turn, INT64(count))
        place = e.advance(row, first, 4)
        xs = e.elements(place, count, False)
        ws = e.elements(e.advance(weight, first, strip.item), count, strip.half)
        for i, (x, w) in enumerate(zip(xs, ws, strict=True)):
            e.write(b.fmul(b.fmul(x, factor), b.fadd(w, shift)), place, 4 * e.lanes * i)


@emits(types.void)
@no_type_check
def multiply(e, strip, rows, x, width, weight, first, apart, outputs, sums):
    """sums[k, r] = x[r] . weight[first + k apart] of all rows, four, two or one of them at a time,
    and so many outputs."""
    b = e.builder
    place, apart = e.advance(weight, b.mul(first, width), strip.item), b.mul(apart, width)
    for several in (n for n in (1, 2, 4) if n <= strip.streams):
        with b.if_then(b.icmp_signed("==", outputs, INT64(several))):
            done = INT64(0)
            for together in (t for t in (4, 2, 1) if t * several <= 8):  # for want of registers
                with e.loop(b.udiv(b.sub(rows, done), INT64(together))) as turn:
                    r = b.add(done, b.mul(turn, INT64(together)))
                    xs, at = e.advance(x, b.mul(r, width), 4), e.advance(sums, r, 4)
                    found = _dots(e, strip, together, several, xs, place, width, apart)
                    for k, dots in enumerate(found):
                        e.write(dots, e.advance(at, b.mul(rows, INT64(k)), 4))
                done = b.and_(rows, INT64(-together))


@no_type_check
def _dots(e, strip, rows, outputs, x, weight, width, apart):
    """x[r] . weight[k apart], in elements, of so many rows for each of so many outputs k. Each sum
    is two vectors, added at the end."""
    b, count, zero = e.builder, 2 * e.lanes, e.constant(0.0)
    ahead, level = strip.request
    cells = [[[e.variable(zero) for _ in "ab"] for _ in range(rows)] for _ in range(outputs)]
    with _along(e, width) as turn:
        at, ws = b.mul(turn, INT64(count)), []
        for k in range(outputs):
            start = e.advance(weight, b.add(at, b.mul(apart, INT64(k))), strip.item)
            if ahead:
                e.prefetch(count * strip.item, b.add(start, INT64(ahead)), level=level)
            ws.append(e.elements(start, count, strip.half))
        for r in range(rows):
            ys = e.elements(e.advance(x, b.add(at, b.mul(width, INT64(r))), 4), count, False)
            for k in range(outputs):
                for w, y, cell in zip(ws[k], ys, cells[k][r], strict=True):
                    e.accumulate(cell, w, y)
    return [e.sums([b.fadd(*map(b.load, pair)) for pair in pairs]) for pairs in cells]
