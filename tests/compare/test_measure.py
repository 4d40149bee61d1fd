"""One row of the comparison is made of the measurements of all windows."""

import pytest
import torch

from regard.cache import KVCache
from regard.compare import Runner
from regard.compare.measure import Sample
from regard.convert.measuring import loss_of
from regard.hf import attention_modules, attention_of
from regard.hf.generating.predicting import hidden_states
from tiny import tiny, tokens


@torch.no_grad()
def test_a_row_is_the_mean_over_windows():
    model, windows, sample = tiny("llama"), tokens(2, 40), Sample()
    layers = [attention_of(module) for module in attention_modules(model).values()]
    runner = Runner(model, layers, cache=KVCache)
    for window in windows:
        sample.add(runner, window, hidden_states(model, window[None]))
        assert runner.cache_bytes == 0
    row = sample.row("shipped", True, context=40, memory=1 << 20)
    losses = torch.tensor([loss_of(model, window) for window in windows])
    assert row.perplexity == pytest.approx(float(losses.mean().exp()), rel=1e-5)
    assert row.largest_logit_difference < 1e-5
    assert row.cache_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert row.context_in_memory == (1 << 20) // 256
