"""The two sums of tensor parallelism: of partial outputs, and of partial gradients.

Where every rank reads a tensor for its own heads, the gradient of that tensor is the sum over the
ranks (`all_reduce_gradient`). Where every rank has a term of a result, the result is their sum
(`all_reduce`). Each is the backward pass of the other (Shoeybi et al. 2019, arXiv:1909.08053,
section 3).
"""

from typing import Any

import torch
from torch import Tensor

from regard.distributed.ranks import Ranks


def all_reduce_gradient(x: Tensor, ranks: Ranks, step: str) -> Tensor:
    """`x` as this rank reads it; in the backward pass, the gradients of all ranks are added up."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    result: Tensor = _Copied.apply(x, ranks, step)  # type: ignore[no-untyped-call]
    return result


def all_reduce(x: Tensor, ranks: Ranks, step: str) -> Tensor:
    """The sum of `x` over the ranks, all of which use it alike: each has the same gradient."""
    result: Tensor = _Summed.apply(x, ranks, step)  # type: ignore[no-untyped-call]
    return result


@torch.compiler.disable(reason="sends to other ranks")  # type: ignore[untyped-decorator]
def _sum(x: Tensor, ranks: Ranks, step: str) -> Tensor:
    return ranks.all_reduce(x, step)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, step: str) -> Tensor:
        ctx.ranks, ctx.step = ranks, step
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # for gradients of gradients
            return all_reduce(grads[0], ctx.ranks, ctx.step), None, None
        return _sum(grads[0], ctx.ranks, ctx.step), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, step: str) -> Tensor:
        ctx.ranks, ctx.step = ranks, step
        return _sum(x, ranks, step)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return all_reduce_gradient(grads[0], ctx.ranks, ctx.step), None, None
