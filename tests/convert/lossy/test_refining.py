"""Steps on one layer bring its outputs nearer to those wanted; what it shares stays as it is."""

import pytest
import torch

from layers import WIDTH, attention
from regard.convert import latentize, regroup
from regard.convert.lossy.refining import refine


def missed(layer, x, wanted):
    with torch.no_grad():
        return float((layer(x) - wanted).square().mean())


def converted(kind, x):
    """A layer whose cache is a third of the own layer's, and the outputs that it should have."""
    own = attention(num_kv_heads=2).double()
    moments = torch.eye(WIDTH, dtype=x.dtype)
    if kind == "latent":
        return own, latentize(own, rank=8, covariance=moments).layer, own(x).detach()
    return own, regroup(own, 1, covariance=moments).layer, own(x).detach()


@pytest.mark.parametrize("kind", ["latent", "heads"])
def test_the_steps_are_those_of_adam_on_the_error_of_one_window_at_a_time(kind):
    torch.manual_seed(0)
    x = torch.randn(5, 9, WIDTH, dtype=torch.float64)
    own, layer, wanted = converted(kind, x)
    names = [
        n for n in ("q_proj", "k_proj", "v_proj", "kv_a_proj", "kv_b_proj") if hasattr(layer, n)
    ]
    weights = {name: getattr(layer, name).weight.detach().clone() for name in names}
    means = {name: torch.zeros_like(each) for name, each in weights.items()}
    squares = {name: torch.zeros_like(each) for name, each in weights.items()}
    sizes = {name: 3e-3 * each.square().mean().sqrt() for name, each in weights.items()}
    chance = torch.Generator().manual_seed(0)
    order = [*torch.randperm(5, generator=chance), *torch.randperm(5, generator=chance)]
    for step, at in enumerate(order, start=1):
        out = torch.func.functional_call(
            layer, {f"{n}.weight": w.requires_grad_() for n, w in weights.items()}, x[at][None]
        )
        error = (out - wanted[at]).square().mean() / wanted.square().mean()
        slopes = dict(zip(names, torch.autograd.grad(error, [*weights.values()]), strict=True))
        for name in names:
            means[name] = 0.9 * means[name] + 0.1 * slopes[name]
            squares[name] = 0.99 * squares[name] + 0.01 * slopes[name] ** 2
            ahead = means[name] / (1 - 0.9**step)
            ahead = ahead / ((squares[name] / (1 - 0.99**step)).sqrt() + 1e-8)
            size = sizes[name] * min(1, step / 4) * (1 - (step - 1) / 10)
            weights[name] = (weights[name] - size * ahead).detach()
    before, shared = missed(layer, x, wanted), own.q_proj.weight.detach().clone()
    refine(layer, x, wanted, passes=2)
    for name, weight in weights.items():
        torch.testing.assert_close(getattr(layer, name).weight.detach(), weight)
    assert missed(layer, x, wanted) < before
    assert torch.equal(own.q_proj.weight, shared)


def test_weights_of_half_precision_are_trained_in_float32_and_rounded():
    torch.manual_seed(0)
    x = torch.randn(4, 9, WIDTH)
    _, layer, wanted = converted("latent", x.double())
    layer.bfloat16()
    refine(layer, x.bfloat16(), wanted.bfloat16(), passes=1)
    assert {each.dtype for each in layer.parameters()} == {torch.bfloat16}
    assert all(each.grad is None for each in layer.parameters())


def test_inputs_of_inference_mode_are_trained_on():
    x = torch.randn(4, 9, WIDTH, dtype=torch.float64)
    _, layer, wanted = converted("latent", x)
    with torch.inference_mode():
        refine(layer, x.clone(), wanted.clone(), passes=1)
        assert missed(layer, x, wanted) > 0
