"""torch's scaled_dot_product_attention, called with the cheapest flags that mean the same."""

import os
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from regard.masks import EVERYTHING, Causal
from regard.ops.backends.common import (
    NO_BFLOAT16,
    addend,
    columns_contiguous,
    flash_on_cpu,
    four_dims,
    fully_masked,
    has_flash,
    hidden_keys,
    is_finite,
    laid_out_as,
    run_and_check,
    same_width,
)
from regard.ops.call import Call, hides_nothing, is_empty, is_everything, shown
from regard.ops.estimates import EFFICIENT, FLASH, kernel_seconds, on_device, visible_share
from regard.ops.mask_tensors import mask_tensors
from regard.ops.partial import Partial
from regard.rates import SPEED
from regard.tracing import has_modes, is_concrete, is_forward_mode, is_transformed, is_vmapped

_KEYS = 512  # keys in a block of it: blocks on the causal diagonal are computed whole
_WIDEST = 256  # head dims of FlashAttention
# Seconds of a call in which cuDNN plans its shape, if 30 layers share 60 ms. Steps of a decoder and
# prompts of other lengths have new shapes; training repeats its shapes, and graphs keep theirs.
_PLANNING = 2e-3
_KEPT = 1 << 24  # elements of a mask: storing more for the backward pass is charged twice


def objection(call: Call) -> str | None:
    objection = run_objection(call)
    return lse_objection(call) if call.partial and objection is None else objection


def run_objection(call: Call) -> str | None:
    """Why torch's kernel cannot compute the output; None if it can."""
    if is_empty(call):
        return "scaled_dot_product_attention needs at least one query and one visible key"
    if call.softcap is not None:
        return f"scaled_dot_product_attention has no softcap (got {shown(call.softcap)})"
    if call.sinks is not None:
        return "scaled_dot_product_attention has no sinks"
    if _rounds_bias(call):
        return (
            f"scaled_dot_product_attention reads biases in {call.dtype} on {call.device.type}, "
            "and would round this score_bias"
        )
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


def _rounds_bias(call: Call) -> bool:
    """Whether a bias is more precise than the queries, in whose dtype kernels for GPUs read it."""
    if call.score_bias is None or call.device.type == "cpu" or call.dtype.itemsize >= 4:
        return False
    return not isinstance(call.score_bias, Tensor) or call.score_bias.dtype != call.dtype


def lse_objection(call: Call) -> str | None:
    """Why torch's kernel returns no log-sum-exp; None if it does. The public function returns none,
    the kernel for CPUs does."""
    if call.device.type != "cpu":
        return f"sdpa gives no log-sum-exp on {call.device.type}"
    if call.dtype.itemsize < 4:
        return f"sdpa gives no log-sum-exp in {call.dtype}: torch's kernel rounds its outputs to it"
    if call.needs_grad:
        return "sdpa gives no log-sum-exp with a gradient"
    traced = torch.compiler.is_compiling() or is_transformed()
    if traced or not (call.immediate or has_modes()):
        return "sdpa gives no log-sum-exp in compiled graphs or torch.func transforms"
    return None


_CALLS = 4  # operators around the kernel
_MASK = 16  # operators that reading a mask takes, which is made once for all layers of a pass


def estimate(call: Call) -> float:
    """The time of the kernel, the operators around it, and the dense mask, if any."""
    if call.device.type != "cpu":
        return _on_device(call)
    share = min(1.0, 0.5 + _KEYS / 2 / call.num_keys) if _is_causal(call) else 1.0
    masked = not (_is_causal(call) or is_everything(call.mask))
    heads = call.batch * call.num_heads
    operators = _CALLS + _MASK * masked + heads / 16
    seconds = SPEED.call * operators + kernel_seconds(
        call,
        heads=heads,
        kv_heads=call.batch * call.num_kv_heads,
        queries=call.num_queries,
        share=share,
    )
    if not (_is_causal(call) or hides_nothing(call)):  # a dense mask is written and read
        heads, passes = dense_passes(call)
        numbers = heads * call.num_queries * call.num_keys
        kept = 2 if call.needs_grad and numbers > _KEPT else 1  # stored for backward
        seconds += kept * passes * numbers / SPEED.elements
    return seconds


