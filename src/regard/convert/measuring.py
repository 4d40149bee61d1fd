"""What a whole model costs and knows: perplexity, the bytes of its cache, its speed; before, after.

Models run as their users run them: by transformers, with a cache of `regard.hf.cache`.
"""

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.hf.generating.cache_of_model import cache as cache_for
from regard.hf.generating.predicting import hidden_states, losses_of
from regard.ops.observed import backends_run, names

STEPS = 16


@dataclass(frozen=True)
class Measured:
    """Perplexity by text, bytes of cache a token, and tokens a second, in and out, with regard's
    backends that ran; none where attention was transformers' own."""

    perplexity: dict[str, float]
    cache_bytes_per_token: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    prefill_backend: str = ""
    decode_backend: str = ""


@torch.no_grad()
def measure(model: Any, texts: Mapping[str, Int[Tensor, "N L"]]) -> Measured:
    """Measure a causal language model on windows of each text."""
    perplexities, prefill = {}, []
    with backends_run() as prefill_ran:
        for name, windows in texts.items():
            losses = []
            for window in windows:
                started = time.perf_counter()
                loss = loss_of(model, window)
                prefill.append(time.perf_counter() - started)
                losses.append(loss)
            perplexities[name] = math.exp(statistics.fmean(losses))
    window = next(iter(texts.values()))[:1]
    store = cache_for(model)
    model(input_ids=window[:, :-STEPS], past_key_values=store, use_cache=True, logits_to_keep=1)
    nbytes = store.nbytes / (window.shape[1] - STEPS)
    steps = []
    with backends_run() as decode_ran:
        for token in window[:, -STEPS:].split(1, dim=1):
            started = time.perf_counter()
            model(input_ids=token, past_key_values=store, use_cache=True)
            steps.append(time.perf_counter() - started)
    speed = 1.0 / statistics.median(steps)
    ran = names(prefill_ran), names(decode_ran)
    return Measured(perplexities, nbytes, window.shape[1] / min(prefill), speed, *ran)


@torch.no_grad()
def loss_of(model: Any, window: Int[Tensor, " L"]) -> float:
    """The mean loss over a window, in nats a token."""
    return float(losses_of(model, hidden_states(model, window[None])[0], window).mean())


def ratio(after: Measured, before: Measured) -> float:
    """Perplexity over perplexity, a geometric mean over the texts.

    >>> one = Measured({"a": 10.0, "b": 10.0}, 1.0, 1.0, 1.0)
    >>> ratio(Measured({"a": 20.0, "b": 5.0}, 1.0, 1.0, 1.0), one)
    1.0
    """
    logs = [math.log(after.perplexity[name] / before.perplexity[name]) for name in after.perplexity]
    return math.exp(statistics.fmean(logs))
