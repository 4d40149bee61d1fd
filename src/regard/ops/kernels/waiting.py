"""Counters that the threads of a call share, and waiting for them, as intrinsics of numba."""

from typing import no_type_check

from llvmlite import ir
from numba import types
from numba.core import cgutils

from regard.ops.kernels.intrinsics import emits
from regard.ops.kernels.vectors import INT32, INT64

SPINS = 4096  # turns of a loop that waits, some microseconds: tasks of threads that run end sooner


@emits(types.int64)
@no_type_check
def current_number(e, address):
    """The number in a counter that other threads change."""
    return e.builder.load_atomic(e.pointer(INT64, address), "acquire", 8)


@emits(types.void)
@no_type_check
def wait_for(e, counter, least, most, pause):
    """Return when a counter that other threads change is between `least` and `most`. After `SPINS`
    turns of the loop, call the function at the address `pause`, which lets other threads run:
    one of them may have the tasks that are waited for."""
    b = e.builder
    spins = cgutils.alloca_once_value(b, INT64(0))
    begin, turn, done = (b.append_basic_block(name) for name in ("wait", "turn", "done"))
    b.branch(begin)
    b.position_at_end(begin)
    now = b.load_atomic(e.pointer(INT64, counter), "acquire", 8)
    inside = b.and_(b.icmp_signed(">=", now, least), b.icmp_signed("<=", now, most))
    b.cbranch(inside, done, turn)
    b.position_at_end(turn)
    count = b.add(b.load(spins), INT64(1))
    b.store(count, spins)
    long = b.and_(b.icmp_signed(">", count, INT64(SPINS)), b.icmp_signed("!=", pause, INT64(0)))
    with b.if_then(long, likely=False):
        kind = ir.FunctionType(INT32, [])
        b.call(b.inttoptr(pause, kind.as_pointer()), [])
    b.branch(begin)
    b.position_at_end(done)
