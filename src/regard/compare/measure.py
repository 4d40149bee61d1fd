"""One row of the comparison: cache, speed, perplexity and distance from the unmodified model.

Perplexity is measured twice: over a window in one pass, and over its last tokens decoded one at a
time. Only the second reads every key and value from the cache, as generation does.
"""

import math
import statistics
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.compare.runner import Runner
from regard.convert.measuring import Timings
from regard.hf.generating.predicting import logits_of
from regard.plan.shapes import LayerShape, Storage

MEASURED = {  # attributes of Row: the heading ("" names the memory), the format, and the subject
    "cache_bytes_per_token": ("cache bytes a token", ",.0f", "memory"),
    "context_in_memory": ("", ",.0f", "memory"),
    "perplexity": ("perplexity", ",.3f", "quality"),
    "decode_perplexity": ("decode perplexity", ",.3f", "quality"),
    "largest_logit_difference": ("logits differ by at most", ".1e", "quality"),
    "prefill_tokens_per_second": ("prefill tokens/s", ",.0f", "speed"),
    "decode_tokens_per_second": ("decode tokens/s", ",.1f", "speed"),
}

# Steps that are timed after each window, beside a first, which allocates. The median over two
# windows is that of 16 steps, about as many as `regard convert` times after its one window.
TIMED = 8

# Tokens of a window that are decoded one at a time, each with those before it in the cache. A step
# of a batch of 8 takes 2 to 3 times as long as one of 1, since most of its time goes into weights.
DECODED = 64
ROWS = 8
IN_ALL_ROWS = 8192  # tokens in the caches of all rows at most: longer windows, fewer rows


@dataclass(frozen=True)
class Row:
    """One row of a comparison: the measurements of one attention.

    Attributes:
        name: its name in the table.
        exact: whether only rounding is lost.
        cache_bytes_per_token: over all layers; None, as the others, if the model cannot have it.
        context_in_memory: the number of tokens whose cache fits in the given memory.
        prefill_tokens_per_second: speed of the prefill of one window.
        decode_tokens_per_second: speed of single steps.
        perplexity: over the windows.
        decode_perplexity: over the last tokens of each window, given one at a time.
        largest_logit_difference: from the unmodified model.
        prefill_backend: the backends of the prefill.
        decode_backend: the backends of the steps.
        remark: why the model cannot have it, if so.
        layers: their sizes, in order.
        storage: how their caches store keys and values; None if `regard.plan` has no formula.

    Examples:
        >>> from regard.compare import Row
        >>> row = Row("MHA, spelled out", exact=True, remark="the model is MHA as shipped")
        >>> row.perplexity is None
        True
    """

    name: str
    exact: bool
    cache_bytes_per_token: float | None = None
    context_in_memory: int | None = None
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    perplexity: float | None = None
    decode_perplexity: float | None = None
    largest_logit_difference: float | None = None
    prefill_backend: str = ""
    decode_backend: str = ""
    remark: str = ""
    layers: tuple[LayerShape, ...] = ()
    storage: Storage | None = None


@dataclass
class Sample:
    """The measurements of one runner so far, window by window."""

    runner: Runner
    bytes_per_token: float = 0.0
    losses: list[float] = field(default_factory=list)
    decode_losses: list[float] = field(default_factory=list)
    difference: float = 0.0
    timings: Timings = field(default_factory=Timings)

    def run(self, window: Int[Tensor, " L"]) -> Float[Tensor, "1 L E"]:
        """Prefill one window, measure its cache, decode its last tokens, and time a few steps.

        Returns the hidden states of the prefill; the caches are empty afterwards.
        """
        hidden = self.timings.prefill(partial(self.runner.hidden, window[None]))
        self.bytes_per_token = self.runner.cache_bytes / len(window)
        self.decode_losses.append(decode_loss(self.runner, window))
        self.timings.decode(self.runner.step, window[None, : 1 + TIMED])
        self.runner.reset()
        return hidden

    def judge(self, loss: float, difference: float) -> None:
        """Add the mean loss over one window, and the largest difference of a logit."""
        self.losses.append(loss)
        self.difference = max(self.difference, difference)

    def row(self, name: str, exact: bool, *, context: int, memory: int) -> Row:
        """The row of the table that these measurements make."""
        return Row(
            name,
            exact,
            cache_bytes_per_token=self.bytes_per_token,
            context_in_memory=int(memory // self.bytes_per_token),
            perplexity=math.exp(statistics.fmean(self.losses)),
            decode_perplexity=math.exp(statistics.fmean(self.decode_losses)),
            largest_logit_difference=self.difference,
            **self.timings.speeds(context),
        )


def decode_steps(length: int) -> tuple[int, int]:
    """Rows of the batch, and steps of one token in each, for a window of so many tokens.

    Examples:
        >>> from regard.compare.measure import decode_steps
        >>> decode_steps(1024), decode_steps(4096), decode_steps(20), decode_steps(2)
        ((8, 8), (2, 32), (2, 8), (1, 1))
    """
    rows = min(ROWS, max(1, IN_ALL_ROWS // length))
    steps = min(DECODED // rows, length - 1)
    return min(rows, (length - 1) // steps), steps


def decode_loss(runner: Runner, window: Int[Tensor, " L"]) -> float:
    """The mean loss over the last tokens of a window that was just prefilled, one at a time.

    The caches get as many rows as `decode_steps` says, and each row goes on where the one before it
    ends. Afterwards they hold one row: the window without its last token.
    """
    rows, steps = decode_steps(len(window))
    stops = range(len(window) - 1 - (rows - 1) * steps, len(window), steps)
    starts = torch.tensor([stop - steps for stop in stops], device=window.device)
    for cache in runner.caches:
        cache.reorder(torch.zeros_like(starts))
        cache.truncate(starts)
    given = torch.stack([window[stop - steps : stop] for stop in stops])
    following = torch.stack([window[stop - steps + 1 : stop + 1] for stop in stops])
    hidden = torch.cat([runner.hidden(token) for token in given.split(1, dim=1)], dim=1)
    logits = logits_of(runner.model, hidden).flatten(0, 1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    for cache in runner.caches:
        cache.reorder(torch.full_like(starts[:1], rows - 1))
    return float(F.cross_entropy(wide, following.flatten()))
