"""Layers whose tokens are shared out over ranks, against themselves on one device."""

import copy

import torch
from torch import Tensor, nn

from layers import assert_same, inputs
from regard.distributed.context.parallel import context_parallel
from regard.distributed.context.summing import sum_gradients


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in module.named_parameters() if each.requires_grad}


def on_one_device(module: nn.Module, x: Tensor, **call) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of `x` and of all parameters."""
    module, x = copy.deepcopy(module), x.clone().requires_grad_()
    out = module(x, **call)
    (out * seed_of(out)).sum().backward()
    return out.detach(), {**gradients(module), "x": x.grad}


def on_ranks_of(mesh, module: nn.Module, x: Tensor, run=None, positions=None, plan=None, **call):
    """The same, put together from all ranks."""
    module = copy.deepcopy(module)
    plan = context_parallel(module, mesh, **(plan or {}))
    own = plan.shard(x).requires_grad_()
    if positions is not None:
        call["positions"] = plan.shard(positions, -1)
    out = module(own, **call) if run is None else run(module, own, **call)
    (out * plan.shard(seed_of(x.new_empty(*x.shape[:2], out.shape[2])))).sum().backward()
    sum_gradients(module, mesh)
    return plan.gathered(out.detach()), {**gradients(module), "x": plan.gathered(own.grad)}


def seed_of(out: Tensor) -> Tensor:
    """What flows back into an output: another number for each element."""
    generator = torch.Generator().manual_seed(out.numel())
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)


def assert_as_on_one_device(mesh, module, x=None, *, tokens=7, batch=2, plan=None, **call):
    """Outputs and all gradients are those of one device, to rounding in float64."""
    x = inputs(batch, tokens) if x is None else x
    out, wanted = on_one_device(module, x, **call)
    found_out, found = on_ranks_of(mesh, module, x, plan=plan, **call)
    assert_same(found_out, out)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            assert_same(found[name], gradient)
