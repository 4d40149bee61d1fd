"""What backends share: masks as addends, hidden keys zeroed, results checked, memory layouts."""

from collections.abc import Callable
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.heads import fold_heads, group_heads
from regard.ops.call import Call, is_everything

Result = TypeVar("Result", Tensor, tuple[Tensor, Tensor])


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
        if bool(out.isfinite().all()):
            return result
    keep = call.keep() if keep is None else keep
    return (rerun or compute)(*zero_hidden(call, k, v, keep))


def may_check(call: Call) -> bool:
    """Whether a call may run first and check its result for NaN: plain CPU tensors and no autograd,
    where reading a value waits for nothing."""
    return call.immediate and not call.needs_grad and call.device.type == "cpu"


def without_hidden(
    call: Call, k: Float[Tensor, "B G S D"], v: Float[Tensor, "B G S Dv"]
) -> tuple[Tensor, Tensor]:
    """Keys and values, those that are hidden from every query zeroed."""
    return (k, v) if is_everything(call.mask) else zero_hidden(call, k, v, call.keep())


def zero_hidden(
    call: Call, k: Float[Tensor, "B G S D"], v: Float[Tensor, "B G S Dv"], keep: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for a mask that is a tensor already. Padding and unused slots may hold anything."""
    visible = keep.any(-2)
    if visible.dim() < 3:
        hidden = ~visible.reshape(1, 1, -1, 1)
    elif visible.shape[1] in (1, call.num_kv_heads):
        hidden = ~visible.unsqueeze(-1)
    else:
        hidden = ~group_heads(visible.unsqueeze(-1), call.num_kv_heads).any(2)
    return k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)


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
    """A tensor that broadcasts to `[B, H, L, S]`, with all four axes."""
    return x[(None,) * (4 - x.dim())]


def folded_rows(call: Call, x: Tensor, width: int) -> Tensor:
    """What broadcasts to `[B, H, L, width]`, as the rows that `fold_heads` makes of queries."""
    x = four_dims(x)
    x = x.expand(x.shape[0], call.num_heads, call.num_queries, width)
    return fold_heads(x, call.num_kv_heads)


def columns_contiguous(x: Tensor) -> Tensor:
    """The same values with columns side by side in memory: kernels that are called directly read
    them so, and do not check it."""
    return x if x.stride(-1) == 1 else x.contiguous()
