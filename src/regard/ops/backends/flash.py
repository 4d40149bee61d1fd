"""torch's FlashAttention kernel for NVIDIA GPUs, called directly.

Its public function, `scaled_dot_product_attention`, takes no window, aligns a causal mask with the
first key, and returns no log-sum-exp. The kernel (Dao 2023, arXiv:2307.08691) has all three, and
takes packed sequences: documents and left padding are segments, computed without a mask.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.ops.backends.common import columns_contiguous, has_flash, same_width
from regard.ops.call import Call, is_empty, shown
from regard.ops.estimates import DIRECT, on_device, visible_share
from regard.ops.partial import Partial, merge
from regard.ops.segments import UNLIMITED, Region, Segments, region_of

_WIDEST = 256  # head dims of the kernel
_MULTIPLE = 8  # of which head dims are multiples: the kernel copies 16 bytes at a time
_OPERATORS = 5  # started by a call
_PACKING = 12  # more operators, where tokens are packed into segments
_COPIES = 3  # times that keys and values are moved, packed


def objection(call: Call) -> str | None:
    if is_empty(call):
        return "flash needs at least one query and one visible key"
    return (
        _device_objection(call)
        or _shape_objection(call)
        or _option_objection(call)
        or _mask_objection(call)
    )


def _device_objection(call: Call) -> str | None:
    kind = call.device.type
    if kind != "cuda":
        return f"flash is for CUDA, got {kind}"
    return None if has_flash(call.device) else "flash needs an NVIDIA GPU since the A100"


def _shape_objection(call: Call) -> str | None:
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"flash is for float16 and bfloat16, got {call.dtype}"
    widest = max(call.head_dim, call.v_head_dim)
    if widest > _WIDEST or widest % _MULTIPLE:
        return f"flash takes head dims of 8, 16 ... {_WIDEST}, got {widest}"
    return None


def _option_objection(call: Call) -> str | None:
    """Why the kernel does not compute the scores of this call."""
    if call.softcap is not None or call.score_bias is not None:
        return "flash adds no score_bias and has no softcap"
    if call.scale <= 0:
        return f"flash takes the largest score before it scales, got scale={shown(call.scale)}"
    if call.dropout:
        return f"flash has no dropout (got {shown(call.dropout)})"
    if call.needs_grad and (call.partial or call.sinks is not None):
        return "flash has no gradient of its log-sum-exp"
    return None


def _mask_objection(call: Call) -> str | None:
    if torch.compiler.is_compiling() or not call.immediate:
        return "flash reads the mask of one call, on plain tensors"
    if region_of(call) is None:
        return (
            "flash takes windows that end at the last key, and documents or left padding of whole "
            "sequences"
        )
    return None


def estimate(call: Call) -> float:
    region = region_of(call)
    assert region is not None
    packed = region.segments is not None
    return on_device(
        call,
        operators=_OPERATORS + _PACKING * packed,
        kernel=DIRECT,
        share=visible_share(call),
        copies=1 + _COPIES * packed,
    )


def run(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Float[Tensor, "B H L Dv"]:
    out, lse = _attend(call, q, k, v)
    if call.sinks is None:
        return out
    return merge(Partial(out, _of_rows(lse)), Partial.of_sinks(call.sinks)).out.to(call.dtype)


def partial(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Partial:
    out, lse = _attend(call, q, k, v)
    return Partial(out.to(lse.dtype), _of_rows(lse))


def _of_rows(lse: Float[Tensor, "B H L"]) -> Float[Tensor, "B H L"]:
    """The log-sum-exp, of fully masked rows -inf: the kernel returns inf for them."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def _attend(
    call: Call, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Float[Tensor, "B H L Dv"], Float[Tensor, "B H L"]]:
    region = region_of(call)
    assert region is not None
    q, k, v = (columns_contiguous(x).transpose(1, 2) for x in same_width(q, k, v))
    if region.segments is None:
        out, lse = _kernel(call, region, q, k, v, None, call.num_queries, call.num_keys)
    else:
        out, lse = _in_segments(call, region, region.segments, q, k, v)
    return out.transpose(1, 2)[..., : call.v_head_dim], lse


def _in_segments(
    call: Call, region: Region, segments: Segments, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Float[Tensor, "B L H D"], Float[Tensor, "B H L"]]:
    """Attention of the tokens in segments; those in none are zeros."""
    shape, tokens = q.shape[:2], segments.tokens
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    if tokens is not None:
        q, k, v = q[tokens], k[tokens], v[tokens]
    out, lse = _kernel(call, region, q, k, v, segments.ends, segments.longest, segments.longest)
    if tokens is not None:
        whole = shape.numel()
        out = out.new_zeros(whole, *out.shape[1:]).index_copy(0, tokens, out)
        lse = lse.new_full((len(lse), whole), -torch.inf).index_copy(1, tokens, lse)
    return out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)


def _kernel(
    call: Call,
    region: Region,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor | None,
    *lengths: int,
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, `[B, H, L]` or `[H, T]`."""
    limits: dict[str, Any] = {}
    if region.band != (UNLIMITED, UNLIMITED):
        limits = {
            "window_size_left": region.band.left,
            "window_size_right": region.band.right,
        }
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, ends, ends, *lengths, 0.0, False, False, scale=call.scale, **limits
    )
    return out, lse
