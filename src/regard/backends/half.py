"""Attention with `precision="fast"`: products in bfloat16, scores and weights too.

On a CPU with bfloat16 instructions a matrix product of them is over twice as fast as one in
float32, but its sums come back rounded; torch's own kernel, which keeps float32 sums, gains nothing
from half precision there. Not a backend: `blocked` asks for it where it is allowed.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.call import Call, is_everything
from regard.heads import fold_heads, unfold_heads
from regard.scores import is_plain, shaped, weigh
from regard.sight import bridged, true_runs
from regard.speed import SPEED

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
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Float[Tensor, "B H L Dv"]:
    if not is_everything(call.mask):
        k, v = call.clean(k, v, call.keep())
    rows = fold_heads(q * call.scale, call.num_kv_heads)
    if _simple(call):
        out = _simply(call, rows, k, v)
    else:
        scores = shaped(call, unfold_heads((rows @ k.mT).float(), call.num_queries))
        weights = weigh(scores, call.sinks, plain=is_plain(call)).to(call.dtype)
        out = fold_heads(weights, call.num_kv_heads) @ v
    return unfold_heads(out, call.num_queries)


def _simple(call: Call) -> bool:
    """Whether scores are nothing but products and a mask."""
    return call.softcap is None and call.sinks is None and call.score_bias is None


def _simply(
    call: Call,
    rows: Float[Tensor, "B G M D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Float[Tensor, "B G M Dv"]:
    """One key head at a time, so that scores stay in the cache; masked only at the edges."""
    mask, blind, edges = _edges(call)
    outs = []
    for index in range(call.batch * call.num_kv_heads):
        b, g = divmod(index, call.num_kv_heads)
        scores = (rows[b, g] @ k[b, g].mT).unflatten(0, (call.group, call.num_queries))
        for start, stop in edges:
            heads = slice(g * call.group, (g + 1) * call.group)
            scores[..., start:stop] += mask[b, heads, :, start:stop]
        outs.append(scores.softmax(-1).flatten(0, 1) @ v[b, g])
    out = torch.stack(outs).unflatten(0, (call.batch, call.num_kv_heads))
    return out if blind is None else out.masked_fill(blind, 0.0)


def _edges(call: Call) -> tuple[Tensor, Tensor | None, list[tuple[int, int]]]:
    """What is added to scores, which folded rows are blind, and where keys are not seen by all."""
    nothing = torch.zeros((), dtype=call.dtype, device=call.device)
    if is_everything(call.mask):
        return nothing, None, []
    keep = call.keep()
    hidden = ~keep.any(-1, keepdim=True)
    keep = keep | hidden
    unseen = ~keep.flatten(0, -2).all(0)
    mask = torch.where(keep, nothing, -torch.inf)
    mask = mask.expand(call.batch, call.num_heads, call.num_queries, call.num_keys)
    blind = hidden.expand(call.batch, call.num_heads, call.num_queries, 1)
    return mask, fold_heads(blind, call.num_kv_heads), bridged(true_runs(unseen.tolist()), 64)