def _on_device(call: Call) -> float:
    """The time on a GPU: of FlashAttention, or of the kernel for masks and wide heads."""
    masked = not (_is_causal(call) or hides_nothing(call))
    share = visible_share(call) if _is_causal(call) else 1.0
    planning = _PLANNING if _plans_anew(call, masked) else 0.0
    if _suits_flash(call, masked):
        return planning + on_device(call, operators=3, kernel=FLASH, share=share)
    heads, each = dense_passes(call)
    passes = each * heads / call.num_heads if masked else 0
    return planning + on_device(
        call,
        operators=35 if masked else 5,
        kernel=EFFICIENT,
        share=share,
        passes=passes,
        copies=copies_on_device(call),
    )


def _plans_anew(call: Call, masked: bool) -> bool:
    """Whether torch may take cuDNN's kernel for a call of a shape that it has not seen: that of a
    decoding step, or of a prompt. Prompts under other masks have no quick kernel but this and
    FlexAttention's, which takes longer to compile."""
    if call.needs_grad or call.dtype.itemsize >= 4 or torch.compiler.is_compiling():
        return False
    if not has_flash(call.device):
        return False
    return call.num_queries == 1 or not masked


def copies_on_device(call: Call) -> int:
    """Times that keys and values are moved by the kernel for masks and wide heads, which takes no
    grouped heads: they are repeated."""
    return 1 + (2 * call.group if call.group > 1 else 0)


def _suits_flash(call: Call, masked: bool) -> bool:
    """Whether torch takes FlashAttention on a GPU."""
    widest = max(call.head_dim, call.v_head_dim)
    return widest <= _WIDEST and call.dtype.itemsize < 4 and not masked


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
    if call.score_bias is None and (call.mask is EVERYTHING or is_everything(call.mask)):
        return _kernel(call, q, k, v)
    bias = call.bias()
    if bias is not None and call.device.type != "cpu":
        bias = bias.to(call.dtype)  # exact: others are objected to
    if _is_causal(call):
        return _kernel(call, q, k, v, is_causal=True)
    if is_everything(call.mask):
        assert bias is not None
        return _kernel(call, q, k, v, attn_mask=_four(bias, call))
    mask = mask_tensors(call)
    flag = _four(mask.visible if bias is None else addend(mask.visible, bias, bias.dtype), call)

    def compute(k: Tensor, v: Tensor) -> Tensor:
        return _kernel(call, q, k, v, attn_mask=flag)

    def again(k: Tensor, v: Tensor) -> Tensor:
        return _kernel(call, clamped(q), clamped(k), v, attn_mask=flag)

    out = run_and_check(call, compute, k, v, keep=mask.keep, rerun=again)
    return out if mask.masked is None else out.masked_fill(mask.masked, 0.0)


