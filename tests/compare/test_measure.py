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
    decode_losses,
    decode_steps,
    time_prefills,
    time_steps,
)
from regard.convert.measuring import loss_of
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
        sample.read(window, hidden_states(model, window[None]))
    time_steps([sample], windows[-1])
    alone = 40 / min(sample.timings.alone["prefill"])  # as no prefill took turns yet
    assert sample.timings.speeds(40)["prefill_tokens_per_second"] == alone
    time_prefills([sample], windows[-1])
    assert runner.cache_bytes == 0
    found = {phase: len(each) for phase, each in sample.timings.seconds.items()}
    assert found == {"prefill": PREFILLS, "decode": LEAST}
    row = sample.row("shipped", True, sample, context=40, memory=1 << 20, dtype="float32")
    assert row.decode_speed is None and row.perplexity_ratio is None
    losses = torch.tensor([loss_of(model, window) for window in windows])
    assert row.perplexity == pytest.approx(float(losses.mean().exp()), rel=1e-5)
    assert row.largest_logit_difference < 1e-5
    assert row.cache_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert row.context_in_memory == (1 << 20) // 256


@torch.no_grad()
@pytest.mark.parametrize("length", [2, 3, 9, 10, 41, 130])
def test_the_last_tokens_are_decoded_one_at_a_time(length, monkeypatch):
    model, window = tiny("llama"), tokens(1, length)[0]
    runner = runner_of(model, KVCache)
    runner.hidden(window[None])
    given, hidden = [], runner.hidden
    monkeypatch.setattr(runner, "hidden", lambda token: given.append(token) or hidden(token))
    found = decode_losses(runner, window)
    rows, steps = decode_steps(length)
    assert [tuple(token.shape) for token in given] == [(rows, 1)] * steps
    count = rows * steps
    assert torch.equal(torch.cat(given, 1).flatten(), window[-1 - count : -1])
    assert length == 2 or count > length / 2 or count == DECODED
    wanted = losses_of(model, hidden_states(model, window[None])[0], window)[-count:]
    torch.testing.assert_close(found, wanted)
    assert [cache.length for cache in runner.caches] == [length - 1] * 2
    assert all(cache.buffers[0].shape[0] == 1 for cache in runner.caches)


@torch.no_grad()
def test_what_a_cache_loses_after_the_prefill_is_in_the_decode_loss():
    """A cache that returns a chunk as it was given, and single tokens as zeros."""
    model, window = tiny("llama"), tokens(1, 60)[0]
    runners = [runner_of(model, cache) for cache in (KVCache, Forgetful)]
    hidden = [runner.hidden(window[None]) for runner in runners]
    torch.testing.assert_close(*hidden)
    exact, lossy = (decode_losses(runner, window).mean() for runner in runners)
    assert abs(exact - lossy) > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("length", [2, 9, 128])
def test_steps_are_timed_within_the_window(length, monkeypatch):
    """Both start after the same tokens, each time, and no position is beyond the window's last."""
    model, window = tiny("llama"), tokens(1, length)[0]
    samples = [Sample(runner_of(model, cache)) for cache in (KVCache, QuantizedCache)]
    for sample in samples:
        sample.read(window, hidden_states(model, window[None]))
    starts = []
    for each in samples:
        step = each.runner.step
        monkeypatch.setattr(
            each.runner,
            "step",
            lambda token, each=each, step=step: (
                starts.append((samples.index(each), each.runner.caches[0].length)) or step(token)
            ),
        )
    for _ in range(2):
        starts.clear()
        time_steps(samples, window)
        lengths = [[n for which, n in starts if which == at] for at in (0, 1)]
        first, steps = max(1, length - 2 - STEPS), len(lengths[0]) - 2
        assert 3 * LEAST <= steps <= STEPS
        assert lengths == [list(range(first, first + 2 + steps))] * 2
        assert length <= 2 + STEPS or max(lengths[0]) < length


def runner_of(model, cache):
    layers = [attention_of(module) for module in attention_modules(model).values()]
    return Runner(model, layers, cache=cache)
