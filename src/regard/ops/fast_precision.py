"""Attention with `precision="fast"`: matrix products, scores and weights in bfloat16.

On a CPU with bfloat16 instructions a matrix product in bfloat16 takes less than half the time of
one in float32, but its sums are rounded to bfloat16. torch's own kernel keeps float32 sums, and is
no faster in half precision than in float32. `blocked` uses this where the call allows it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.heads import fold_heads, group_heads, unfold_heads
from regard.masks.runs import true_runs, without_gaps
from regard.ops.backends.common import addend, folded_rows, fully_masked, without_hidden
from regard.ops.block_gradients import without_derivative
from regard.ops.call import Call, is_everything
from regard.ops.definition import scores_of, softmax
from regard.rates import SPEED
from regard.tracing import is_concrete

Read = Callable[[], tuple[Tensor, Tensor]]  # returns the keys and values
NOTE = (
    "scores and weights are kept in bfloat16: "
    "error up to 2 u vmax (1 + S), where strict has 1.5 u vmax"
)


def suits(call: Call) -> bool:
    """Whether a call may use fast precision and gains: float16 products are slow on CPUs."""
    if call.precision != "fast" or call.dtype != torch.bfloat16 or call.dropout:
        return False
    return call.device.type == "cpu"


def per_cell(call: Call) -> float:
    """Estimated seconds for a score and its weight, in a block of many queries."""
    products = 2 * (call.head_dim + call.v_head_dim) / (2.2 * SPEED.products)
    return products + (2 if _simple(call) else 8) / SPEED.elements


def run(call: Call, q: Float[Tensor, "B H L D"], read: Read) -> Float[Tensor, "B H L Dv"]:
    """Attention to the keys and values that `read` returns; backward calls it again."""
    rows = fold_heads(q * call.scale, call.num_kv_heads)
    if not _simple(call):
        k, v = without_hidden(call, *read())
        scores = scores_of(call, unfold_heads((rows @ k.mT).float(), call.num_queries))
        weights = softmax(call, scores).to(call.dtype)
        return unfold_heads(fold_heads(weights, call.num_kv_heads) @ v, call.num_queries)
    edges, masked = _edges(call)
    if call.needs_grad:  # all heads at once
        out = _Recomputed.apply(rows, *read(), call, read, edges)  # type: ignore[no-untyped-call]
    else:
        out = _head_by_head(call, rows, *without_hidden(call, *read()), edges)
    return unfold_heads(out if masked is None else out.masked_fill(masked, 0.0), call.num_queries)


def keeps_inputs_only(call: Call) -> bool:
    """Whether backward recomputes the weights, so that no checkpointing is needed."""
    return suits(call) and _simple(call)


def _simple(call: Call) -> bool:
    """Whether a call has no softcap, sinks or bias."""
    return call.softcap is None and call.sinks is None and call.score_bias is None


class Edge(NamedTuple):
    """Keys that are hidden from some queries, and the addend of their scores."""

    start: int
    stop: int
    added: Float[Tensor, "B G N L W"]


def _head_by_head(
    call: Call,
    rows: Float[Tensor, "B G M D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    edges: list[Edge],
) -> Float[Tensor, "B G M Dv"]:
    """One key head at a time, so that its scores stay in the processor's cache."""
    outs = []
    for index in range(call.batch * call.num_kv_heads):
        b, g = divmod(index, call.num_kv_heads)
        here = [Edge(start, stop, added[b, g]) for start, stop, added in edges]
        outs.append(_weights(call, rows[b, g], k[b, g], here) @ v[b, g])
    return torch.stack(outs).unflatten(0, (call.batch, call.num_kv_heads))


class _Recomputed(torch.autograd.Function):
    """Attention that saves its queries only: backward reads the keys and computes the weights
    again, as in FlashAttention (arXiv:2205.14135). Saved over all blocks, both would have queries x
    keys elements."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, k: Tensor, v: Tensor, call: Call, read: Read, edges: list[Edge]
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.call, ctx.read, ctx.edges = call, read, edges
        k, v = without_hidden(call, k, v)
        return _weights(call, rows, k, edges) @ v

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), (k, v) = ctx.saved_tensors, ctx.read()
        grads = _gradients(ctx, slope, rows, k, v)
        return *without_derivative(grads, slope, rows, k, v), None, None, None


@torch.no_grad()
def _gradients(ctx: Any, slope: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    k, v = without_hidden(ctx.call, k, v)
    weights = _weights(ctx.call, rows, k, ctx.edges)
    scores = torch.ops.aten._softmax_backward_data(slope @ v.mT, weights, -1, weights.dtype)
    return scores @ k, scores.mT @ rows, weights.mT @ slope


def _weights(
    call: Call, rows: Float[Tensor, "*BG M D"], k: Float[Tensor, "*BG S D"], edges: list[Edge]
) -> Float[Tensor, "*BG M S"]:
    """Scores, masked only at the edges, and their softmax."""
    scores = (rows @ k.mT).unflatten(-2, (call.group, call.num_queries))
    for start, stop, added in edges:
        scores[..., start:stop] += added
    return scores.softmax(-1).flatten(-3, -2)


def _edges(call: Call) -> tuple[list[Edge], Tensor | None]:
    """Keys that are hidden from some queries, and which folded rows are fully masked."""
    if is_everything(call.mask):
        return [], None
    keep = call.keep()
    masked = fully_masked(keep)
    keep = keep | masked
    edge = ~keep.flatten(0, -2).all(0)
    runs = [(0, call.num_keys)]
    if is_concrete(edge):
        runs = without_gaps(true_runs(edge), 64)
    edges = []
    for start, stop in runs:
        added = addend(keep[..., start:stop], None, call.dtype)
        added = added.expand(call.batch, call.num_heads, -1, -1)
        edges.append(Edge(start, stop, group_heads(added, call.num_kv_heads)))
    return edges, folded_rows(call, masked, 1)
