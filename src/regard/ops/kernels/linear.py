"""Few rows times the weight of a linear layer: the memory's bandwidth is the limit, so the weight
is read once for all rows.

    x [rows, width]      weight [outputs, width]       out [rows, outputs]

One row of the weight after the other is multiplied by up to four rows of x, whose sums are in
registers: memory is read as one stream, which is quicker than several. A task is some outputs, and
threads take tasks until none is left. A dot product adds its terms in the same order whatever the
number of rows, tasks and threads: a row has the same bits in each.
"""

import ctypes
import functools
import struct
from typing import Any, NamedTuple, no_type_check

import numba
import numpy as np
import torch
from numba import carray, types
from numba.extending import typeof_impl
from torch import Tensor

from regard.compiling import compiled_from, part
from regard.matrices import MOST_ROWS
from regard.ops.kernels import appending, encoding, intrinsics, vectors
from regard.ops.kernels.appending import put
from regard.ops.kernels.encoding import number
from regard.ops.kernels.intrinsics import (
    _type_of,
    emits,
    floats,
    machine_lanes,
    next_number,
)
from regard.ops.kernels.launching import _PLAIN, _workspace
from regard.ops.kernels.threads import launch
from regard.ops.kernels.tiles import LINE
from regard.ops.kernels.vectors import INT64

AHEAD = 1024  # bytes of weights: so far before it is read, a cache line is requested from memory
TASK = 1 << 16  # bytes of weights, about: several tasks for each thread, so that a slow core takes
# fewer


class Strip(NamedTuple):
    """The shape of the kernel's loops. Each value is a constant in its machine code."""

    lanes: int  # float32 elements of a vector: 16, 8 or 4
    half: bool  # bfloat16; otherwise float32

    @property
    def item(self) -> int:
        """Bytes of one element of x, weight, bias and out."""
        return 2 if self.half else 4


typeof_impl.register(Strip)(_type_of)


class Product(NamedTuple):
    """One call. Addresses are in bytes; tensors are contiguous."""

    rows: int
    outputs: int
    width: int  # a multiple of two vectors
    x: int  # address of [rows, width]
    weight: int  # address of [outputs, width]
    bias: int  # address of [outputs]; 0 without
    out: int  # address of [rows, outputs]
    counters: int  # address of the int64 counters of tasks and of threads
    scratch: int  # address of the threads' scratch
    scratch_bytes: int  # of a thread: products, and the rows in float32 where they are bfloat16
    block: int  # outputs of a task


RECORD = np.dtype([(name, np.int64) for name in Product._fields])  # as the kernel reads it
PACKED = struct.Struct(f"{len(Product._fields)}q")  # the same, as Python packs it
SIGNATURE = types.void(types.CPointer(numba.from_dtype(RECORD)))


class Plan(NamedTuple):
    """The compiled code for weights of one shape and dtype. It holds nothing of a tensor."""

    address: int  # of the machine code
    block: int  # outputs of a task
    tasks: int
    widened: int  # bytes of a row in float32, if it is bfloat16


