"""Gradients of predictions by keys, values and outputs, block by block, against torch's graph."""

import pytest
import torch

from regard.convert import drawing
from regard.convert.lossy.predictions import gradients_of_predictions
from regard.hf import attention_modules
from tiny import FAMILIES, tiny, tokens

SMALL = 1e-3  # an error of keys and values, at which the divergence is quadratic


def in_one_pass(model, windows):
    """The same by torch's graph of the whole model; its own projections and attention are hooked.
    Gradients by keys and values, and by the attention's outputs, of each layer."""
    modules, chance = attention_modules(model).values(), torch.Generator().manual_seed(0)
    found = [([], []) for _ in modules]
    for window in windows.split(1):
        outs: list[torch.Tensor] = []
        hooks = [
            each.register_forward_hook(
                lambda module, args, out, outs=outs: outs.append(out_of(out))
            )
            for module in modules
            for each in (module.k_proj, module.v_proj, module)
        ]
        likelihood = model(window).logits[0].log_softmax(-1)
        for hook in hooks:
            hook.remove()
        drawn = drawing.drawn(likelihood.detach().exp(), chance)
        slopes = torch.autograd.grad(likelihood.gather(1, drawn).sum(), outs)
        for index, (stored, outputs) in enumerate(found):
            k, v, own = slopes[3 * index : 3 * index + 3]
            stored.append(torch.cat([k, v], -1)[0])
            outputs.append(own[0])
    return [(torch.cat(stored), torch.cat(outputs)) for stored, outputs in found]


def out_of(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_one_by_one_are_the_whole_model(family):
    model, windows = tiny(family).float(), tokens(3, 12)
    expected = in_one_pass(model, windows)
    steps = []
    with torch.no_grad():
        found = gradients_of_predictions(model, windows, progress=lambda *at: steps.append(at))
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]
    for (one, metric), (other, outputs) in zip(found, expected, strict=True):
        assert float(other.norm()) > 0
        torch.testing.assert_close(one.float(), other, rtol=2**-7, atol=1e-4 * float(other.norm()))
        wanted = (outputs.mT @ outputs / len(outputs)).double()
        torch.testing.assert_close(metric, wanted, rtol=1e-3, atol=1e-4 * float(wanted.norm()))


def test_the_model_and_the_mode_of_the_caller_do_not_matter():
    model, windows = tiny("llama"), tokens(2, 8)
    expected = gradients_of_predictions(model, windows)
    assert all(each.grad is None for each in model.parameters())
    model.requires_grad_(False)
    with torch.inference_mode():
        found = gradients_of_predictions(model, windows)
    for one, other in zip(found, expected, strict=True):
        assert one.keys_and_values.equal(other.keys_and_values) and one.metric.equal(other.metric)
    assert not any(module._forward_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_half_their_mean_square_is_the_divergence_that_errors_cause(family):
    """Errors of all keys and values of one layer, or of its outputs, independent, of one size. The
    mean over 300 draws of the tokens has a standard deviation of 5 %."""
    torch.manual_seed(0)
    model, text = tiny(family).double(), tokens(1, 12)
    found = gradients_of_predictions(model, text.expand(300, -1))
    own = model(text).logits.log_softmax(-1)
    for module, gradients in zip(attention_modules(model).values(), found, strict=True):
        for changed, squares in (
            (
                (module.k_proj, module.v_proj),
                gradients.keys_and_values.double().square().sum(1).mean(),
            ),
            ((module.o_proj,), gradients.metric.trace()),
        ):
            hooks = [
                each.register_forward_hook(lambda _, args, out: out + SMALL * torch.randn_like(out))
                for each in changed
            ]
            other = model(text.expand(1000, -1)).logits.log_softmax(-1)
            for hook in hooks:
                hook.remove()
            cost = (own.exp() * (own - other)).sum((1, 2)).mean().item()
            wanted = SMALL**2 / 2 * squares.item() * text.numel()
            assert cost == pytest.approx(wanted, rel=0.15)
