"""Running a kernel on torch's own threads, on tensors as they lie in memory."""

import ctypes
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.kernels.decoding import ARGUMENTS, LOG2E, compiled
from regard.kernels.lanes import W

KEYS_A_TASK = 256  # at least; fewer are not worth a merge
TASKS_A_THREAD = 4  # so that a slow core does less
_local = threading.local()


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    scale: float,
    bias: Tensor | None = None,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """q `[B, G, M, D]`, k `[B, G, S, D]`, v `[B, G, S, Dv]` -> out `[B, G, M, Dv]` and lse
    `[B, G, M]`, both float32.

    Without `v`, the values are the first `width` columns of the keys. `bias` is float32, broadcasts
    to `[B, G, M, S]`, and hides where it is -inf. Widths are multiples of the lanes of a vector (of
    twice as many for `width` in bfloat16); last dimensions are contiguous; S > 0.
    """
    (b, g, m, d), s = q.shape, k.shape[2]
    dv = v.shape[3] if v is not None else width
    assert dv is not None
    half = k.dtype == torch.bfloat16
    rows, room, address = compiled(m, d, dv, half, v is None, bias is not None)
    threads, pairs = torch.get_num_threads(), b * g
    splits = max(1, min(TASKS_A_THREAD * threads // pairs, s // KEYS_A_TASK))
    chunk = -(-s // (splits * room)) * room
    splits = -(-s // chunk)
    threads = min(threads, pairs * splits)
    padded = -(-m // rows) * rows
    counters = -(-(pairs + 2) // 8) * 16  # whole cache lines
    parts = pairs * splits * padded * (dv + 2 * W)
    space = _workspace(counters + parts + threads * padded * (d + room))
    ctypes.memset(space, 0, 4 * counters)
    out, lse = torch.empty(b, g, m, dv), torch.empty(b, g, m)
    added = (0, 0, 0, 0) if bias is None else _place(bias.expand(b, g, m, s))
    # fmt: off
    data = ARGUMENTS.pack(
        b, g, m, s, *_place(q), *_place(k), *_place(k if v is None else v), *added,
        out.data_ptr(), lse.data_ptr(), space, space + 4 * counters,
        space + 4 * (counters + parts), splits, chunk, scale * LOG2E,
    )
    # fmt: on
    _launch(address, data, threads)
    return out, lse


def _place(x: Tensor) -> tuple[int, ...]:
    """Where a tensor lies, and how far apart its batches, heads and rows are."""
    return (x.data_ptr(), *x.stride()[:3])


def _workspace(count: int) -> int:
    """Memory for `count` numbers, kept by each thread of the caller."""
    space = getattr(_local, "space", None)
    if space is None or space.numel() < count:
        _local.space = space = torch.empty(count, dtype=torch.float32)
    address: int = space.data_ptr()
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


def _launch(address: int, data: bytes, threads: int) -> None:
    """Run a kernel on several threads; each claims tasks until none is left."""
    openmp = _openmp()
    if openmp is not None:
        openmp(address, data, threads, 0)
        return
    run: Any = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)  # lets go of the interpreter
    others = [_pool(threads - 1).submit(run, data) for _ in range(threads - 1)]
    run(data)
    for other in others:
        other.result()
