"""Attention with `precision="fast"`: products in bfloat16, scores and weights too.

On a CPU with bfloat16 instructions a matrix product of them is over twice as fast as one in
float32, but its sums come back rounded; torch's own kernel, which keeps float32 sums, gains nothing
from half precision there. Not a backend: `blocked` asks for it where it is allowed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.heads import fold_heads, unfold_heads
from regard.masks.visible_runs import bridged, true_runs
from regard.ops.backends.common import without_hidden
from regard.ops.call import Call, is_everything
from regard.ops.definition import scores_of, softmax
from regard.ops.rates import SPEED
from regard.tracing import holds_numbers

NOTE = (
    "scores and weights are kept in bfloat16: "
    "error up to 2 u vmax (1 + S), where strict has 1.5 u vmax"
)


def suits(call: Call) -> bool:
    """Whether it is allowed, and faster: products in float16 are slow on CPUs."""
    if call.precision != "fast" or call.dtype != torch.bfloat16 or call.dropout:
        return False
    return call.device.type == "cpu"


def per_cell(call: Call) -> float:
    """Seconds for a score and its weight, in a block of many queries."""
    products = 2 * (call.head_dim + call.v_head_dim) / (2.2 * SPEED.products)
    return products + (2 if _simple(call) else 8) / SPEED.elements


def run(
    call: Call, q: Float[Tensor, "B H L D"], read: Callable[[], tuple[Tensor, Tensor]]
) -> Float[Tensor, "B H L Dv"]:
    """Attention to the keys and values that are `read`; with gradients, twice."""
    rows = fold_heads(q * call.scale, call.num_kv_heads)
    if not _simple(call):
        k, v = without_hidden(call, *read())
        scores = scores_of(call, unfold_heads((rows @ k.mT).float(), call.num_queries))
        weights = softmax(call, scores).to(call.dtype)
        return unfold_heads(fold_heads(weights, call.num_kv_heads) @ v, call.num_queries)
    edges, masked = _edges(call)
    if call.needs_grad:
        out = _learned(call, rows, read, edges)
    else:
        out = _head_by_head(call, rows, *without_hidden(call, *read()), edges)
    return unfold_heads(out if masked is None else out.masked_fill(masked, 0.0), call.num_queries)


def keeps_inputs_only(call: Call) -> bool:
    """Whether the way back computes weights again by itself."""
    return suits(call) and _simple(call)


def _simple(call: Call) -> bool:
    """Whether scores are nothing but products and a mask."""
    return call.softcap is None and call.sinks is None and call.score_bias is None


class Edge(NamedTuple):
    """Keys that not every query sees, and what is added to their scores, for N heads in a group."""

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
    """One key head at a time, so that scores stay in the cache."""
    outs = []
    for index in range(call.batch * call.num_kv_heads):
        b, g = divmod(index, call.num_kv_heads)
        here = [Edge(start, stop, added[b, g]) for start, stop, added in edges]
        outs.append(_weights(call, rows[b, g], k[b, g], here) @ v[b, g])
    return torch.stack(outs).unflatten(0, (call.batch, call.num_kv_heads))


class Way(NamedTuple):
    """What the way there and the way back have in common."""

    read: Callable[[], tuple[Tensor, Tensor]]
    cleaned: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    weights: Callable[[Tensor, Tensor], Tensor]


def _learned(
    call: Call,
    rows: Float[Tensor, "B G M D"],
    read: Callable[[], tuple[Tensor, Tensor]],
    edges: list[Edge],
) -> Float[Tensor, "B G M Dv"]:
    """All heads at once, with a gradient."""
    way = Way(read, partial(without_hidden, call), partial(_weights, call, edges=edges))
    out: Tensor = _Learned.apply(rows, *read(), way)  # type: ignore[no-untyped-call]
    return out


class _Learned(torch.autograd.Function):
    """Keeps its queries alone: keys are joined and weights made again on the way back, as
    FlashAttention does (arXiv:2205.14135), since over all blocks both grow with queries by keys."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, k: Tensor, v: Tensor, way: Way) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.way = way
        k, v = way.cleaned(k, v)
        return way.weights(rows, k) @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (rows,) = ctx.saved_tensors
        k, v = ctx.way.cleaned(*ctx.way.read())
        weights = ctx.way.weights(rows, k)
        scores = torch.ops.aten._softmax_backward_data(slope @ v.mT, weights, -1, weights.dtype)
        return scores @ k, scores.mT @ rows, weights.mT @ slope, None


def _weights(
    call: Call, rows: Float[Tensor, "*BG M D"], k: Float[Tensor, "*BG S D"], edges: list[Edge]
) -> Float[Tensor, "*BG M S"]:
    """Scores, masked only where not all is seen, and their softmax."""
    scores = (rows @ k.mT).unflatten(-2, (call.group, call.num_queries))
    for start, stop, added in edges:
        scores[..., start:stop] += added
    return scores.softmax(-1).flatten(-3, -2)


def _edges(call: Call) -> tuple[list[Edge], Tensor | None]:
    """Where keys are not seen by all, and which folded rows are masked."""
    if is_everything(call.mask):
        return [], None
    keep = call.keep()
    hidden = ~keep.any(-1, keepdim=True)
    keep = keep | hidden
    unseen = ~keep.flatten(0, -2).all(0)
    masked = hidden.expand(call.batch, call.num_heads, call.num_queries, 1)
    runs = [(0, call.num_keys)]
    if holds_numbers(unseen):
        runs = bridged(true_runs(unseen.tolist()), 64)
    edges = [Edge(start, stop, _added(call, keep[..., start:stop])) for start, stop in runs]
    return edges, fold_heads(masked, call.num_kv_heads)


def _added(call: Call, keep: Bool[Tensor, "*some L W"]) -> Float[Tensor, "B G N L W"]:
    nothing = torch.zeros((), dtype=call.dtype, device=call.device)
    added = torch.where(keep, nothing, -torch.inf)
    added = added.expand(call.batch, call.num_heads, -1, -1)
    return added.unflatten(1, (call.num_kv_heads, call.group))
