"""The two sums: of partial results and of partial gradients."""

import torch

from ranks import on_ranks
from regard.distributed.ranks import Ranks, counted, sum_bytes
from regard.distributed.tensor.sums import all_reduce, all_reduce_gradient


def _gradients(mesh):
    ranks = Ranks(mesh)
    factor = float(ranks.rank + 1)
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    with counted() as sent:
        total = all_reduce(all_reduce_gradient(x, ranks, "x") * factor, ranks, "y")
        (total**2).sum().backward()
    with counted() as quiet, torch.no_grad():
        all_reduce_gradient(x, ranks, "x")
    all_reduce_gradient(torch.ones(2), ranks, "x")
    (slope,) = torch.autograd.grad(
        (all_reduce(all_reduce_gradient(x, ranks, "x") ** 3 * factor, ranks, "y")).sum(),
        x,
        create_graph=True,
    )
    (curve,) = torch.autograd.grad(slope.sum(), x)
    return total.detach(), x.grad, sent.steps, quiet.bytes, curve


def test_sums_and_their_gradients():
    """y = (1 + 2 + 3) x, and the loss is y^2 on every rank alike."""
    for total, grad, steps, quiet, curve in on_ranks(3, _gradients):
        assert total.tolist() == [6.0, 12.0]
        assert grad.tolist() == [2 * 6 * 6.0, 2 * 6 * 12.0]
        assert steps == {"x": sum_bytes(16, 3), "y": sum_bytes(16, 3)}
        assert quiet == 0
        assert curve.tolist() == [6 * 6.0, 6 * 6 * 2.0]


def _half(mesh):
    ranks = Ranks(mesh)
    x = torch.full((3,), 1.0 + ranks.rank / 128, dtype=torch.bfloat16)
    with counted() as sent:
        total = all_reduce(x, ranks, "half")
    return total, sent.bytes


def test_half_precision_is_added_up_in_float32():
    for total, nbytes in on_ranks(4, _half):
        exact = sum(1.0 + rank / 128 for rank in range(4))
        assert torch.equal(total, torch.full((3,), exact).to(torch.bfloat16))
        assert nbytes == sum_bytes(12, 4)
