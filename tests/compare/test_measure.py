"""One row of the comparison is made of the measurements of all windows."""

import pytest
import torch

from regard.cache import KVCache, Part
from regard.cache.quantized import QuantizedCache
from regard.compare import Runner
from regard.compare.measure import (
    DECODED,
    PREFILLS,
    STEPS,
    Sample,
    time_prefills,
)
from regard.convert.measuring import last_logits
from regard.hf import attention_modules, attention_of
from regard.hf.generating.predicting import hidden_states, losses_of
from regard.turns import LEAST
from tiny import tiny, tokens


class Forgetful(KVCache):
    def update(self, *new):
        parts = super().update(*new)
        if new[0].shape[2] > 1:
            return parts
        return tuple(Part(a, b, tuple(torch.zeros_like(s) for s in each)) for a, b, each in parts)


@torch.no_grad()
def test_a_row_is_the_mean_over_windows():
    model, windows = tiny("llama"), tokens(2, 40)
    runner = runner_of(model, KVCache)
    sample = Sample(runner)
    for window in windows:
        sample.read(window, last_logits(model, hidden_states(model, window[None])[0]))
        sample.decode(window)
    sample.decode(windows[-1], sample)
    alone = 40 / min(sample.timings.alone["prefill"])  # as no prefill took turns yet
    assert sample.timings.speeds(40)["prefill_tokens_per_second"] == alone
    time_prefills([sample], windows[-1])
    assert runner.cache_bytes == 0
    found = {phase: len(each) for phase, each in sample.timings.seconds.items()}
    assert found == {"prefill": PREFILLS, "decode": LEAST}
    row = sample.row("shipped", True, sample, context=40, memory=1 << 20, dtype="float32")
    assert row.decode_speed is None and row.perplexity_ratio is None
    losses = torch.tensor([model(each[None], labels=each[None]).loss for each in windows])
    assert row.perplexity == pytest.approx(float(losses.mean().exp()), rel=1e-5)
    assert row.largest_logit_difference < 1e-5
    assert row.cache_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert row.context_in_memory == (1 << 20) // 256


@torch.no_grad()
@pytest.mark.parametrize("length", [2, 3, 9, 41, 130])
@pytest.mark.parametrize("timed", [False, True])
def test_the_last_tokens_are_decoded_one_at_a_time(length, timed, monkeypatch):
    """Whether steps are timed or not, the losses are those of the window's last tokens."""
    model, window = tiny("llama"), tokens(1, length)[0]
    sample = sample_of(model, KVCache, window)
    given, step = [], sample.runner.step
    monkeypatch.setattr(sample.runner, "step", lambda token: given.append(token) or step(token))
    sample.decode(window, sample if timed else None)
    count = min(DECODED, length - 1)
    assert {tuple(token.shape) for token in given} == {(1, 1)}
    assert torch.equal(torch.cat(given).flatten()[:count], window[-1 - count : -1])
    assert all(int(token) == window[-1] for token in given[count:])
    assert len(given) == (max(count, 1 + 2 * LEAST) if timed else count)
    wanted = losses_of(model, hidden_states(model, window[None])[0], window)[-count:]
    torch.testing.assert_close(sample.decode_losses[0], wanted)


@torch.no_grad()
def test_what_a_cache_loses_after_the_prefill_is_in_the_decode_loss():
    """A cache that returns a chunk as it was given, and single tokens as zeros."""
    model, window = tiny("llama"), tokens(1, 60)[0]
    samples = [sample_of(model, cache, window) for cache in (KVCache, Forgetful)]
    torch.testing.assert_close(samples[0].losses, samples[1].losses)
    for sample in samples:
        sample.decode(window)
    exact, lossy = (sample.decode_losses[0].mean() for sample in samples)
    assert abs(exact - lossy) > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("length", [2, 9, 128])
def test_steps_take_turns_over_the_same_tokens(length, monkeypatch):
    """Both start after the same tokens, each time, and no position is beyond the window's last."""
    model, window = tiny("llama"), tokens(1, length)[0]
    samples = [sample_of(model, cache, window) for cache in (KVCache, QuantizedCache)]
    starts = []
    for at, each in enumerate(samples):
        step = each.runner.step
        monkeypatch.setattr(
            each.runner,
            "step",
            lambda token, at=at, each=each, step=step: (
                starts.append((at, each.runner.caches[0].length)) or step(token)
            ),
        )
    for _ in range(2):
        starts.clear()
        samples[1].decode(window, samples[0])
        own, first = ([n for which, n in starts if which == at] for at in (1, 0))
        start = max(0, length - 1 - DECODED)
        assert 1 + 2 * LEAST <= len(first) <= 1 + STEPS
        assert own == list(range(start, start + max(len(first), length - 1 - start)))
        assert first == own[: len(first)]
        assert length <= DECODED or max(own) < length - 1
        taken = [at for at, _ in starts[: 2 * len(first)]]
        assert taken[:6] == [1, 0, 0, 0, 1, 1] and taken[6:10] == [1, 1, 0, 0]


def sample_of(model, cache, window):
    """A sample that has read the window."""
    sample = Sample(runner_of(model, cache))
    sample.read(window, last_logits(model, hidden_states(model, window[None])[0]))
    return sample


def runner_of(model, cache):
    layers = [attention_of(module) for module in attention_modules(model).values()]
    return Runner(model, layers, cache=cache)
