"""Prefill on a CPU with a compiled kernel: in bfloat16 by AMX or by AVX-512's instructions for it,
in float32, and wherever gradients are wanted, by products on vectors of AVX-512 or AVX2.

Products, softmax and sums are in float32, as `precision="strict"` needs; weights in bfloat16 are
rounded before they multiply values, and the total is of the rounded ones. LLVM compiles it through
numba on the machine, in some seconds for each new head size, and numba caches it on disk. Needs the
extra `regard[cpu]`.
"""

import functools
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.ops.backends.common import columns_contiguous, run_and_check
from regard.ops.block_gradients import without_derivative
from regard.ops.call import Call, is_empty, shown
from regard.ops.mask_tensors import intervals_of
from regard.ops.partial import Partial
from regard.rates import SPEED

_MULTIPLE = 16  # elements: head dims are multiples of half a row of an AMX tile
_WIDEST = 256  # elements: code is unrolled over a head's columns, so wider ones compile slowly
_LEAST = 16  # queries: a block of fewer would be mostly padding, and decoding must choose quickly
_SIDE = 32  # queries in a block, and keys
_FAR = (1 << 31) - 1  # a key after all others
_SOFTMAX = 0.25  # times as long as in torch's kernel
_OPERATORS = 30  # operators that starting a call costs as much as
_LANES = 8  # float32 elements of a vector, at least: narrower ones were not measured
# Seconds, once for each head size. In float32 torch has a kernel already, so that calls of fewer
# operations, a third of a millisecond, are no reason to compile one.
_COMPILING, _WORTH_COMPILING = 2.0, 2**26


def objection(call: Call) -> str | None:
    if is_empty(call):
        return "tiled needs at least one query and one visible key"
    if call.num_queries < _LEAST:
        return f"tiled is for many queries: {call.num_queries} are fewer than {_LEAST}"
    if call.device.type != "cpu" or call.dtype not in (torch.bfloat16, torch.float32):
        return f"tiled is for bfloat16 and float32 on a CPU, got {call.dtype} on {call.device}"
    if call.needs_grad and call.partial:
        return "tiled gives no log-sum-exp with a gradient"
    if call.dropout or call.softcap is not None or call.score_bias is not None:
        given = f"(got {shown(call.dropout)}, {shown(call.softcap)})"
        return f"tiled has no dropout, softcap {given} or score_bias"
    if torch.compiler.is_compiling():
        return "tiled cannot be part of a compiled graph"
    if not call.immediate:
        return (
            "tiled takes plain tensors: no torch.func transform, dispatch mode, tensor subclass or "
            "forward-mode derivative"
        )
    return _shape_objection(call) or _machine_objection(_computed(call))


def _computed(call: Call) -> torch.dtype:
    """The dtype of the kernel: products for gradients are those of float32."""
    return torch.float32 if call.needs_grad else call.dtype


def _shape_objection(call: Call) -> str | None:
    dims = call.head_dim, call.v_head_dim
    if any(dim % _MULTIPLE or dim > _WIDEST for dim in dims):
        return (
            f"tiled takes head dims in multiples of {_MULTIPLE} up to {_WIDEST}, got {dims[0]} and "
            f"{dims[1]}"
        )
    if not call.scale > 0:
        return f"tiled takes a positive scale, got {call.scale}"
    if intervals_of(call.mask, call.span) is None:
        return f"tiled takes masks that show each query one interval of keys, got {call.mask!r}"
    return None


@functools.cache
def _machine_objection(dtype: torch.dtype) -> str | None:
    if find_spec("numba") is None:
        return "tiled needs numba: python -m pip install 'regard[cpu]'"
    from regard.ops.kernels.launching_prefill import products
    from regard.ops.kernels.vectors import machine_lanes

    if dtype == torch.float32 and machine_lanes() < _LANES:
        return "tiled needs a processor with AVX2 or AVX-512 for float32"
    if dtype == torch.bfloat16 and products() is None:
        return "tiled needs a processor with bfloat16 instructions (AVX512-BF16 or AMX)"
    return None


def estimate(call: Call) -> float:
    """The time of products and softmax, and in bfloat16 of packing keys and values; of small calls
    in float32 with the time of compiling."""
    found = intervals_of(call.mask, call.span)
    assert found is not None
    scores = call.num_heads * call.batch / found[0].shape[0] * _scores(*found)
    width = call.head_dim + call.v_head_dim
    if _computed(call) == torch.float32:
        work = 2 * width * scores
        compiling = _COMPILING * (work < _WORTH_COMPILING)
        return compiling + _OPERATORS * SPEED.call + work / SPEED.products
    packed = call.batch * call.num_kv_heads * call.num_keys * width
    each = 2 * width / SPEED.tiled + _SOFTMAX / SPEED.scores
    return _OPERATORS * SPEED.call + scores * each + packed / SPEED.rows_half


