"""Blocks of queries through torch's CPU kernel, forward and backward, in memory linear in length.

The kernel's backward pass recomputes the weights from the log-sum-exp of the scores, so that a
block saves nothing but that (FlashAttention, arXiv:2205.14135). Gradients of keys are added up in
place, where autograd would make a tensor as long as the sequence for each block.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.constants import accumulating_dtype
from regard.masks import Causal
from regard.ops.backends.common import columns_contiguous, flash_on_cpu, is_finite
from regard.ops.backends.sdpa import Hiding, clamped
from regard.ops.blocks import Block, Gathered
from regard.ops.call import Call

_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Step(NamedTuple):
    """A block, its call, and its mask as a tensor where the kernel needs one."""

    block: Block
    part: Call
    hiding: Hiding | None

    def flags(self) -> dict[str, Any]:
        """The arguments of the kernel."""
        added = None if self.hiding is None else self.hiding.added
        causal = self.hiding is None and isinstance(self.part.mask, Causal)
        return {"is_causal": causal, "attn_mask": added, "scale": self.part.scale}


Steps = Callable[[], Iterator[Step]]


def run(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    blocks: list[Block],
    steps: Steps,
    check: Callable[[], None],
) -> Float[Tensor, "B H L D"]:
    """Attention block by block, with a gradient.

    Args:
        blocks: those with a visible key.
        steps: returns the steps of the blocks; called again by the backward pass.
        check: called before the backward pass reads keys and values.
    """
    q, k, v = map(columns_contiguous, (q, k, v))
    out: Tensor = _Blocks.apply(q, k, v, blocks, steps, check)  # type: ignore[no-untyped-call]
    return out


class _Blocks(torch.autograd.Function):
    """All blocks of a call as one operation."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: list[Block],
        steps: Steps,
        check: Callable[[], None],
    ) -> Tensor:
        keys, values = Gathered(k, blocks), Gathered(v, blocks)
        out, lses, careful = q.new_zeros(q.shape), [], []
        for step in steps():
            block = step.block
            inputs = block.of_queries(q), keys.of(block), values.of(block)
            result, lse, again = forward_block(step, *inputs)
            block.of_queries(out).copy_(result)
            lses.append(lse)
            careful.append(again)
        ctx.save_for_backward(q, k, v, out, *lses)
        ctx.careful, ctx.blocks, ctx.steps, ctx.check = careful, blocks, steps, check
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        ctx.check()
        saved = ctx.saved_tensors  # read once: a checkpoint that is not reentrant allows no more
        grads = without_derivative(_gradients(ctx, slope, *saved), slope, *saved[:3])
        return *grads, None, None, None


@torch.no_grad()
def _gradients(ctx: Any, slope: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, *lses = saved
    keys, values = Gathered(k, ctx.blocks), Gathered(v, ctx.blocks)
    dtype = accumulating_dtype(q.dtype)  # blocks that share keys add up their gradients
    grad_q, grad_k = q.new_zeros(q.shape), k.new_zeros(k.shape, dtype=dtype)
    grad_v = v.new_zeros(v.shape, dtype=dtype)
    for step, lse, again in zip(ctx.steps(), lses, ctx.careful, strict=True):
        block = step.block
        inputs = block.of_queries(q), keys.of(block), values.of(block)
        slopes = columns_contiguous(block.of_queries(slope))
        of_q, *of_keys = backward_block(step, again, slopes, block.of_queries(out), lse, *inputs)
        block.of_queries(grad_q).copy_(of_q)
        for total, grad in zip((grad_k, grad_v), of_keys, strict=True):
            block.add_to_keys(total, grad)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def without_derivative(
    grads: tuple[Tensor | None, ...], *read: Tensor | None
) -> tuple[Tensor, ...]:
    """Return gradients unchanged, through an operation of autograd that refuses a second
    derivative, which would silently be 0 otherwise."""
    return tuple(_Gradients.apply(grads, *read))  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grads: Any, *read: Tensor) -> Any:
        return grads

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        raise ValueError(
            "attention in blocks, by a compiled kernel or over ranks has no second derivative, "
            "because its backward pass is not recorded; on one device backend='eager' has every "
            "derivative"
        )


def forward_block(step: Step, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Outputs and log-sum-exps of a block, and whether its inputs had to be clamped: a hidden score
    that overflows to +inf, plus -inf, is NaN."""
    flags, hiding = step.flags(), step.hiding
    if hiding is None:
        return *flash_on_cpu(q, k, v, **flags), False
    k, v = hiding.without_hidden(k, v)
    out, lse = flash_on_cpu(q, k, v, **flags)
    careful = not step.part.immediate or not is_finite(out)
    if careful:
        out, lse = flash_on_cpu(clamped(q), clamped(k), v, **flags)
    return hiding.without_masked(out), lse, careful


def for_masked(step: Step, lse: Tensor, value: float) -> Tensor:
    """The log-sum-exps of a block, with this value for queries that may attend to no key of it."""
    masked = None if step.hiding is None else step.hiding.masked
    return lse if masked is None else lse.masked_fill(masked.squeeze(-1), value)


def backward_block(
    step: Step,
    careful: bool,
    slope: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, keys and values of a block."""
    flags, hiding = step.flags(), step.hiding
    causal = flags.pop("is_causal")
    if hiding is None:
        grads = _BACKWARD(slope, q, k, v, out, lse, 0.0, causal, **flags)
        return grads[0], grads[1], grads[2]
    slope = hiding.without_masked(slope)
    k, v = hiding.without_hidden(k, v)
    kept = (clamped(q), clamped(k)) if careful else (q, k)
    of_q, of_k, of_v = _BACKWARD(slope, *kept, v, out, lse, 0.0, causal, **flags)
    if careful:  # as for `clamp`: no gradient beyond its limits
        of_q, of_k = of_q.where(kept[0] == q, 0.0), of_k.where(kept[1] == k, 0.0)
    return of_q, *hiding.without_hidden(of_k, of_v)
