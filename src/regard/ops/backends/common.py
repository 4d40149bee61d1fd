"""What backends share: masks as addends, hidden keys zeroed, results checked, memory layouts."""

import functools
import math
import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from regard.cache.codes import QuantizedStream
from regard.cache.parts import to_tensor
from regard.constants import accumulating_dtype
from regard.heads import fold_heads, group_heads
from regard.ops.call import Call, is_everything

Readable = Tensor | QuantizedStream  # keys or values
_LINE = 64  # bytes of a line of the processor's cache, where memory of torch begins
Result = TypeVar("Result", Tensor, tuple[Tensor, Tensor])


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


def run_and_check(
    call: Call,
    compute: Callable[[Tensor, Tensor], Result],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    *,
    keep: Tensor | None = None,
    rerun: Callable[[Tensor, Tensor], Result] | None = None,
) -> Result:
    """`compute(k, v)`, in which hidden keys and values that are not finite have no effect.

    A weight of 0 does not remove them: 0 * nan is nan. They are zeroed first or, where checking the
    result is cheaper than copying every key, only if the result is not finite.

    Args:
        keep: the mask as a tensor, where the caller has it already.
        rerun: replaces `compute` on keys and values in which the hidden ones are zeroed.
    """
    if is_everything(call.mask):
        return compute(k, v)
    if may_check(call):
        result = compute(k, v)
        out = result if isinstance(result, Tensor) else result[0]
        if is_finite(out):
            return result
    clean = without_hidden(call, k, v, keep)
    if may_check(call):
        clean = laid_out_as(k, clean[0]), laid_out_as(v, clean[1])
    return (rerun or compute)(*clean)


def run_stored_and_check(
    call: Call, compute: Callable[[Readable, Readable], Result], k: Readable, v: Readable
) -> Result:
    """`run_and_check` of keys and values as they are stored: of codes only the scales can be other
    than finite. In pages whose tokens share scales all are finite."""
    if isinstance(k, Tensor) or isinstance(v, Tensor):
        return run_and_check(call, compute, to_tensor(k), to_tensor(v))
    if k.run > 1:
        return compute(k, v)
    return run_and_check(
        call,
        lambda of_k, of_v: compute(k._replace(scales=of_k), v._replace(scales=of_v)),
        k.scales,
        v.scales,
    )


def is_finite(out: Tensor) -> bool:
    """Whether all elements are finite, by their sum: one pass, where `isfinite` takes several. If
    it overflows, a second run is made, and no result changes."""
    wide = torch.float32 if out.dtype == torch.float16 else None
    return math.isfinite(out.sum(dtype=wide).item())


def may_check(call: Call) -> bool:
    """Whether a call may run first and check its result for NaN: plain CPU tensors and no autograd,
    where reading a value waits for nothing."""
    return call.immediate and not call.needs_grad and call.device.type == "cpu"


def without_hidden(
    call: Call,
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Keys and values, those that the mask hides from every query zeroed; `keep` is the mask as a
    tensor, where the caller has it already."""
    if is_everything(call.mask):
        return k, v
    hidden = hidden_keys(call, call.keep() if keep is None else keep)
    return k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)


def laid_out_as(x: Tensor, values: Tensor) -> Tensor:
    """Values in memory of the strides and the alignment of `x`, on the CPU: the sums of a matrix
    product depend on both, and hidden content may change no bit. Values with a gradient keep their
    own layout, as do those for a tensor that is broadcast."""
    if values is x or values.requires_grad or 0 in x.stride():
        return values
    start = x.data_ptr() % _LINE // x.element_size()
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return x.new_empty(start + span).as_strided(x.shape, x.stride(), start).copy_(values)


def hidden_keys(call: Call, keep: Bool[Tensor, "*some L S"]) -> Bool[Tensor, "#B #G S 1"]:
    """Which keys are hidden from every query of the call."""
    visible = keep.any(-2)
    if visible.dim() < 3:
        return ~visible.reshape(1, 1, -1, 1)
    if visible.shape[1] == 1 or visible.shape[1] == call.num_kv_heads:
        return ~visible.unsqueeze(-1)
    return ~group_heads(visible.unsqueeze(-1), call.num_kv_heads).any(2)


def fully_masked(keep: Bool[Tensor, "*some L S"]) -> Bool[Tensor, "*some L 1"]:
    """Which queries may attend to no key. Kernels get these rows unmasked, and their outputs are
    zeroed afterwards, so that no softmax is ever over nothing, forward or backward."""
    return ~keep.any(-1, keepdim=True)


def addend(
    keep: Bool[Tensor, "..."], bias: Tensor | None, dtype: torch.dtype
) -> Float[Tensor, "..."]:
    """Mask and bias as one tensor to add to scores: bias or 0 where visible, else -inf."""
    if bias is None:
        bias = torch.zeros((), dtype=dtype, device=keep.device)
    return torch.where(keep, bias.to(dtype), -torch.inf)


def four_dims(x: Tensor) -> Tensor:
    """View a tensor that broadcasts to `[B, H, L, S]` with four axes."""
    return x[(None,) * (4 - x.dim())]


def folded_rows(call: Call, x: Tensor, width: int) -> Tensor:
    """Fold a tensor that broadcasts to `[B, H, L, width]` as `fold_heads` folds queries."""
    x = four_dims(x)
    x = x.expand(x.shape[0], call.num_heads, call.num_queries, width)
    return fold_heads(x, call.num_kv_heads)


def flash_on_cpu(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float,
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"]]:
    """torch's CPU flash kernel: the output, in the dtype of the queries, and the log-sum-exp.

    The public function returns no log-sum-exp. This one needs columns side by side, keys as wide as
    values, and in `attn_mask` no row that is -inf as a whole; it has no gradient.
    """
    if not k.shape[2]:  # the kernel divides by the number of blocks of keys: the interpreter ends
        lse = torch.full(
            q.shape[:3], -torch.inf, dtype=accumulating_dtype(q.dtype), device=q.device
        )
        return torch.zeros_like(q), lse
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale
    )
    return out, lse


@functools.cache
def has_flash(device: torch.device) -> bool:
    """Whether torch has FlashAttention and cuDNN for a device: NVIDIA's GPUs since the A100."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def columns_contiguous(x: Tensor) -> Tensor:
    """The same values with columns side by side in memory and without a lazy minus sign: kernels
    that are called directly read them so, and do not check it."""
    return (x if x.stride(-1) == 1 else x.contiguous()).resolve_neg()


def same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad keys or values with zero columns to one width: the fused kernels need equal widths, and
    the unfused one stores every score."""
    missing = q.shape[-1] - v.shape[-1]
    if missing > 0:
        v = F.pad(v, (0, missing))
    elif missing < 0:
        q, k = F.pad(q, (0, -missing)), F.pad(k, (0, -missing))
    return q, k, v
