"""The definition: scores as the papers write them, and a softmax that is 0 in fully masked rows.

`Attention Is All You Need` (arXiv:1706.03762), with Gemma 2's soft cap (arXiv:2408.00118), additive
biases, and gpt-oss's sinks (arXiv:2508.10925). Sums are kept in float32, or in float64 for float64
inputs.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.constants import accumulating_dtype
from regard.heads import fold_heads, group_heads, ungroup_heads
from regard.ops.call import Call, hides_nothing, is_everything


def scores(
    call: Call, q: Float[Tensor, "B H L D"], k: Float[Tensor, "B G S D"]
) -> Float[Tensor, "B H L S"]:
    """`softcap(scale * q.k) + score_bias`, hidden ones -inf, in float32 or float64."""
    dtype = accumulating_dtype(call.dtype)
    return scores_of(call, products_of_heads(q.to(dtype) * call.scale, k.to(dtype).mT))


def products_of_heads(
    x: Float[Tensor, "B H L X"], y: Float[Tensor, "B G X Y"]
) -> Float[Tensor, "B H L Y"]:
    """Of the rows of query heads with the matrix of their key head, which is not copied for each.

    In a graph it may be: rows of several heads, as one matrix, have strides that fix the length.
    """
    groups = y.shape[1]
    if torch.compiler.is_compiling():
        return ungroup_heads(group_heads(x, groups) @ y.unsqueeze(2))
    return (fold_heads(x, groups) @ y).reshape(*x.shape[:3], y.shape[3])


def scores_of(call: Call, raw: Float[Tensor, "B H L S"]) -> Float[Tensor, "B H L S"]:
    """Scores of the products of queries and keys: capped, biased, masked."""
    if call.softcap is not None:
        raw = call.softcap * torch.tanh(raw / call.softcap)
    if (bias := call.bias()) is not None:
        raw = raw + bias
    if not is_everything(call.mask):
        raw = raw.masked_fill(~call.keep(), -torch.inf)
    return raw


def softmax(call: Call, scores: Float[Tensor, "B H L S"]) -> Float[Tensor, "B H L S"]:
    """Softmax over the keys and the sink, without the sink's own weight.

    A fully masked row has weights 0 and zero gradients.
    """
    if call.sinks is not None:
        sink = call.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    if hides_nothing(call):
        return scores.softmax(-1)
    masked = _fully_masked(scores)
    return scores.masked_fill(masked, 0.0).softmax(-1).masked_fill(masked, 0.0)


def log_sum_exp(scores: Float[Tensor, "B H L S"]) -> Float[Tensor, "B H L"]:
    """The log-sum-exp of each query's scores: -inf, without a gradient, in fully masked rows."""
    masked = _fully_masked(scores)
    lse = scores.masked_fill(masked, 0.0).logsumexp(-1)
    return lse.masked_fill(masked.squeeze(-1), -torch.inf)


def _fully_masked(scores: Float[Tensor, "B H L S"]) -> Bool[Tensor, "B H L 1"]:
    return (scores == -torch.inf).all(-1, keepdim=True)
