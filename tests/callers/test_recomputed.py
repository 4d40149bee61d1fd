"""Dropout that is drawn again where activations are: the same numbers, and the generator's too."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from callers.calls_of_attend import LONG
from callers.calls_of_layers import LAYERS
from callers.programs import drawn
from regard import Causal, SlidingWindow, attend


def run(call, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Output, gradients and the next random number after the same seed."""
    inputs = tuple(each.clone().requires_grad_() for each in inputs)
    torch.manual_seed(5)
    out = call(*inputs)
    out.backward(torch.ones_like(out))
    return out.detach(), *(each.grad for each in inputs), torch.rand(1)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_drop_the_same_weights_again(name, reentrant):
    program = LAYERS[name].build()
    program.layer.train().dropout = 0.4
    again = lambda x: checkpoint(program, x, use_reentrant=reentrant)  # noqa: E731
    plain = run(program, program.inputs)
    for a, b in zip(run(again, program.inputs), plain, strict=True):
        assert torch.equal(a, b)
    program.layer.dropout = 0.0
    assert not torch.equal(run(program, program.inputs)[0], plain[0])


def test_blocks_drop_the_same_weights_again():
    """Against the definition of a gradient, since nothing else draws the same weights."""
    shape = (1, LONG.heads, LONG.queries, 8)
    q, k, v = (drawn(*shape, seed=seed, dtype=torch.float64) for seed in range(3))
    mask = Causal() & SlidingWindow(40)

    def call(v: Tensor) -> Tensor:
        return attend(q, k, v, mask=mask, dropout=0.4, backend="blocked")

    out, grad, _ = run(call, (v,))
    torch.testing.assert_close((grad * v).sum(), out.sum())  # the output is linear in the values
