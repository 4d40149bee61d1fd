"""Sums of gradients and gathers of outputs over ranks that share the tokens of a sequence."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from regard.distributed.context.agreement import agree
from regard.distributed.ranks import Ranks
from regard.distributed.shards import Layout, Shards, shards_of


def sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Add up the gradients of a module's parameters over the ranks, in float32.

    After the backward pass of a context-parallel model each rank has the gradients of its own
    tokens; their sum is that of the whole sequence, if the loss of a rank is its tokens' share of
    the whole loss. FSDP2 on the same mesh does this by itself (and divides by the ranks).

    Args:
        module: the same on every rank. A parameter without a gradient on every rank keeps none.
        mesh: of one dimension, the ranks.

    Raises:
        ValueError: on every rank and before anything is changed, if a parameter is split over these
            ranks, or the ranks have other parameters.

    Examples:
        >>> import torch
        >>> from regard.distributed import sum_gradients
        >>> try:
        ...     sum_gradients(torch.nn.Linear(2, 2), mesh=None)
        ... except TypeError:
        ...     print('a mesh: init_device_mesh("cpu", (2,))')
        a mesh: init_device_mesh("cpu", (2,))
    """
    ranks = Ranks(mesh)
    named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    shapes = "; ".join(f"{name} {each.dtype} {list(each.shape)}" for name, each in named)
    agree(ranks, {"trained parameters": shapes}, refusal=_refusal(named, ranks))
    present = [each.grad is not None for _, each in named]
    here = torch.tensor(present, dtype=torch.uint8, device=mesh.device_type)
    flags = ranks.all_gather(here, "which parameters have gradients")
    anywhere = torch.stack(flags).any(0).tolist()
    trained = [each for (_, each), used in zip(named, anywhere, strict=True) if used]
    for group in _messages(trained):
        _sum(group, ranks)


def _refusal(named: list[tuple[str, nn.Parameter]], ranks: Ranks) -> ValueError | None:
    """Why a parameter's gradients cannot be added up; None if all can."""
    mine = set(ranks.members)
    for name, each in named:
        mesh = getattr(each, "device_mesh", None)  # of a DTensor
        if mesh is not None and len(mine & set(mesh.mesh.flatten().tolist())) > 1:
            return ValueError(
                f"{name} is a DTensor over these ranks, as FSDP2 makes it, which adds up its "
                "gradients in the backward pass; leave sum_gradients out"
            )
    return None


MESSAGE = 1 << 25  # elements of a message: 128 MiB of float32, far above what links need to be busy


def _messages(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Groups of parameters of one dtype, to be sent together."""
    group: list[nn.Parameter] = []
    for each in sorted(parameters, key=lambda each: str(each.dtype)):
        size = sum(map(torch.numel, group))
        if group and (size + each.numel() > MESSAGE or group[0].dtype != each.dtype):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


@torch.no_grad()
def _sum(parameters: list[nn.Parameter], ranks: Ranks) -> None:
    """Add up the gradients of some parameters, in one message."""
    own = [_gradient(each) for each in parameters]
    total = ranks.all_reduce(torch.cat([each.flatten() for each in own]), "sum of gradients")
    for each, local, piece in zip(
        parameters, own, total.split([each.numel() for each in own]), strict=True
    ):
        local.copy_(piece.view_as(local))
        if each.grad is None:
            each.grad = local


def _gradient(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient as a plain tensor, zeros if there is none."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def gathered(x: Tensor, ranks: Ranks, layout: Layout, dim: int) -> Tensor:
    """The whole sequence of every rank's tokens, with gradients."""
    dim = dim % x.dim()
    wanted = torch.is_grad_enabled() and x.requires_grad
    shape = [size for index, size in enumerate(x.shape) if index != dim]
    facts: dict[str, int | str] = {
        "tokens to gather": f"{x.dtype} {shape} dim {dim}",
        "gradients": str(wanted),
    }
    (lengths,) = agree(ranks, facts, [x.shape[dim]])
    shards = shards_of(lengths, layout)
    whole: Tensor = _Gathered.apply(x, ranks, shards, dim)  # type: ignore[no-untyped-call]
    return whole


def whole_of(ranks: Ranks, shards: Shards, x: Tensor, step: str, dim: int = 1) -> Tensor:
    """Gather this rank's tokens to those of the sequence, without gradients."""
    missing = max(shards.lengths) - x.shape[dim]
    filler = x.new_zeros([missing if i == dim else n for i, n in enumerate(x.shape)])
    pieces = ranks.all_gather(torch.cat([x, filler], dim), step)
    cut = [piece.narrow(dim, 0, n) for piece, n in zip(pieces, shards.lengths, strict=True)]
    return shards.joined(cut, dim)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, shards: Shards, dim: int) -> Tensor:
        ctx.ranks, ctx.shards, ctx.dim = ranks, shards, dim
        return whole_of(ranks, shards, x, "tokens of the whole sequence", dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        total = ctx.ranks.all_reduce(gradient, "gradients of the whole sequence")
        return ctx.shards.take(total, ctx.ranks.rank, ctx.dim), None, None, None
