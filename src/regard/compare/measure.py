"""One row of the comparison: cache, speed, perplexity and distance, measured while a model runs."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.compare.runner import Runner
from regard.hf.generating.predicting import logits_of, pieces
from regard.ops.observed import backends_run, names

DECODE_STEPS = 12  # in each window, after a first one that is not counted


@dataclass(frozen=True)
class Row:
    """What one attention cost and gave, and on which backends; where it cannot be made, a `remark`
    and None."""

    name: str
    exact: bool
    cache_bytes_per_token: float | None = None
    context_in_memory: int | None = None
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    perplexity: float | None = None
    largest_logit_difference: float | None = None
    prefill_backend: str = ""
    decode_backend: str = ""
    remark: str = ""


@dataclass
class Sample:
    """What was seen of one runner so far, window by window."""

    bytes_per_token: float = 0.0
    prefill_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    difference: float = 0.0
    prefill_ran: Counter[str] = field(default_factory=Counter)
    decode_ran: Counter[str] = field(default_factory=Counter)

    def row(self, name: str, exact: bool, *, context: int, memory: int) -> Row:
        """The measurements in one line: the best prefill, the median step, the mean loss."""
        return Row(
            name,
            exact,
            cache_bytes_per_token=self.bytes_per_token,
            context_in_memory=int(memory // self.bytes_per_token),
            prefill_tokens_per_second=context / min(self.prefill_seconds),
            decode_tokens_per_second=1.0 / statistics.median(self.step_seconds),
            perplexity=math.exp(statistics.fmean(self.losses)),
            largest_logit_difference=self.difference,
            prefill_backend=names(self.prefill_ran),
            decode_backend=names(self.decode_ran),
        )


def measure_window(
    runner: Runner,
    sample: Sample,
    window: Int[Tensor, " L"],
    reference: Float[Tensor, "1 L E"],
) -> None:
    """Prefill one window, measure its cache and its logits, then decode a few tokens and forget.

    `reference` is the hidden states that the unmodified model has for the window.
    """
    tokens = window[None]
    with backends_run() as ran:
        hidden, seconds = _timed(partial(runner.hidden, tokens))
    sample.prefill_ran += ran
    sample.prefill_seconds.append(seconds)
    sample.bytes_per_token = runner.cache_bytes / window.shape[0]
    loss, difference = compare_logits(runner.model, window, hidden, reference)
    sample.losses.append(loss)
    sample.difference = max(sample.difference, difference)
    runner.step(tokens[:, :1])
    with backends_run() as ran:
        for token in tokens[:, 1 : 1 + DECODE_STEPS].split(1, dim=1):
            sample.step_seconds.append(_timed(partial(runner.step, token))[1])
    sample.decode_ran += ran
    runner.reset()


def compare_logits(
    model: Any,
    window: Int[Tensor, " L"],
    hidden: Float[Tensor, "1 L E"],
    reference: Float[Tensor, "1 L E"],
) -> tuple[float, float]:
    """The mean loss over a window, and the largest difference of a logit from the reference's."""
    losses, difference = 0.0, 0.0
    for start, stop in pieces(window.shape[0]):
        logits = logits_of(model, hidden[:, start:stop])[0].float()
        other = logits_of(model, reference[:, start:stop])[0].float()
        difference = max(difference, float((logits - other).abs().max()))
        following = window[start + 1 : stop + 1]
        losses += float(F.cross_entropy(logits[: len(following)], following, reduction="sum"))
    return losses / (window.shape[0] - 1), difference


def _timed(run: Callable[[], Tensor]) -> tuple[Tensor, float]:
    started = time.perf_counter()
    result = run()
    if result.is_cuda:
        torch.cuda.synchronize(result.device)
    return result, time.perf_counter() - started
