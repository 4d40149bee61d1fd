"""The threads that run a kernel: torch's own where GNU's OpenMP runs them, else Python's.

torch's threads spin for some milliseconds after each operation, and a call ends when all of them
have. Threads of regard's own, which a call would not wait for, were measured and are slower: they
compete with the spinning ones for the cores. So they are used only where there is no other way.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch


def launch(address: int, data: bytes, threads: int) -> None:
    """Run a kernel on several threads; each takes tasks until none is left."""
    run, openmp = _callable(address), _openmp()
    if threads > 1 and openmp is not None and not _forked:
        openmp(address, data, threads, 0)
        return
    others: list[Future[None]] = [Future() for _ in range(threads - 1)]
    with suppress(RuntimeError):  # no thread can be started: this one takes all tasks
        for other in others:
            _pool(threads - 1).submit(_help, run, data, other)
    run(data)
    for other in others:
        if not other.cancel():  # a thread that has not begun is not waited for, and will not begin
            other.result()


@functools.cache
def yield_address() -> int:
    """The address of the system's C function that lets other threads run on this processor; 0 where
    there is none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
    except (OSError, AttributeError, TypeError):  # Windows
        return 0


def _help(run: Callable[[bytes], None], data: bytes, begun: "Future[None]") -> None:
    """Run tasks in another thread, unless the call is over: its memory may be in other use then."""
    if begun.set_running_or_notify_cancel():
        run(data)
        begun.set_result(None)


@functools.cache
def _openmp() -> Callable[..., None] | None:
    """GNU's function that runs code on torch's OpenMP threads; None where torch has another OpenMP.

    These threads exist already, and wait in a loop for work: starting them costs microseconds.
    """
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            run = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint]
        run.restype = None
        return run
    return None


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


@functools.cache
def _callable(address: int) -> Callable[[bytes], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)  # releases the interpreter's lock


_forked = False


def _after_fork() -> None:
    """A forked child has none of its parent's threads, and OpenMP would wait for them for ever. So
    the child uses new threads of Python."""
    global _forked
    _forked = True
    _pool.cache_clear()


def _never(**functions: Callable[[], None]) -> None:
    """The registration on a system that does not fork."""


getattr(os, "register_at_fork", _never)(after_in_child=_after_fork)
