"""Block by block, a layer gets the inputs it will have, and the outputs that correct errors."""

import copy

import pytest
import torch

from regard.convert import Moments, Step, refit_output, spell_out, walk, watch
from regard.hf import attention_modules, attention_of, install, place
from tiny import tiny, tokens


def own(step: Step):
    return attention_of(step.module)


def wrong(step: Step):
    """The layer, with negated values in the first block alone."""
    layer = spell_out(attention_of(step.module))
    if step.index == 0:
        layer.v_proj.weight.data = -layer.v_proj.weight.data
    return layer


@torch.no_grad()
def test_a_walk_with_the_models_own_layers_changes_nothing():
    model, text = tiny("llama"), tokens(5, 20)
    seen = []

    def make(step):
        seen.append(step)
        return own(step)

    before = model(text).logits
    (layers,) = walk(model, text, [make])
    assert len(layers) == len(seen) == 2
    for step, layer in zip(seen, layers, strict=True):
        torch.testing.assert_close(layer(step.x), step.target, atol=1e-5, rtol=1e-4)
    assert torch.equal(model(text).logits, before)


@torch.no_grad()
def test_a_layers_inputs_come_from_the_converted_layers_before_it():
    text, seen = tokens(3, 20), {}

    def make(step):
        seen[step.index] = step
        return wrong(step)

    model = tiny("llama")
    plain, (layers, _) = {}, walk(model, text, [make, own])
    walk(model, text, [lambda step: plain.setdefault(step.index, step) and own(step)])
    assert torch.equal(seen[0].x, plain[0].x)
    assert not torch.allclose(seen[1].x, plain[1].x, atol=1e-3)
    changed = place(
        tiny("llama"), layers
    )  # equal weights: the inputs of its second layer are these
    read = []
    module = list(attention_modules(changed).values())[1]
    hook = module.register_forward_pre_hook(
        lambda m, args, given: read.append(given["hidden_states"]), with_kwargs=True
    )
    changed(text)
    hook.remove()
    torch.testing.assert_close(read[0], seen[1].x, atol=1e-5, rtol=1e-4)
    drift = seen[1].target - plain[1].target
    assert float(drift.abs().max()) > 1e-3  # the second is to correct the error of the first


def test_an_installed_model_is_refused():
    model = tiny("llama")
    install(model)
    with pytest.raises(ValueError, match="uninstall first"):
        walk(model, tokens(1, 8), [own])


@torch.no_grad()
def test_a_refit_recovers_the_projection_and_reports_both_errors():
    layer = attention_of(next(iter(attention_modules(tiny("llama")).values()))).double()
    x = torch.randn(4, 50, 24, dtype=torch.float64)
    wanted, weight = layer(x), layer.o_proj.weight.clone()
    layer.o_proj = torch.nn.Linear(*reversed(weight.shape), bias=False).double()
    missed, still = refit_output(layer, x, wanted, ridge=1e-9)
    assert missed > 0.1 and still < 1e-9
    torch.testing.assert_close(layer.o_proj.weight, weight, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_error_that_a_refit_reports_is_the_measured_one():
    layer = attention_of(next(iter(attention_modules(tiny("llama")).values()))).double()
    x, wanted = torch.randn(2, 4, 50, 24, dtype=torch.float64)
    missed, still = refit_output(layer, x, wanted)
    share = float((wanted - layer(x)).square().sum() / wanted.square().sum())
    assert still == pytest.approx(share, rel=1e-9)
    assert still < missed


def test_moments_add_up_over_calls():
    layer, (x, y) = torch.nn.Linear(3, 3), torch.randn(2, 4, 3)
    with watch([layer]) as (moments,):
        layer(x)
        layer(y)
    layer(x)  # after the block: not added
    rows = torch.cat([x, y]).double()
    assert moments.tokens == 8
    torch.testing.assert_close(moments.covariance, rows.mT @ rows / 8)


def test_moments_without_tokens_are_refused():
    with pytest.raises(ValueError, match="no token was added"):
        Moments().covariance  # noqa: B018  (a property that raises)


@pytest.mark.parametrize(
    ("family", "added"), [("llama", True), ("qwen3", True), ("gemma3", False), ("olmo2", False)]
)
@torch.no_grad()
def test_errors_of_the_stream_are_corrected_only_if_the_output_is_added_unchanged(family, added):
    """Gemma 3 and OLMo 2 norm the output of attention, so the target is the model's own output."""
    model, steps = tiny(family), []

    def lossy(step):
        steps.append(step)
        layer = copy.deepcopy(attention_of(step.module))
        layer.v_proj.weight.data = -layer.v_proj.weight.data
        return layer

    seen = []
    hooks = [
        module.register_forward_hook(lambda module, given, out: seen.append(out[0]))
        for module in attention_modules(model).values()
    ]
    model(tokens(2, 16))
    for hook in hooks:
        hook.remove()
    walk(model, tokens(2, 16), [lossy])
    wanted = seen[1]
    same = torch.allclose(steps[1].target, wanted, atol=1e-5, rtol=1e-5)
    assert same is not added
