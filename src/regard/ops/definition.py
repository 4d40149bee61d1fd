"""The definition: scores as the papers write them, and a softmax that gives a blind query nothing.

`Attention Is All You Need` (arXiv:1706.03762), with Gemma 2's soft cap (arXiv:2408.00118), additive
biases, and gpt-oss's sinks (arXiv:2508.10925). Everything accumulates in float32, or float64.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.heads import group_heads, ungroup_heads
from regard.ops.call import Call, is_everything
from regard.ops.partial import accumulator


def scores(
    call: Call, q: Float[Tensor, "B H L D"], k: Float[Tensor, "B G S D"]
) -> Float[Tensor, "B H L S"]:
    """`softcap(scale * q.k) + score_bias`, hidden ones -inf, in float32 or float64."""
    dtype = accumulator(call.dtype)
    grouped = group_heads(q.to(dtype) * call.scale, call.num_kv_heads)
    return shaped(call, ungroup_heads(grouped @ k.to(dtype).unsqueeze(2).mT))


def shaped(call: Call, raw: Float[Tensor, "B H L S"]) -> Float[Tensor, "B H L S"]:
    """Raw products made into scores: capped, biased, masked."""
    if call.softcap is not None:
        raw = call.softcap * torch.tanh(raw / call.softcap)
    if (bias := call.bias()) is not None:
        raw = raw + bias
    if not is_everything(call.mask):
        raw = raw.masked_fill(~call.keep(), -torch.inf)
    return raw


def weigh(
    scores: Float[Tensor, "B H L S"], sinks: Float[Tensor, " H"] | None, *, plain: bool
) -> Float[Tensor, "B H L S"]:
    """Softmax over the keys, and the sink, which takes its share and gives nothing.

    A query that sees no key has weights 0, and no gradient. `plain` scores hide nothing, so that
    nobody can be blind.
    """
    if sinks is not None:
        sink = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    if plain:
        return scores.softmax(-1)
    blind = _blind(scores)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def log_sum(scores: Float[Tensor, "B H L S"]) -> Float[Tensor, "B H L"]:
    """The log-sum-exp of each query's scores: -inf, without a gradient, where it sees nothing."""
    blind = _blind(scores)
    lse = scores.masked_fill(blind, 0.0).logsumexp(-1)
    return lse.masked_fill(blind.squeeze(-1), -torch.inf)


def is_plain(call: Call) -> bool:
    """Whether no score can be -inf: nothing is masked, and there is no bias to hide with."""
    return call.score_bias is None and is_everything(call.mask) and call.num_keys > 0


def _blind(scores: Float[Tensor, "B H L S"]) -> Bool[Tensor, "B H L 1"]:
    return (scores == -torch.inf).all(-1, keepdim=True)
