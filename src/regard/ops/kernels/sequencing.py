"""Kernels one after the other in one call: a step of a whole model starts its threads once.

The threads of a call go through the same kernels. A thread that finds no task left in one of them
waits until those that run it have left. It does not wait for a thread that has not begun: a later
one finds no task. `model_stepping.py` calls this.
"""

import functools
import struct
from typing import Any, NamedTuple, no_type_check

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types

from regard.compiling import compiled_from
from regard.ops.kernels import intrinsics, waiting
from regard.ops.kernels.intrinsics import emits, next_number, numbers
from regard.ops.kernels.vectors import BYTE, INT64
from regard.ops.kernels.waiting import wait_for


class KernelCall(NamedTuple):
    """One kernel of a sequence. All are addresses, in bytes."""

    code: int  # of the machine code
    record: int  # of the record of the kernel's call
    running: int  # of an int64 counter: threads that run the kernel now
    taken: int  # of one that counts the threads that came; 0 of a kernel that all threads run, else
    # the first thread alone runs it


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