def partial(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Partial:
    causal, masked, keep = _is_causal(call), None, None
    q, k, v = map(columns_contiguous, same_width(q, k, v))
    flags: dict[str, Any] = {"is_causal": causal, "scale": call.scale}
    added = call.bias()
    if not (causal or is_everything(call.mask)):
        keep = call.keep()
        masked = fully_masked(keep)
        added = addend(keep | masked, added, call.dtype)
    if added is not None:
        flags["attn_mask"] = _four(added, call)

    def compute(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_on_cpu(q, k, v, **flags)

    def again(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_on_cpu(clamped(q), clamped(k), v, **flags)

    if keep is None:
        out, lse = compute(k, v)
    else:
        out, lse = run_and_check(call, compute, k, v, keep=keep, rerun=again)
    if masked is not None:
        out, lse = out.masked_fill(masked, 0.0), lse.masked_fill(masked.squeeze(-1), -torch.inf)
    return Partial(out[..., : call.v_head_dim], lse)


class Hiding(NamedTuple):
    """A mask for torch's kernel: a tensor to add, and rows and keys to set to zero.

    Attributes:
        added: 0 where a key is visible, else -inf; fully masked rows are 0.
        masked: which queries may attend to no key; None if each may attend to some.
        hidden: which keys are hidden from every query; None if none is.
    """

    added: Float[Tensor, "#B #H L S"]
    masked: Bool[Tensor, "*some L 1"] | None
    hidden: Bool[Tensor, "#B #G S 1"] | None

    def without_hidden(self, *streams: Tensor) -> tuple[Tensor, ...]:
        """Keys or values, those that are hidden from every query zeroed."""
        hidden = self.hidden
        return streams if hidden is None else tuple(x.masked_fill(hidden, 0) for x in streams)

    def without_masked(self, x: Tensor) -> Tensor:
        """Zero the rows of queries that are fully masked."""
        return x if self.masked is None else x.masked_fill(self.masked, 0.0)


def hiding_of(call: Call) -> Hiding:
    """The mask of a call without a bias, as `run_masked` takes it."""
    keep = call.keep()
    masked, hidden = fully_masked(keep), hidden_keys(call, keep)
    none_masked = call.immediate and not bool(masked.any())
    none_hidden = call.immediate and not bool(hidden.any())
    added = _four(addend(keep if none_masked else keep | masked, None, call.dtype), call)
    return Hiding(added, None if none_masked else masked, None if none_hidden else hidden)


def run_masked(call: Call, q: Tensor, k: Tensor, v: Tensor, hiding: Hiding) -> Tensor:
    """`run` with a mask that is made already; on the CPU, for immediate calls without gradients."""
    out = _kernel(call, q, k, v, attn_mask=hiding.added)
    if not is_finite(out):
        clean = hiding.without_hidden(k, v)
        k, v = laid_out_as(k, clean[0]), laid_out_as(v, clean[1])
        out = _kernel(call, clamped(q), clamped(k), v, attn_mask=hiding.added)
    return hiding.without_masked(out)


def _kernel(call: Call, q: Tensor, k: Tensor, v: Tensor, **flags: Any) -> Tensor:
    if call.head_dim != call.v_head_dim:
        q, k, v = same_width(q, k, v)
    # a branch: a symbolic comparison is not accepted as a flag
    if call.num_heads != call.num_kv_heads:
        if call.device.type == "cpu" or _suits_flash(call, "attn_mask" in flags):
            flags["enable_gqa"] = True
        else:  # the kernel for masks takes no grouped heads: torch would store all scores
            k, v = k.repeat_interleave(call.group, 1), v.repeat_interleave(call.group, 1)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        dropout_p=call.dropout,
        scale=call.scale,
        **flags,
    )
    return out if call.v_head_dim >= call.head_dim else out[..., : call.v_head_dim]


def _is_causal(call: Call) -> bool:
    """Whether torch's `is_causal` is right: it aligns the first query with the first key, and masks
    before it scales, so that -inf becomes NaN with a scale of 0 and +inf with a negative one."""
    if not isinstance(call.mask, Causal) or isinstance(call.span.q_start, Tensor):
        return False
    if call.score_bias is not None or call.scale <= 0:
        return False
    return bool(call.span.q_start == call.span.kv_start)


def clamped(x: Tensor) -> Tensor:
    """Queries or keys whose products cannot overflow: a hidden score of +inf, plus -inf, is NaN.

    Scores of visible keys that are changed by this differ by less than their rounding errors.
    """
    if x.dtype == torch.float16:
        return x  # products of float16 fit float32
    limit = 1e150 if x.dtype == torch.float64 else 1e15
    small = x.clamp(-limit, limit)
    if x.device.type != "cpu" or not is_concrete(x):
        return small
    return x if small.equal(x) else laid_out_as(x, small)


def _four(mask: Tensor, call: Call) -> Tensor:
    mask = four_dims(mask)
    return mask.expand(*mask.shape[:2], call.num_queries, call.num_keys)
