"""torch's scaled_dot_product_attention, called with the cheapest flags that mean the same."""

import os
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.masks import Causal
from regard.ops.backends.common import addend, four_dims, fully_masked, run_and_check
from regard.ops.call import Call, hides_nothing, is_empty, is_everything, shown
from regard.ops.rates import SPEED
from regard.tracing import is_forward_mode, is_vmapped

_BLOCK = 32  # queries in a block of torch's CPU kernel, which reads the keys once for each block
_KEYS = 512  # keys in a block of it: blocks on the causal diagonal are computed whole
_KEPT = 1 << 24  # elements of a mask: storing more for the backward pass is charged twice


def _raises_in_bfloat16() -> bool:
    """Whether torch's CPU kernel raises in bfloat16: torch 2.13 does ("pack_vnni2 is only supported
    when avx512 is supported") on processors with AMX, if the environment narrows their vectors."""
    if not os.environ.get("ATEN_CPU_CAPABILITY"):
        return False
    zeros = torch.zeros(1, 1, 64, 16, dtype=torch.bfloat16, device="cpu")
    try:
        with torch.no_grad():
            F.scaled_dot_product_attention(zeros, zeros, zeros)
    except RuntimeError:
        return True
    return False


NO_BFLOAT16 = _raises_in_bfloat16()  # tried once, at import: the environment is read before that


def objection(call: Call) -> str | None:
    if is_empty(call):
        return "scaled_dot_product_attention needs at least one query and one visible key"
    if call.softcap is not None:
        return f"scaled_dot_product_attention has no softcap (got {shown(call.softcap)})"
    if call.sinks is not None:
        return "scaled_dot_product_attention has no sinks"
    if NO_BFLOAT16 and call.dtype == torch.bfloat16 and call.device.type == "cpu":
        return (
            "torch's scaled_dot_product_attention raises in bfloat16 on this processor under "
            f"ATEN_CPU_CAPABILITY={os.environ.get('ATEN_CPU_CAPABILITY')}"
        )
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
    streamed += streams * SPEED.call / 8 if half else 0.0  # buffers for converted keys
    if call.num_queries >= _BLOCK:
        streamed = 0.0
    masked = not (_is_causal(call) or is_everything(call.mask))
    operators = 35 if masked else 3
    seconds = SPEED.call * operators + share * (2 * cells * width / SPEED.products + streamed)
    if not (
        _is_causal(call) or hides_nothing(call)
    ):  # the dense mask is written to memory and read from it
        heads, passes = dense_passes(call)
        numbers = heads * call.num_queries * call.num_keys
        kept = 2 if call.needs_grad and numbers > _KEPT else 1  # stored for backward
        seconds += kept * passes * numbers / SPEED.elements
    return seconds


def dense_passes(call: Call) -> tuple[int, int]:
    """Heads that a dense mask is written for, and passes over each of its elements."""
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
    masked = fully_masked(keep)
    visible = keep | masked
    flag = _four(visible if bias is None else addend(visible, bias, bias.dtype), call)

    def compute(k: Tensor, v: Tensor) -> Tensor:
        return _kernel(call, q, k, v, attn_mask=flag)

    def clamped(k: Tensor, v: Tensor) -> Tensor:
        return _kernel(call, _clamped(q), _clamped(k), v, attn_mask=flag)

    out = run_and_check(call, compute, k, v, keep=keep, rerun=clamped)
    return out.masked_fill(masked, 0.0)


def _kernel(call: Call, q: Tensor, k: Tensor, v: Tensor, **flags: Any) -> Tensor:
    q, k, v = _same_width(q, k, v)
    if call.group > 1:  # a branch: a symbolic comparison is not accepted as a flag
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
    """Whether torch's `is_causal` is right: it aligns the first query with the first key, and masks
    before it scales, so that -inf becomes NaN with a scale of 0 and +inf with a negative one."""
    if not isinstance(call.mask, Causal) or isinstance(call.span.q_start, Tensor):
        return False
    if call.score_bias is not None or call.scale <= 0:
        return False
    return bool(call.span.q_start == call.span.kv_start)


def _clamped(x: Tensor) -> Tensor:
    """Queries or keys whose products cannot overflow: a hidden score of +inf, plus -inf, is NaN.

    Scores of visible keys that are changed by this differ by less than their rounding errors.
    """
    if x.dtype == torch.float16:
        return x  # products of float16 fit float32
    limit = 1e150 if x.dtype == torch.float64 else 1e15
    return x.clamp(-limit, limit)


def _four(mask: Tensor, call: Call) -> Tensor:
    mask = four_dims(mask)
    return mask.expand(*mask.shape[:2], call.num_queries, call.num_keys)


def _same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero columns where values and keys differ in width: the fused kernels need equal widths, and
    the unfused one stores every score."""
    missing = q.shape[-1] - v.shape[-1]
    if missing > 0:
        v = F.pad(v, (0, missing))
    elif missing < 0:
        q, k = F.pad(q, (0, -missing)), F.pad(k, (0, -missing))
    return q, k, v
