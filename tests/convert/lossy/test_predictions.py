"""Gradients of predictions by keys and values, block by block, against one backward pass."""

import pytest
import torch

from regard.convert.lossy.predictions import gradients_of_predictions
from regard.hf import attention_modules
from tiny import FAMILIES, tiny, tokens

SMALL = 1e-3  # an error of keys and values, at which the divergence is quadratic


def in_one_pass(model, windows):
    """The same by torch's graph of the whole model; the model's own projections are hooked."""
    modules, chance = attention_modules(model).values(), torch.Generator().manual_seed(0)
    found = [[] for _ in modules]
    for window in windows.split(1):
        outs: list[torch.Tensor] = []
        hooks = [
            each.register_forward_hook(lambda module, args, out, outs=outs: outs.append(out))
            for module in modules
            for each in (module.k_proj, module.v_proj)
        ]
        likelihood = model(window).logits[0].log_softmax(-1)
        for hook in hooks:
            hook.remove()
        drawn = torch.multinomial(likelihood.detach().exp(), 1, generator=chance)
        slopes = torch.autograd.grad(likelihood.gather(1, drawn).sum(), outs)
        for index, each in enumerate(found):
            each.append(torch.cat(slopes[2 * index : 2 * index + 2], -1)[0])
    return [torch.cat(each) for each in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_one_by_one_are_the_whole_model(family):
    model, windows = tiny(family).float(), tokens(3, 12)
    expected = in_one_pass(model, windows)
    steps = []
    with torch.no_grad():
        found = gradients_of_predictions(model, windows, progress=lambda *at: steps.append(at))
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]
    for one, other in zip(found, expected, strict=True):
        assert float(other.norm()) > 0
        torch.testing.assert_close(one.float(), other, rtol=2**-7, atol=1e-4 * float(other.norm()))


def test_the_model_and_the_mode_of_the_caller_do_not_matter():
    model, windows = tiny("llama"), tokens(2, 8)
    expected = gradients_of_predictions(model, windows)
    assert all(each.grad is None for each in model.parameters())
    model.requires_grad_(False)
    with torch.inference_mode():
        found = gradients_of_predictions(model, windows)
    for one, other in zip(found, expected, strict=True):
        assert one.equal(other)
    assert not any(module._forward_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_half_their_mean_square_is_the_divergence_that_errors_cause(family):
    """Errors of all keys and values of one layer, independent and of one size."""
    torch.manual_seed(0)
    model, text = tiny(family).double(), tokens(1, 12)
    found = gradients_of_predictions(model, text.expand(300, -1))
    many = text.expand(1000, -1)
    own = model(text).logits.log_softmax(-1)
    for module, gradients in zip(attention_modules(model).values(), found, strict=True):
        hooks = [
            each.register_forward_hook(lambda _, args, out: out + SMALL * torch.randn_like(out))
            for each in (module.k_proj, module.v_proj)
        ]
        other = model(many).logits.log_softmax(-1)
        for hook in hooks:
            hook.remove()
        cost = (own.exp() * (own - other)).sum((1, 2)).mean().item()
        squares = gradients.double().square().sum(1).mean().item()
        assert cost == pytest.approx(SMALL**2 / 2 * squares * text.numel(), rel=0.05)
