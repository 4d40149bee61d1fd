"""Kernels one after the other in one call, which starts its threads once.

The threads of a call go through the same kernels. A thread that finds no task left in one of them
waits until those that run it have left. It does not wait for a thread that has not begun: a later
one finds no task. `model_stepping.py` and `merging.py` call this.
"""

import ctypes
import functools
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, no_type_check

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types

from regard.compiling import compiled_from
from regard.ops.kernels import intrinsics, waiting
from regard.ops.kernels.intrinsics import emits, next_number, numbers
from regard.ops.kernels.threads import launch, yield_address
from regard.ops.kernels.tiles import LINE
from regard.ops.kernels.vectors import BYTE, INT64
from regard.ops.kernels.waiting import wait_for


class KernelCall(NamedTuple):
    """One kernel of a sequence. All are addresses, in bytes."""

    code: int  # of the machine code
    record: int  # of the record of the kernel's call
    running: int  # of an int64 counter: threads that run the kernel now
    taken: int  # of one that counts the threads that came; 0 of a kernel that all threads run, else
    # the first thread alone runs it


class Kernel(NamedTuple):
    """One kernel of a sequence, and its record."""

    code: int  # address of the machine code
    record: bytes
    alone: bool  # whether one thread runs it: it takes a microsecond or two


class Program(NamedTuple):
    """The kernels of one call."""

    number: int  # of kernels
    calls: int  # address of the `KernelCall` of each, one after the other
    pause: int  # address of a C function that lets other threads run, for one that waits


RECORD = np.dtype([(name, np.int64) for name in Program._fields])  # as the kernel reads it
PACKED = struct.Struct(f"{len(Program._fields)}q")  # the same, as Python packs it
CALL_BYTES = 8 * len(KernelCall._fields)
SIGNATURE = types.void(types.CPointer(numba.from_dtype(RECORD)))


@functools.cache
@no_type_check
def kernel() -> Any:
    """The machine code: a C function of the address of one `Program` record."""

    def sequence(data):
        program = carray(data, 1)[0]
        for i in range(program.number):
            call = numbers(program.calls + CALL_BYTES * i)
            code, record, running, taken = call[0], call[1], call[2], call[3]
            next_number(running)
            if taken == 0 or next_number(taken) == 0:
                run(code, record)
            leave(running)
            wait_for(running, 0, 0, program.pause)

    return compiled_from(sequence, SIGNATURE, intrinsics, waiting)


@emits(types.void)
@no_type_check
def run(e, code, record):
    """Call a kernel: a C function of the address of its record."""
    place = BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [place])
    function = e.builder.inttoptr(code, kind.as_pointer())
    e.builder.call(function, [e.builder.inttoptr(record, place)])


@emits(types.void)
@no_type_check
def leave(e, running):
    """Count one thread less."""
    e.builder.atomic_rmw("sub", e.pointer(INT64, running), INT64(1), "acq_rel")


@functools.cache
def address() -> int:
    """The address of the machine code."""
    return int(kernel().address)


class KernelSequence:
    """Kernels that any number of calls run one after the other, one call at a time.

    Examples:
        >>> KernelSequence([]).run(threads=1)
    """

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        sizes = (-(-len(each.record) // LINE) * LINE for each in kernels)
        self._starts = [*accumulate(sizes, initial=0)]
        self._cleared, self._records = 2 * LINE * len(kernels), lines(self._starts[-1])
        self._counters = lines(self._cleared)
        for each, start in zip(kernels, self._starts, strict=False):
            self._records[start : start + len(each.record)] = np.frombuffer(each.record, np.uint8)
        self._at, at = self._counters.ctypes.data, self._records.ctypes.data
        self._calls = np.array([
            KernelCall(each.code, at + start, running, running + LINE if each.alone else 0)
            for each, start, running in zip(
                kernels, self._starts, range(self._at, self._at + self._cleared, 2 * LINE),
                strict=False)
        ], np.int64)  # fmt: skip
        self._program = PACKED.pack(len(kernels), self._calls.ctypes.data, yield_address())

    def records(self, first: int, every: int, dtype: np.dtype[Any]) -> Any:
        """The records of the first one and every so many kernels after it; those change with this
        array. Their number is that of whole groups of so many kernels."""
        starts = self._starts[first : (len(self._starts) - 1) // every * every : every]
        apart = starts[1] - starts[0] if len(starts) > 1 else 0
        return np.ndarray((len(starts),), dtype, self._records, starts[0], (apart,))

    def run(self, threads: int) -> None:
        """Run all kernels."""
        ctypes.memset(self._at, 0, self._cleared)
        launch(address(), self._program, threads)


def lines(count: int) -> Any:
    """Memory of so many bytes, zeroed, from the start of a cache line on."""
    memory = np.zeros(count + LINE, np.uint8)
    return memory[-memory.ctypes.data % LINE :][:count]
