"""Both models are carried along: a layer sees what it will read, and what would put it right."""

import copy

import pytest
import torch

from regard.convert import Step, refit_output, spell_out, walk
from regard.convert.lossy.allocating import allot, costs
from regard.hf import attention_modules, attention_of, install, place
from tiny import tiny, tokens


def own(step: Step):
    return attention_of(step.module)


def wrong(step: Step):
    """The layer, with values turned around in the first block alone."""
    layer = spell_out(attention_of(step.module))
    if step.index == 0:
        layer.v_proj.weight.data = -layer.v_proj.weight.data
    return layer


@torch.no_grad()
def test_a_walk_through_the_model_itself_changes_nothing():
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
def test_a_layer_reads_what_the_converted_ones_before_it_put_out():
    text, seen = tokens(3, 20), {}

    def make(step):
        seen[step.index] = step
        return wrong(step)

    model = tiny("llama")
    plain, (layers, _) = {}, walk(model, text, [make, own])
    walk(model, text, [lambda step: plain.setdefault(step.index, step) and own(step)])
    assert torch.equal(seen[0].x, plain[0].x)
    assert not torch.allclose(seen[1].x, plain[1].x, atol=1e-3)
    changed = place(tiny("llama"), layers)  # the same weights: the second reads this there
    read = []
    module = list(attention_modules(changed).values())[1]
    hook = module.register_forward_pre_hook(
        lambda m, args, given: read.append(given["hidden_states"]), with_kwargs=True
    )
    changed(text)
    hook.remove()
    torch.testing.assert_close(read[0], seen[1].x, atol=1e-5, rtol=1e-4)
    drift = seen[1].target - plain[1].target
    assert float(drift.abs().max()) > 1e-3  # what the first did wrong, the second is to put right


def test_an_installed_model_is_refused():
    model = tiny("llama")
    install(model)
    with pytest.raises(ValueError, match="uninstall first"):
        walk(model, tokens(1, 8), [own])


@torch.no_grad()
def test_a_refit_finds_the_projection_that_was_and_says_what_it_gained():
    layer = attention_of(next(iter(attention_modules(tiny("llama")).values()))).double()
    x = torch.randn(4, 50, 24, dtype=torch.float64)
    wanted, weight = layer(x), layer.o_proj.weight.clone()
    layer.o_proj = torch.nn.Linear(*reversed(weight.shape), bias=False).double()
    missed, still = refit_output(layer, x, wanted, ridge=1e-9)
    assert missed > 0.1 and still < 1e-9
    torch.testing.assert_close(layer.o_proj.weight, weight, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_what_a_refit_says_is_still_missed_is_what_is_missed():
    layer = attention_of(next(iter(attention_modules(tiny("llama")).values()))).double()
    x, wanted = torch.randn(2, 4, 50, 24, dtype=torch.float64)
    missed, still = refit_output(layer, x, wanted)
    share = float((wanted - layer(x)).square().sum() / wanted.square().sum())
    assert still == pytest.approx(share, rel=1e-9)
    assert still < missed


@torch.no_grad()
def test_costs_are_of_one_layer_alone():
    model, text = tiny("llama"), tokens(2, 24)

    def make(index, module, x, size):
        layer = spell_out(attention_of(module))
        layer.v_proj.weight.data = layer.v_proj.weight * (size / 10)
        return layer

    table = costs(model, text, make, [10, 5])
    assert table[:, 0].abs().max() < 1e-6 and table[:, 1].min() > 1e-5
    own_logits = model(text).logits
    other = tiny("llama")
    list(attention_modules(other).values())[1].v_proj.weight.data *= 0.5
    ours, theirs = (logits.log_softmax(-1) for logits in (own_logits, other(text).logits))
    expected = (ours.exp() * (ours - theirs)).sum(-1)[:, ::4].mean()
    assert float(table[1, 1]) == pytest.approx(float(expected), rel=1e-3)


def test_what_is_allotted_is_the_cheapest_way_to_spend_it():
    torch.manual_seed(0)
    sizes = [8, 16, 32]
    table = torch.rand(3, 1, dtype=torch.float64) * torch.tensor([4.0, 2.0, 1.0]).double()
    given = allot(table, sizes, 56)
    assert sum(given) == 56 and all(8 <= size <= 32 for size in given)
    weight = table[:, 0] / 4

    def cost(ranks):
        return sum(float(w) * 32 / rank for w, rank in zip(weight, ranks, strict=True))

    every = [
        (a, b, 56 - a - b)
        for a in range(8, 33, 8)
        for b in range(8, 33, 8)
        if 8 <= 56 - a - b <= 32
    ]
    assert cost(given) == pytest.approx(min(map(cost, every)), rel=1e-9)
    with pytest.raises(ValueError, match="not between 8 and 32 each"):
        allot(table, sizes, 100)


@pytest.mark.parametrize(
    ("family", "added"), [("llama", True), ("qwen3", True), ("gemma3", False), ("olmo2", False)]
)
@torch.no_grad()
def test_errors_of_the_stream_are_mended_only_where_the_output_is_added_as_it_is(family, added):
    """Gemma 3 and OLMo 2 norm what attention puts out, which is best the model's own."""
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
