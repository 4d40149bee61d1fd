"""Running a kernel on torch's own threads, on tensors as they lie in memory."""

import ctypes
import functools
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from regard.ops.kernels.decoding import ARGUMENTS, compiled
from regard.ops.kernels.lanes import machine_lanes

KEYS_A_TASK = 256  # at least; fewer are not worth a merge
TASKS_A_THREAD = 4  # so that a slow core does less
LINE = 64  # bytes of a cache line
LOG2E = math.log2(math.e)  # the kernel's powers are of 2
_local = threading.local()


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    scale: float,
    bias: Tensor | None = None,
    width: int | None = None,
    lanes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """q `[B, G, M, D]`, k `[B, G, S, D]`, v `[B, G, S, Dv]` -> out `[B, G, M, Dv]` and lse
    `[B, G, M]`, both float32.

    Without `v`, the values are the first `width` columns of the keys. `bias` is float32, broadcasts
    to `[B, G, M, S]`, and hides where it is -inf. `lanes` is the length of a vector, the machine's
    if not given. Widths are multiples of the lanes (of twice as many for `width` in bfloat16); last
    dimensions are contiguous; S > 0.
    """
    (b, g, m, d), s, dtype = q.shape, k.shape[2], k.dtype
    lanes = machine_lanes() if lanes is None else lanes
    dv = (width or d) if v is None else v.shape[3]
    _check_sizes(s, d, dv, dtype, joined=v is None, lanes=lanes)
    q_at, k_at = _place("q", q, dtype, (b, g, m, d)), _place("k", k, dtype, (b, g, s, d))
    v_at = k_at if v is None else _place("v", v, dtype, (b, g, s, dv))
    bias_at: Place = (0, 0, 0, 0)
    if bias is not None:
        bias_at = _place("bias", bias.expand(b, g, m, s), torch.float32, (b, g, m, s))
    out = torch.empty(b, g, m, dv, dtype=torch.float32, device="cpu")
    lse = torch.empty(b, g, m, dtype=torch.float32, device="cpu")
    rows, room, address = compiled(
        m, d, dv, dtype is torch.bfloat16, v is None, bias is not None, lanes
    )
    threads, pairs = torch.get_num_threads(), b * g
    splits = max(1, min(TASKS_A_THREAD * threads // pairs, s // KEYS_A_TASK))
    chunk = -(-s // (splits * room)) * room
    splits = -(-s // chunk)
    threads = min(threads, pairs * splits)
    padded = -(-m // rows) * rows
    counters = -(-8 * (pairs + 2) // LINE) * LINE
    parts = 4 * pairs * splits * padded * (dv + 2 * lanes)
    space = _workspace(counters + parts + 4 * threads * padded * (d + room))
    ctypes.memset(space, 0, counters)
    # fmt: off
    data = ARGUMENTS.pack(
        b, g, m, s, *q_at, *k_at, *v_at, *bias_at, _place("out", out, torch.float32, out.shape)[0],
        _place("lse", lse, torch.float32, lse.shape)[0], space, space + counters,
        space + counters + parts, splits, chunk, ctypes.c_float(scale * LOG2E).value,
    )
    # fmt: on
    _launch(address, data, threads)
    return out, lse


def _check_sizes(
    keys: int, width: int, value_width: int, dtype: torch.dtype, *, joined: bool, lanes: int
) -> None:
    if dtype is not torch.float32 and dtype is not torch.bfloat16:
        _refuse(f"its numbers are float32 or bfloat16, got {dtype}")
    if keys < 1:
        _refuse("it needs a key")
    if width % lanes or value_width % lanes or width < 1 or value_width < 1:
        _refuse(f"its widths are multiples of {lanes}, got {width} and {value_width}")
    if joined and value_width > width:
        _refuse(f"values in the keys are no wider than these, got {value_width} of {width}")


Place = tuple[int, int, int, int]  # address, and how far apart batches, heads and rows are
_PLAIN = (Tensor, torch.nn.Parameter)


def _place(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Place:
    """Where a tensor lies in memory, once it is certain that the kernel may go there.

    The kernel reads and writes by address: what it believes of memory and is not so would crash
    the interpreter or be a wrong number. So this is checked at every call, with `python -O` too.
    Tensors without memory of their own (batched, fake, sparse) have no address: torch raises.
    """
    if type(x) not in _PLAIN or not x.is_cpu or x.is_neg():
        _refuse(f"{name} is no plain tensor on the CPU, but a {type(x).__name__} on {x.device}")
    if x.dtype is not dtype or x.shape != shape:
        _refuse(f"{name} is to be {dtype} {tuple(shape)}, got {x.dtype} {tuple(x.shape)}")
    address, strides = x.data_ptr(), x.stride()
    if strides[-1] != 1 and shape[-1] != 1:
        _refuse(f"numbers in the last dimension of {name} are {strides[-1]} apart, not 1")
    if not address:
        _refuse(f"{name} {tuple(shape)} has no memory")
    return address, strides[0], strides[1], strides[2]


def _refuse(why: str) -> NoReturn:
    raise AssertionError(f"this must not reach the decoding kernel: {why}")


def _workspace(count: int) -> int:
    """The address of so many bytes, the start of a cache line; kept by each thread of the caller.

    It is numpy's memory, so that no default, mode or transform of torch has a part in it.
    """
    size, address, _ = getattr(_local, "space", (0, 0, None))
    if size < count:
        memory = np.empty(count + LINE, np.uint8)
        address = -(-memory.ctypes.data // LINE) * LINE
        _local.space = count, address, memory
    return address


@functools.cache
def _openmp() -> Callable[..., None] | None:
    """torch's own OpenMP threads, already there and awake; None if they are not GNU's."""
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
    return ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)  # lets go of the interpreter's lock


_forked = False


def _after_fork() -> None:
    """A forked child has none of its parent's threads. OpenMP would wait for them for ever, so the
    child uses new threads of Python's."""
    global _forked
    _forked = True
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _launch(address: int, data: bytes, threads: int) -> None:
    """Run a kernel on several threads; each claims tasks until none is left."""
    run, openmp = _callable(address), _openmp()
    if threads > 1 and openmp is not None and not _forked:
        openmp(address, data, threads, 0)
        return
    others = [_pool(threads - 1).submit(run, data) for _ in range(threads - 1)]
    run(data)
    for other in others:
        other.result()
