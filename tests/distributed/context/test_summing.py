"""Gradients of parameters added up over the ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from layers import inputs, make
from ranks import on_ranks
from regard.distributed.context import summing
from regard.distributed.context.summing import sum_gradients
from regard.distributed.ranks import Ranks, counted, sum_bytes


class Several(nn.Module):
    """Parameters of two dtypes, one frozen, one without gradients, one with them on one rank."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(3, 2))
        self.short = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(2))
        self.once = nn.Parameter(torch.zeros(4))


def _summed(mesh, message):
    ranks, module = Ranks(mesh), Several()
    module.wide.grad = torch.full((3, 2), ranks.rank + 1.0)
    # 1 and 2 ** -8 have no sum in bfloat16: three of them only in float32
    module.short.grad = torch.full((5,), 2.0**-8 if ranks.rank else 1.0, dtype=torch.bfloat16)
    if ranks.rank == 1:
        module.once.grad = torch.full((4,), 3.0)
    held = module.wide.grad
    with pytest.MonkeyPatch.context() as patch, counted() as sent:
        patch.setattr(summing, "MESSAGE", message)
        sum_gradients(module, mesh)
    assert module.wide.grad is held
    return {name: each.grad for name, each in module.named_parameters()}, sent.steps


@pytest.mark.parametrize("message", [1 << 25, 4])
def test_gradients_are_added_in_float32(message):
    for found, steps in on_ranks(3, _summed, message):
        assert torch.equal(found["wide"], torch.full((3, 2), 6.0))
        assert torch.equal(found["short"], torch.full((5,), 1 + 2.0**-7, dtype=torch.bfloat16))
        assert torch.equal(found["once"], torch.full((4,), 3.0))
        assert found["unused"] is None
        assert found["frozen"] is None
        sizes = [5, 6 + 4] if message > 4 else [5, 6, 4]
        assert steps["sum of gradients"] == sum(sum_bytes(4 * n, 3) for n in sizes)


def _refused(mesh):
    other = nn.Linear(2, 2 + mesh.get_local_rank())
    with pytest.raises(ValueError, match="differ in trained parameters: rank 0 weight") as caught:
        sum_gradients(other, mesh)
    wrapped = fully_shard(make("GQA").float(), mesh=mesh)
    with pytest.raises(ValueError, match=r"q_proj\.weight is a DTensor over these ranks"):
        sum_gradients(wrapped, mesh)
    wrapped(inputs(1, 3).float()).sum().backward()
    return str(caught.value)


def test_other_parameters_and_split_ones_are_refused():
    assert len(set(on_ranks(2, _refused))) == 1
