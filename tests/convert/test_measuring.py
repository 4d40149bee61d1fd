"""Perplexity, bytes of cache and speed of a model are those of its logits, cache and steps."""

import math

import pytest
import torch

from regard.cache import KVCache
from regard.compare import Runner
from regard.convert.measuring import (
    DECODE_STEPS,
    Timings,
    compare_logits,
    divergence,
    loss_of,
    measure,
    ratio,
)
from regard.hf import attention_modules, attention_of
from regard.hf.generating.predicting import hidden_states
from students import pair
from tiny import tiny, tokens


@torch.no_grad()
def test_measured_perplexity_is_that_of_the_logits():
    model, text = tiny("llama"), tokens(2, 40)
    logits = model(text).logits.double().log_softmax(-1)
    losses = -logits[:, :-1].gather(2, text[:, 1:, None]).squeeze(2)
    found = measure(model, {"a": text, "b": text[:1]})
    assert found.perplexity["a"] == pytest.approx(float(losses.mean().exp()), rel=1e-5)
    assert loss_of(model, text[1]) == pytest.approx(float(losses[1].mean()), rel=1e-5)
    assert found.cache_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert ratio(found.perplexity, found.perplexity) == 1.0


@torch.no_grad()
def test_logits_are_compared_over_all_pieces():
    model, window = tiny("llama"), tokens(1, 300)[0]
    other = tiny("llama")
    other.lm_head.weight.data *= 1.5
    reference, hidden = hidden_states(model, window[None]), hidden_states(model, window[None]) * 1.5
    loss, difference, largest = compare_logits(model, window, hidden, reference)
    wanted, logits = model(window[None]).logits, other(window[None]).logits
    assert loss == pytest.approx(loss_of(other, window), rel=1e-5)
    assert difference == pytest.approx(float((wanted - logits).abs().max()), rel=1e-4)
    assert largest == pytest.approx(float(wanted.abs().max()), rel=1e-5)
    assert math.isnan(compare_logits(model, window, hidden * math.nan, reference)[1])


@torch.no_grad()
def test_the_first_decode_step_is_not_timed():
    steps, timings = [], Timings()
    timings.prefill(lambda: torch.zeros(1))

    def step(token):
        steps.append(int(token))
        return token

    timings.decode(step, torch.arange(40)[None])
    assert steps == list(range(DECODE_STEPS))
    assert len(timings.step_seconds) == DECODE_STEPS - 1
    speeds = timings.speeds(40)
    assert speeds["prefill_tokens_per_second"] > 0 and speeds["decode_tokens_per_second"] > 0


@torch.no_grad()
def test_backends_of_prefill_and_decoding_are_named_apart():
    model, timings, window = tiny("llama"), Timings(), tokens(1, 40)
    layers = [attention_of(module) for module in attention_modules(model).values()]
    runner = Runner(model, layers, cache=KVCache)
    timings.prefill(lambda: runner.hidden(window))
    assert timings.prefill_ran.total() == len(layers) and not timings.decode_ran
    timings.decode(runner.step, window)
    assert timings.decode_ran.total() == len(layers) * (DECODE_STEPS - 1)


@pytest.mark.parametrize("count", [1, 255, 256, 300])
def test_the_divergence_and_its_gradient_are_those_of_the_definition(count):
    student, teacher = pair()
    ours, theirs = torch.randn(2, 1, count, 24)
    ours.requires_grad_()
    value = divergence(student, ours, teacher, theirs)
    (got,) = torch.autograd.grad(value, ours)
    p, q = (m.lm_head(h).double().softmax(-1) for m, h in ((teacher, theirs), (student, ours)))
    expected = (p * (p.log() - q.log())).sum() / count
    (wanted,) = torch.autograd.grad(expected, ours)
    torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)
