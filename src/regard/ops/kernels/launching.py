"""Running a kernel: torch's tensors as addresses, memory to work in, and torch's own threads."""

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

from regard.ops.kernels.decoding import kernel
from regard.ops.kernels.intrinsics import machine_lanes
from regard.ops.kernels.tiles import LINE, PACKED, Arguments, Tile, tile_for

LOG2E = math.log2(math.e)  # the kernel computes powers of 2; in float64, rounded with the scale
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
    """Attention of q `[B, G, M, D]` over k `[B, G, S, D]` and v `[B, G, S, Dv]`.

    Returns the output `[B, G, M, Dv]` and the log-sum-exps `[B, G, M]`, both float32. Without `v`,
    the values are the first `width` columns of the keys. `bias` is float32, broadcasts to
    `[B, G, M, S]`, and hides where it is -inf. `lanes` is the length of a vector, the machine's by
    default. Widths are multiples of the lanes (of twice as many for `width` in bfloat16); last
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
    out_at = _place("out", out, torch.float32, out.shape)[0]
    lse_at = lse.data_ptr()  # as plain as `out`, since both were made in the same way
    half, joined, biased = dtype is torch.bfloat16, v is None, bias is not None
    tile, address = _compiled(m, d, dv, half, joined, biased, lanes)
    threads = torch.get_num_threads()
    ranges, range_keys = tile.ranges(s, b * g, threads)
    threads = min(threads, b * g * ranges)
    memory = _memory(tile, m, b * g, ranges, threads)
    data = Arguments(b, g, m, s, *q_at, *k_at, *v_at, *bias_at, out_at, lse_at, *memory,
                     ranges, range_keys, scale * LOG2E)  # fmt: skip
    _launch(address, PACKED.pack(*data), threads)
    return out, lse


def _memory(tile: Tile, rows: int, heads: int, ranges: int, threads: int) -> tuple[int, int, int]:
    """Addresses in one workspace: the counters, all zero; the parts; the scratch."""
    padded = tile.padded(rows)
    counters = -(-8 * (heads + 2) // LINE) * LINE  # int64: tasks, threads, finished tasks of a head
    parts = heads * ranges * padded * tile.part_bytes
    start = _workspace(counters + parts + threads * padded * tile.scratch_bytes)
    ctypes.memset(start, 0, counters)
    return start, start + counters, start + counters + parts


@functools.cache
def _compiled(
    rows: int, width: int, value_width: int, half: bool, joined: bool, biased: bool, lanes: int
) -> tuple[Tile, int]:
    """The tile for so many rows, and the address of its machine code."""
    tile = tile_for(rows, width, value_width, half, joined, biased, lanes)
    return tile, int(kernel(tile).address)


def _check_sizes(
    keys: int, width: int, value_width: int, dtype: torch.dtype, *, joined: bool, lanes: int
) -> None:
    if dtype is not torch.float32 and dtype is not torch.bfloat16:
        _refuse(f"its elements are float32 or bfloat16, got {dtype}")
    if keys < 1:
        _refuse("it needs at least one key")
    if width % lanes or value_width % lanes or width < 1 or value_width < 1:
        _refuse(f"its widths are multiples of {lanes}, got {width} and {value_width}")
    if joined and value_width > width:
        _refuse(f"values within keys are no wider than the keys, got {value_width} of {width}")


Place = tuple[int, int, int, int]  # an address; the strides of batch, heads and rows
_PLAIN = (Tensor, torch.nn.Parameter)


def _place(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Place:
    """A tensor's address and strides, once it is certain that the kernel may use them.

    The kernel reads and writes by address: a wrong one crashes the interpreter or yields wrong
    results. So this is checked at every call, with `python -O` too. Of a tensor without memory of
    its own (batched, fake, sparse) torch itself refuses the address.
    """
    if type(x) not in _PLAIN or not x.is_cpu or x.is_neg():
        _refuse(f"{name} is no plain tensor on the CPU, but a {type(x).__name__} on {x.device}")
    if x.dtype is not dtype or x.shape != shape:
        _refuse(f"{name} must be {dtype} {tuple(shape)}, got {x.dtype} {tuple(x.shape)}")
    address, strides = x.data_ptr(), x.stride()
    if strides[-1] != 1 and shape[-1] != 1:
        _refuse(f"the last dimension of {name} has stride {strides[-1]}, not 1")
    if not address:
        _refuse(f"{name} {tuple(shape)} has no memory")
    return address, strides[0], strides[1], strides[2]


def _refuse(why: str) -> NoReturn:
    raise AssertionError(f"this must not reach the decoding kernel: {why}")


def _workspace(count: int) -> int:
    """The address of so many bytes, the start of a cache line; each calling thread has its own.

    It is NumPy's memory, so that no default, mode or transform of torch affects it.
    """
    size, address, _ = getattr(_local, "space", (0, 0, None))
    if size < count:
        memory = np.empty(count + LINE, np.uint8)
        address = -(-memory.ctypes.data // LINE) * LINE
        _local.space = count, address, memory
    return address


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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _launch(address: int, data: bytes, threads: int) -> None:
    """Run a kernel on several threads; each takes tasks until none is left."""
    run, openmp = _callable(address), _openmp()
    if threads > 1 and openmp is not None and not _forked:
        openmp(address, data, threads, 0)
        return
    others = [_pool(threads - 1).submit(run, data) for _ in range(threads - 1)]
    run(data)
    for other in others:
        other.result()