@functools.cache
def plan(outputs: int, width: int, dtype: torch.dtype) -> Plan | None:
    """The plan for a weight `[outputs, width]`; None if the kernel does not read such a weight.

    A row is an even number of vectors: of the longest ones of the machine of which it is.
    """
    fitting = (n for n in (16, 8, 4) if n <= machine_lanes() and width % (2 * n) == 0)
    lanes, half = next(fitting, 0), dtype is torch.bfloat16
    if not lanes or not outputs or not width or not (half or dtype is torch.float32):
        return None
    strip = Strip(lanes, half)
    block = max(1, TASK // (strip.item * width))
    address = int(kernel(strip).address)
    return Plan(address, block, -(-outputs // block), 4 * width * half)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """`x @ weight.T + bias` in x's dtype, summed in float32, for `x [..., width]` of `MOST_ROWS`
    rows at most; None if a tensor has another dtype, size or place than the kernel reads.

    All are float32, or all bfloat16; contiguous, and on the CPU.
    """
    (outputs, width), dtype, sizes = weight.shape, weight.dtype, x.shape
    found = plan(outputs, width, dtype)
    if found is None or sizes[-1] != width or not 0 < (rows := x.numel() // width) <= MOST_ROWS:
        return None
    if not _is_readable(x, dtype) or not _is_readable(weight, dtype):
        return None
    if bias is not None and not (_is_readable(bias, dtype) and bias.shape == (outputs,)):
        return None
    address, block, tasks, widened = found
    threads = min(tasks, torch.get_num_threads())
    out, scratch = x.new_empty((*sizes[:-1], outputs)), LINE + rows * widened
    space = _workspace(LINE + threads * scratch)
    ctypes.memset(space, 0, LINE)
    bias_at = 0 if bias is None else bias.data_ptr()
    data = PACKED.pack(rows, outputs, width, x.data_ptr(), weight.data_ptr(), bias_at,
                       out.data_ptr(), space, space + LINE, scratch, block)  # fmt: skip
    launch(address, data, threads)
    return out


def _is_readable(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel may read a tensor by its address; asked at every call, as
    `place_if_readable` says."""
    if type(x) not in _PLAIN or x.dtype is not dtype or not x.is_cpu:
        return False
    dense = x.layout is torch.strided and x.is_contiguous() and not x.is_neg()
    return dense and x.data_ptr() != 0


@no_type_check
def kernel(strip: Strip) -> Any:
    """The machine code: a C function of the address of one `Product` record."""

    def product(data):
        call = carray(data, 1)[0]
        sums = call.scratch + next_number(call.counters + 8) * call.scratch_bytes
        rows = rows_as_floats(strip, call, sums + LINE)
        while True:
            first = next_number(call.counters) * call.block
            if first >= call.outputs:
                break
            for i in range(first, min(first + call.block, call.outputs)):
                multiply(strip, call, rows, i, sums)
                store(strip, call, i, sums)

    return compiled_from(product, SIGNATURE, appending, encoding, intrinsics, vectors)


@part
@no_type_check
def rows_as_floats(strip, call, target):
    """The address of the rows in float32, in the order of `Vectors.elements`."""
    if not strip.half:
        return call.x
    for r in range(call.rows):
        widen(strip, call.x + 2 * r * call.width, call.width, target + 4 * r * call.width)
    return target


@part
@no_type_check
def multiply(strip, call, rows, i, sums):
    """sums[r] = rows[r] . weight[i] for all rows, four, two or one of them at a time."""
    r, weight = 0, call.weight + strip.item * i * call.width
    while r + 4 <= call.rows:
        dots_of_four(strip, rows + 4 * r * call.width, weight, call.width, sums + 4 * r)
        r += 4
    if r + 2 <= call.rows:
        dots_of_two(strip, rows + 4 * r * call.width, weight, call.width, sums + 4 * r)
        r += 2
    if r < call.rows:
        dots_of_one(strip, rows + 4 * r * call.width, weight, call.width, sums + 4 * r)


@part
@no_type_check
def store(strip, call, i, sums):
    """out[r, i] = sums[r] + bias[i], rounded once."""
    for r in range(call.rows):
        total = floats(sums)[r]
        if call.bias != 0:
            total += number(call.bias, i, strip.half)
        put(call.out, r * call.outputs + i, total, strip.half)


@emits(types.void)
@no_type_check
def widen(e, strip, source, width, target):
    """target[:] = source[:] in float32, in the order of `Vectors.elements`."""
    count = 2 * e.lanes
    with e.loop(e.builder.udiv(width, INT64(count))) as turn:
        first = e.builder.mul(turn, INT64(count))
        xs = e.elements(e.advance(source, first, strip.item), count, strip.half)
        for i, x in enumerate(xs):
            e.write(x, e.advance(target, first, 4), 4 * e.lanes * i)


@no_type_check
def _dots(e, strip, rows, x, weight, width, sums):
    """sums[r] = x[r] . weight of so many rows. Each sum is two vectors, added at the end."""
    b, count = e.builder, 2 * e.lanes
    cells = [[e.variable(e.constant(0.0)) for _ in range(2)] for _ in range(rows)]
    with e.loop(b.udiv(width, INT64(count))) as turn:
        at = b.mul(turn, INT64(count))
        start = e.advance(weight, at, strip.item)
        e.prefetch(LINE, b.add(start, INT64(AHEAD)))
        ws = e.elements(start, count, strip.half)
        for r, pair in enumerate(cells):
            ys = e.elements(e.advance(x, b.add(at, b.mul(width, INT64(r))), 4), count, False)
            for w, y, cell in zip(ws, ys, pair, strict=True):
                e.accumulate(cell, w, y)
    e.write(e.sums([b.fadd(*map(b.load, pair)) for pair in cells]), sums)


@emits(types.void)
@no_type_check
def dots_of_one(e, strip, x, weight, width, sums):
    """`_dots` of one row."""
    _dots(e, strip, 1, x, weight, width, sums)


@emits(types.void)
@no_type_check
def dots_of_two(e, strip, x, weight, width, sums):
    """`_dots` of two rows."""
    _dots(e, strip, 2, x, weight, width, sums)


@emits(types.void)
@no_type_check
def dots_of_four(e, strip, x, weight, width, sums):
    """`_dots` of four rows: AVX2's sixteen registers hold their sums."""
    _dots(e, strip, 4, x, weight, width, sums)
