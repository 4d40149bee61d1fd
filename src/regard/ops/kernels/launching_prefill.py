"""Running the prefill kernel: packing, then attention, for as many key heads as fit memory."""

import ctypes
import functools
import math
import platform
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.ops.kernels.launching import place_of, workspace
from regard.ops.kernels.panels import (
    BLOCK,
    LANES,
    PACKED_PREFILL,
    PARTS,
    ROW,
    SIDE,
    TILE,
    Panel,
    Prefill,
)
from regard.ops.kernels.prefilling import attending, packing
from regard.ops.kernels.threads import launch
from regard.ops.kernels.vectors import machine_features, machine_lanes, multiplies_pairs

LOG2E = math.log2(math.e)
LINE = 64  # bytes of a cache line
PACKED_BYTES = 1 << 26  # of keys and values, about: as many heads are packed at once
_PERMISSION = 158, 0x1023, 18  # Linux's arch_prctl, ARCH_REQ_XCOMP_PERM, the data of AMX tiles


@functools.cache
def products() -> str | None:
    """The instructions for products of bfloat16 that this process may use: "amx", "avx512", None.

    They are those of the processor that numba compiles for.
    """
    if not multiplies_pairs():
        return None
    return "amx" if {"+amx-tile", "+amx-bf16"} <= machine_features() and _permitted() else "avx512"


@functools.cache
def _permitted() -> bool:
    """Whether Linux lets this process use AMX; asking is necessary and holds for all threads."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(*map(ctypes.c_long, _PERMISSION)) == 0)


@functools.cache
def _palette() -> Any:
    """The shapes of eight AMX tiles: 16 rows of 64 bytes."""
    palette = np.zeros(64, np.uint8)
    palette[0] = 1
    palette[16:32].view(np.uint16)[:] = 64
    palette[48:56] = 16
    return palette


@functools.cache
def _compiled(panel: Panel) -> tuple[int, ...]:
    packs = () if panel.full else (int(packing(panel).address),)
    return *packs, int(attending(panel).address)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    starts: Tensor,
    stops: Tensor,
    sinks: Tensor | None = None,
    wide: bool = False,
    amx: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q `[B, H, L, D]` over k `[B, G, S, D]` and v `[B, G, S, Dv]`.

    All are bfloat16, or all are float32. A query may attend to the keys `starts` to `stops`
    (exclusive), `[B or 1, L]` int32. Returns the output `[B, H, L, Dv]` in the same dtype; with
    `wide` in float32, and the log-sum-exps `[B, H, L]`.
    Widths are multiples of 16, `scale` is positive, last dimensions are contiguous; L and S > 0.
    """
    (b, h, rows, d), (g, s), dv = q.shape, k.shape[1:3], v.shape[3]
    full = q.dtype is torch.float32
    amx = not full and products() == "amx" if amx is None else amx
    panel = Panel(d, dv, amx, wide or full, full, machine_lanes() if full else LANES)
    dtype = torch.float32 if full else torch.bfloat16
    kind = torch.float32 if wide else dtype
    out = torch.empty(b, rows, h, dv, dtype=kind, device="cpu").transpose(1, 2)
    blocks = -(-rows // SIDE)
    padded = blocks * SIDE
    limits = [limits_of(x, padded) for x in (starts, stops)]
    state = torch.empty((b, h, 2, padded) if wide else 0, dtype=torch.float32, device="cpu")
    tall = None if sinks is None else (sinks.detach().double() * LOG2E).float().contiguous()
    threads, group = torch.get_num_threads(), h // g
    taken = min(blocks, -(-PARTS // group))
    scratch_bytes = TILE + taken * group * panel.part_bytes + BLOCK * ROW
    groups = -(-s // SIDE)
    pair_bytes = 0 if full else groups * (panel.key_bytes + panel.value_bytes)
    most = min(b * g, max(1, PACKED_BYTES // max(1, pair_bytes)))
    space = workspace(LINE + most * pair_bytes + threads * scratch_bytes)
    packed, values = space + LINE, space + LINE + most * groups * panel.key_bytes
    places = [*place_of("q", q, dtype, (b, h, rows, d)), *place_of("k", k, dtype, (b, g, s, d)),
              *place_of("v", v, dtype, (b, g, s, dv)),
              *place_of("out", out, kind, (b, h, rows, dv)),
              *(x.ctypes.data for x in limits), 0 if len(limits[0]) == 1 else padded,
              0 if tall is None else tall.data_ptr(), state.data_ptr() if wide else 0,
              packed, values, space, space + LINE + most * pair_bytes, scratch_bytes,
              _palette().ctypes.data, taken, scale * LOG2E]  # fmt: skip
    for first in range(0, b * g, most):
        call = Prefill(min(most, b * g - first), first, g, group, rows, s, *places)
        ctypes.memset(space, 0, LINE)
        for address in _compiled(panel):
            launch(address, PACKED_PREFILL.pack(*call), threads)
    return out, _lse(state, rows) if wide else state


def limits_of(limits: Tensor, count: int) -> Any:
    """First or last keys of `count` queries; those that do not exist may attend to nothing."""
    found = np.zeros((limits.shape[0], count), np.int32)
    found[:, : limits.shape[1]] = limits.numpy()
    return found


def _lse(state: Tensor, rows: int) -> Tensor:
    maxima, totals = state[..., :rows].unbind(2)
    return (maxima + totals.log2()) / LOG2E
