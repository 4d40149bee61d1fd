"""Running the kernel of gradients of a prefill in float32."""

import ctypes
import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.kernels.launching import place_of, workspace
from regard.ops.kernels.launching_prefill import limits_of
from regard.ops.kernels.panels import BLOCK, PACKED_GRADIENTS, ROW, SIDE, Gradients, Panel
from regard.ops.kernels.prefill_gradients import gradient_code
from regard.ops.kernels.threads import launch
from regard.ops.kernels.vectors import machine_lanes

LOG2E = math.log2(math.e)
LINE = 64  # bytes of a cache line


@functools.cache
def _compiled(panel: Panel) -> int:
    return int(gradient_code(panel).address)


def prefill_gradients(
    slope: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    totals: Tensor,
    *,
    scale: float,
    starts: Tensor,
    stops: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q `[B, H, L, D]`, k `[B, G, S, D]` and v `[B, G, S, Dv]`, in float32.

    `slope` is the gradient of the output `[B, H, L, Dv]`, `lse` are the log-sum-exps `[B, H, L]` of
    the forward pass, and `totals` the sums of the output times its gradient, `[B, H, L]`. Limits
    are those of `prefill`. Widths are multiples of 16, last dimensions contiguous, all sizes > 0.
    """
    (b, h, rows, d), (g, s), dv, kind = q.shape, k.shape[1:3], v.shape[3], torch.float32
    threads, group = torch.get_num_threads(), h // g
    blocks = -(-rows // SIDE)
    missing = blocks * SIDE - rows
    lses = F.pad(lse.masked_fill(lse == -torch.inf, 0) * LOG2E, (0, missing)).contiguous()
    sums = F.pad(totals, (0, missing)).contiguous()
    limits = [limits_of(x, blocks * SIDE) for x in (starts, stops)]
    of_q = torch.zeros(b, h, blocks * SIDE, d, dtype=kind, device="cpu")
    of_k, of_v = (
        torch.zeros(b, h, -(-s // SIDE) * SIDE, width, dtype=kind, device="cpu")
        for width in (d, dv)
    )
    scratch_bytes = ROW * (d + dv + 2 * BLOCK)
    space = workspace(LINE + threads * scratch_bytes)
    places = [*place_of("q", q, kind, (b, h, rows, d)), *place_of("k", k, kind, (b, g, s, d)),
              *place_of("v", v, kind, (b, g, s, dv)),
              *place_of("slope", slope, kind, (b, h, rows, dv)), *(x.ctypes.data for x in limits),
              0 if len(limits[0]) == 1 else blocks * SIDE,
              *(x.data_ptr() for x in (lses, sums, of_q, of_k, of_v)), space, space + LINE,
              scratch_bytes, scale, scale * LOG2E]  # fmt: skip
    call = Gradients(b * h, h, group, rows, s, *places)
    panel = Panel(d, dv, False, True, True, machine_lanes())
    ctypes.memset(space, 0, LINE)
    launch(_compiled(panel), PACKED_GRADIENTS.pack(*call), threads)
    of_k, of_v = (x[:, :, :s].unflatten(1, (g, group)).sum(2) for x in (of_k, of_v))
    return of_q[:, :, :rows], of_k, of_v
