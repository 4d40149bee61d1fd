"""torch's scaled_dot_product_attention, given the fewest flags that say the same thing."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.masks import Causal
from regard.ops.call import Call, is_empty, is_everything, shown
from regard.ops.definition import is_plain
from regard.ops.rates import SPEED
from regard.tracing import is_forward_mode, is_vmapped

_BLOCK = 32  # rows of queries for which torch's CPU kernel streams the keys once
_KEYS = 512  # keys that it takes at once, and so computes whole where the diagonal crosses them
_KEPT = 1 << 24  # numbers of a mask; more are not kept for the way back if there is another way


def objection(call: Call) -> str | None:
    if is_empty(call):
        return "scaled_dot_product_attention needs at least one query and one visible key"
    if call.softcap is not None:
        return f"scaled_dot_product_attention has no softcap (got {shown(call.softcap)})"
    if call.sinks is not None:
        return "scaled_dot_product_attention has no sinks"
    if is_forward_mode():
        return "scaled_dot_product_attention has no forward-mode derivative"
    if is_vmapped():
        return "scaled_dot_product_attention has no batching rule for torch.func.vmap"
    return None


def estimate(call: Call) -> float:
    """Every query head streams its keys, once for each block of queries."""
    half = call.dtype.itemsize < 4
    width = 2 * max(call.head_dim, call.v_head_dim)
    cells = call.batch * call.num_heads * call.num_queries * call.num_keys
    share = min(1.0, 0.5 + _KEYS / 2 / call.num_keys) if _is_causal(call) else 1.0
    streams = call.batch * call.num_heads * (1 + (call.num_queries - 1) // _BLOCK)
    streamed = streams * call.num_keys * width / (SPEED.row_half if half else SPEED.row_float)
    streamed += streams * SPEED.call / 8 if half else 0.0  # buffers for what is converted
    if call.num_queries >= _BLOCK:
        streamed = 0.0
    masked = not (_is_causal(call) or is_everything(call.mask))
    operators = 35 if masked else 3
    seconds = SPEED.call * operators + share * (2 * cells * width / SPEED.products + streamed)
    if not (_is_causal(call) or is_plain(call)):  # the mask as a tensor, from memory and to it
        heads, passes = dense_passes(call)
        numbers = heads * call.num_queries * call.num_keys
        kept = 2 if call.needs_grad and numbers > _KEPT else 1  # memory is charged for as well
        seconds += kept * passes * numbers / SPEED.elements
    return seconds


def dense_passes(call: Call) -> tuple[int, int]:
    """Heads for which a mask is written, and how often each of its numbers comes and goes."""
    if call.score_bias is None:
        return 1, 6
    return call.num_heads, 8 if isinstance(call.score_bias, Tensor) else 20


def run(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Float[Tensor, "B H L Dv"]:
    bias = call.bias()
    if bias is None and is_everything(call.mask):
        return _kernel(call, q, k, v)
    if _is_causal(call):
        return _kernel(call, q, k, v, is_causal=True)
    if is_everything(call.mask):
        assert bias is not None
        return _kernel(call, q, k, v, attn_mask=_four(bias, call))
    keep = call.keep()
    mask, blind = _dense(call, bias, keep)
    if call.may_look():
        out = _kernel(call, q, k, v, attn_mask=mask)
        if bool(out.isfinite().all()):
            return out.masked_fill(blind, 0.0)
    k, v = call.clean(k, v, keep)
    return _kernel(call, _tame(q), _tame(k), v, attn_mask=mask).masked_fill(blind, 0.0)


def _kernel(call: Call, q: Tensor, k: Tensor, v: Tensor, **flags: Any) -> Tensor:
    q, k, v = _same_width(q, k, v)
    if call.group > 1:  # a symbolic comparison is no flag; a branch makes it one
        flags["enable_gqa"] = True
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        dropout_p=call.dropout,
        scale=call.scale,
        **flags,
    )[..., : call.v_head_dim]


def _is_causal(call: Call) -> bool:
    """`is_causal` aligns the first query with the first key: right only where they are one slot.
    It masks before it scales: -inf times 0 is NaN, and times a negative scale +inf."""
    if not isinstance(call.mask, Causal) or isinstance(call.span.q_start, Tensor):
        return False
    if call.score_bias is not None or call.scale <= 0:
        return False
    return bool(call.span.q_start == call.span.kv_start)


def _dense(call: Call, bias: Tensor | None, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The mask as SDPA takes it, and which queries are blind.

    Blind rows are shown everything here and zeroed afterwards, so that no kernel ever meets an
    empty softmax, forward or backward.
    """
    blind = ~keep.any(-1, keepdim=True)
    keep = keep | blind
    if bias is None:
        return _four(keep, call), blind
    return _four(bias.masked_fill(~keep, -torch.inf), call), blind


def _tame(x: Tensor) -> Tensor:
    """Queries or keys whose products cannot overflow: a hidden score of +inf, plus -inf, is nan.

    Scores of visible keys beyond this are far outside what the dtype can tell apart.
    """
    if x.dtype == torch.float16:
        return x  # its products fit float32
    limit = 1e150 if x.dtype == torch.float64 else 1e15
    return x.clamp(-limit, limit)


def _four(mask: Tensor, call: Call) -> Tensor:
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return mask.expand(*mask.shape[:2], call.num_queries, call.num_keys)


def _same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero columns where values and keys differ in width: the fused kernels want them equal, and
    the unfused one would write out every score."""
    missing = q.shape[-1] - v.shape[-1]
    if missing > 0:
        v = F.pad(v, (0, missing))
    elif missing < 0:
        q, k = F.pad(q, (0, -missing)), F.pad(k, (0, -missing))
    return q, k, v
