"""Perplexity, bytes of cache and speed of a model are those of its logits, cache and steps."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from regard.cache import KVCache
from regard.compare import Runner
from regard.convert import measuring
from regard.convert.measuring import (
    PREFILLS,
    Timings,
    compare_logits,
    divergence,
    largest,
    last_logits,
    measure,
    measure_speeds,
    ratio,
    take_turns,
)
from regard.hf import attention_modules, attention_of
from regard.hf.generating.predicting import hidden_states, losses_of
from regard.turns import LEAST, ratio_of
from students import pair
from tiny import tiny, tokens


@torch.no_grad()
def test_measured_perplexity_is_that_of_the_logits():
    model, text = tiny("llama"), tokens(2, 40)
    logits = model(text).logits.double().log_softmax(-1)
    losses = -logits[:, :-1].gather(2, text[:, 1:, None]).squeeze(2)
    found = measure(model, {"a": text, "b": text[:1]})
    assert found.perplexity["a"] == pytest.approx(float(losses.mean().exp()), rel=1e-5)
    assert torch.allclose(found.losses[39:78].double(), losses[1], rtol=1e-5)
    assert found.cache_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert ratio(found.perplexity, found.perplexity) == 1.0


@torch.no_grad()
def test_logits_are_compared_over_all_pieces():
    model, window = tiny("llama"), tokens(1, 300)[0]
    other = tiny("llama")
    other.lm_head.weight.data *= 1.5
    reference, hidden = hidden_states(model, window[None]), hidden_states(model, window[None]) * 1.5
    kept = last_logits(model, reference[0])
    losses, difference = compare_logits(model, window, hidden[0], kept)
    wanted, logits = model(window[None]).logits, other(window[None]).logits
    torch.testing.assert_close(
        losses, losses_of(other, hidden_states(other, window[None])[0], window)
    )
    assert difference == pytest.approx(float((wanted - logits).abs().max()), rel=1e-4)
    assert float(largest(kept)) == pytest.approx(float(wanted.abs().max()), rel=1e-5)
    assert math.isnan(compare_logits(model, window, hidden[0] * math.nan, kept)[1])


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 30, 270, 300])
def test_logits_are_compared_over_the_last_tokens_that_are_kept(count):
    model, window = tiny("llama"), tokens(1, 300)[0]
    hidden = hidden_states(model, window[None])[0]
    kept = last_logits(model, hidden, nbytes=count * 4 * model.config.vocab_size + 3)
    wanted = model(window[None]).logits[0]
    torch.testing.assert_close(kept, wanted[-count:])
    assert compare_logits(model, window, hidden, kept)[1] < 1e-5
    for at, differs in ((-count - 1, False), (-count, True), (-1, True)):
        if at + 300 >= 0:
            other = hidden.clone()
            other[at] += 1.0
            assert (compare_logits(model, window, other, kept)[1] > 1e-2) == differs


class Machine:
    """The clock of a machine that becomes twice as slow while `total` units of work are done."""

    def __init__(self, monkeypatch, total):
        self.now, self.done, self.total = 0.0, 0.0, total
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(measuring, "time", clock)

    def worker(self, cost, first):
        """Returns a run that costs that much, and `first` when it is called for the first time."""
        costs = iter([first])

        def run():
            work = next(costs, cost)
            self.done += work
            self.now += work * 2 ** (self.done / self.total)
            return torch.zeros(1)

        return run


@pytest.mark.parametrize("speed", [1.0, 0.8, 1.25])
def test_a_machine_that_slows_down_changes_no_ratio(speed, monkeypatch):
    machine, count = Machine(monkeypatch, 2 * 24 * (1 + 1 / speed)), 24
    runs = [(Timings(), machine.worker(cost, cost)) for cost in (1.0, 1 / speed)]
    for phase in ("prefill", "decode"):
        take_turns(phase, runs, count)
    (first, _), (other, _) = runs
    found = other.speeds(40)["decode_speed"]
    assert found.differs == (speed != 1.0) and found.pairs == LEAST
    assert found.value == pytest.approx(speed, rel=0.01)
    assert first.speeds(40)["decode_speed"] is None
    assert other.speeds(40)["prefill_speed"].value == pytest.approx(speed, rel=0.01)


def test_a_step_that_is_interrupted_in_every_round_changes_no_ratio(monkeypatch):
    """Other programs triple the time of every third step of each program."""
    now, calls = [0.0], [0]
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def run(cost):
        calls[0] += 1
        now[0] += cost * (3.0 if calls[0] % 3 == calls[0] // 9 % 3 else 1.0)
        return torch.zeros(1)

    runs = [(Timings(), partial(run, cost)) for cost in (1.0, 1.25)]
    take_turns("decode", runs, 48)
    found = ratio_of(runs[1][0].first["decode"], runs[1][0].seconds["decode"])
    assert (found.low, found.high, found.pairs) == (pytest.approx(0.8), pytest.approx(0.8), LEAST)


@torch.no_grad()
def test_models_take_turns_after_a_first_call_that_is_not_timed(monkeypatch):
    """The first call of each takes a minute, as if it compiled; nothing of it is in a speed."""
    models, window = [tiny("llama"), tiny("llama")], tokens(1, 60)[0]
    machine = Machine(monkeypatch, 1e9)
    calls = []
    for at, model in enumerate(models):
        works = {phase: machine.worker(1.0 + at, 60.0) for phase in ("prefill", "decode")}

        def forward(*given, own=model.base_model.forward, works=works, at=at, **options):
            phase = "decode" if options["input_ids"].shape[1] == 1 else "prefill"
            works[phase]()
            calls.append((phase, at))
            return own(*given, **options)

        monkeypatch.setattr(model.base_model, "forward", forward)
    first, other = measure_speeds(models, window)
    assert first["decode_speed"] is None and first["decode_tokens_per_second"] == pytest.approx(1.0)
    for phase, rounds in (("prefill", PREFILLS), ("decode", LEAST)):
        speed = other[f"{phase}_speed"]
        assert (speed.pairs, speed.value) == (rounds, pytest.approx(0.5))
        order = [at for what, at in calls if what == phase]
        turns = [0, 0, 1, 1, 1, 1, 0, 0] * (rounds // 2)
        assert phase == "prefill" or order[-len(turns) :] == turns


@torch.no_grad()
def test_backends_of_prefill_and_decoding_are_named_apart():
    model, timings, window = tiny("llama"), Timings(), tokens(1, 40)
    layers = [attention_of(module) for module in attention_modules(model).values()]
    runner = Runner(model, layers, cache=KVCache)
    timings.observe("prefill", lambda: runner.hidden(window))
    assert timings.ran["prefill"].total() == len(layers) and not timings.ran["decode"]
    timings.observe("decode", lambda: runner.step(window[:, :1]))
    assert timings.ran["decode"].total() == len(layers)


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