def _scores(starts: Tensor, stops: Tensor) -> float:
    """The scores computed for a head, in all rows: whole blocks of queries and keys."""
    empty, missing = stops <= starts, -starts.shape[1] % _SIDE
    low = F.pad(starts.masked_fill(empty, _FAR), (0, missing), value=_FAR)
    high = F.pad(stops.masked_fill(empty, 0), (0, missing))
    first = low.unflatten(1, (-1, _SIDE)).amin(2) // _SIDE
    last = -(-high.unflatten(1, (-1, _SIDE)).amax(2) // _SIDE)
    return _SIDE**2 * float((last - first).clamp(min=0).sum())


def run(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Float[Tensor, "B H L Dv"]:
    if call.needs_grad:
        out: Tensor = _Attention.apply(call, q, k, v, call.sinks)  # type: ignore[no-untyped-call]
        return out
    return _attend(call, q, k, v, sinks=call.sinks)[0]


class _Attention(torch.autograd.Function):
    """Attention that saves log-sum-exps, not weights (arXiv:2205.14135)."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        dtype = torch.float32 if _machine_objection(call.dtype) else call.dtype
        rows = (x.to(dtype) for x in (q, k, v))
        call = call.but(needs_grad=False, dtype=dtype)
        out, lse = _attend(call, *rows, sinks=sinks, wide=True)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.scale, ctx.limits = call.scale, intervals_of(call.mask, call.span)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        with torch.no_grad():
            above, queries, keys, values = (x.float() for x in (slope, q, k, v))
            totals, of_sinks = (out * above).sum(-1), None
            found = gradients(above, queries, keys, values, lse, totals, ctx.scale, ctx.limits)
            grads = (each.to(q.dtype) for each in found)
            if sinks is not None:  # scores whose value is 0
                starts, stops = ctx.limits
                of_rows = (sinks[:, None] - lse).exp() * totals
                of_rows = of_rows.masked_fill((stops <= starts)[:, None], 0)
                of_sinks = -of_rows.sum((0, 2)).to(sinks.dtype)
        return None, *without_derivative((*grads, of_sinks), slope, q, k, v, sinks)


def gradients(
    slope: Float[Tensor, "B H L Dv"],
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    lse: Float[Tensor, "B H L"],
    totals: Float[Tensor, "B H L"],
    scale: float,
    limits: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, from that of the output, `slope`.

    These may be some of the keys: `lse` and `totals`, the sums of the output times its gradient,
    are over all of them. Hidden keys, and queries that see none, may hold anything: they are zeroed
    first, since 0 * nan is nan.
    """
    from regard.ops.kernels.launching_gradients import prefill_gradients

    starts, stops = limits
    hidden, blind = ~_visible(starts, stops, k.shape[2]), stops <= starts
    if hidden.any():
        k, v = (x.masked_fill(hidden[:, None, :, None], 0) for x in (k, v))
    if blind.any():
        q, slope = (x.masked_fill(blind[:, None, :, None], 0) for x in (q, slope))
        totals = totals.masked_fill(blind[:, None], 0)
    slope, q, k, v = map(columns_contiguous, (slope, q, k, v))
    given = slope, q, k, v, lse, totals
    return prefill_gradients(*given, scale=scale, starts=starts, stops=stops)


def _visible(starts: Tensor, stops: Tensor, count: int) -> Tensor:
    """Which of so many keys are visible to some query, `[B or 1, S]`."""
    edges = torch.zeros(starts.shape[0], count + 1, dtype=torch.int64, device="cpu")
    step = (starts < stops).long()
    edges.scatter_add_(1, starts.long(), step).scatter_add_(1, stops.long(), -step)
    return edges.cumsum(1)[:, :count] > 0


def partial(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Partial:
    return Partial(*_attend(call, q, k, v, wide=True))


def _attend(call: Call, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    from regard.ops.kernels.launching_prefill import prefill

    found = intervals_of(call.mask, call.span)
    assert found is not None
    starts, stops = found
    rows = columns_contiguous(q)

    def compute(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = columns_contiguous(k), columns_contiguous(v)
        return prefill(rows, k, v, scale=call.scale, starts=starts, stops=stops, **options)

    return run_and_check(call, compute, k, v)
