"""Ranks by layer: importance is what an error of a layer's outputs costs, and the dearest stay."""

import itertools

import pytest
import torch

from layers import WIDTH, attention, scattered
from regard.convert import latentize
from regard.convert.lossy.allocating import allot, importance
from regard.convert.lossy.latentize import energies_of
from regard.hf import attention_modules
from tiny import tiny, tokens

SMALL = 1e-3  # an error of the outputs, at which the divergence is quadratic


def divergences(model, module, texts):
    """The divergence of the predictions, summed over each text, under small random errors of one
    layer's outputs."""

    def shift(module, args, out):
        return (out[0] + SMALL * torch.randn_like(out[0]), *out[1:])

    own = model(texts[:1]).logits.log_softmax(-1)
    hook = module.register_forward_hook(shift)
    other = model(texts).logits.log_softmax(-1)
    hook.remove()
    return (own.exp() * (own - other)).sum((1, 2))


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_importance_is_what_an_error_of_the_outputs_costs(family):
    torch.manual_seed(0)
    model, text = tiny(family).double(), tokens(1, 12)
    modules = list(attention_modules(model).values())
    found = importance(model, modules, text.expand(300, -1))
    for module, each in zip(modules, found, strict=True):
        costs = divergences(model, module, text.expand(1000, -1))
        expected = float(each) / 2 * SMALL**2 * text.numel() * model.config.hidden_size
        assert costs.mean().item() == pytest.approx(expected, rel=0.03)
    assert not any(each._forward_hooks for each in modules)


def test_importance_needs_no_gradients_and_leaves_none():
    model = tiny("llama").requires_grad_(False)
    modules, text = list(attention_modules(model).values()), tokens(2, 8)
    with torch.inference_mode():
        frozen = importance(model, modules, text)
    model.requires_grad_(True)
    torch.testing.assert_close(importance(model, modules, text), frozen)
    assert all(each.grad is None for each in model.parameters())


def test_the_ranks_leave_out_the_least():
    costs = [each.sort(descending=True).values for each in torch.rand(3, 6).double()]

    def lost(ranks):
        return sum(float(each[rank:].sum()) for each, rank in zip(costs, ranks, strict=True))

    ranks = allot(costs, 4)
    every = [each for each in itertools.product(range(1, 7), repeat=3) if sum(each) == 12]
    assert sum(ranks) == 12 and lost(ranks) == pytest.approx(min(map(lost, every)))


def test_every_layer_keeps_a_quarter_of_the_mean():
    costs = [torch.zeros(16).double(), torch.ones(16).double()]
    assert allot(costs, 8) == [2, 14]
    assert allot(costs, 16) == [16, 16]
    with pytest.raises(ValueError, match="mean rank 17 have 34 directions, of which are 32"):
        allot(costs, 17)


@torch.no_grad()
def test_energies_are_those_that_a_latent_of_each_rank_loses():
    layer = scattered(attention(2, num_kv_heads=1)).double()
    x = torch.randn(3, 9, WIDTH, dtype=torch.float64)
    energies = energies_of(layer, x)
    for rank in (1, 3):
        lost = latentize(layer, rank=rank, covariance=torch.eye(WIDTH), inputs=x).lost
        assert lost == pytest.approx(float(energies[rank:].sum() / energies.sum()), abs=1e-9)
