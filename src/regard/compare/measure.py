"""One row of the comparison: cache, speed, perplexity and distance from the unmodified model.

Perplexity is measured twice: over a window in one pass, and over its last tokens decoded one at a
time. Only the second reads every key and value from the cache, as generation does. Speeds and
perplexities are compared with the first row: times of the same round, losses of the same tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.compare.runner import Runner
from regard.convert.measuring import Timings, take_turns
from regard.hf.generating.predicting import logits_of
from regard.plan.shapes import LayerShape, Storage
from regard.turns import Ratio, perplexity_ratio

MEASURED = {  # attributes of Row: the heading ("" names the memory), and the subject
    "cache_bytes_per_token": ("cache bytes a token", "memory"),
    "context_in_memory": ("", "memory"),
    "perplexity": ("perplexity", "quality"),
    "decode_perplexity": ("decode perplexity", "quality"),
    "largest_logit_difference": ("logits differ by at most", "quality"),
    "prefill_speed": ("prefill speed", "speed"),
    "decode_speed": ("decode speed", "speed"),
}

# Runs of each row after each window, in turns with the first row's: prefills of one window, and
# steps, of which the fastest of three counts. Two windows give 6 and 16 pairs.
PREFILLS = 3
STEPS = 24

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
        prefill_tokens_per_second: the median speed of the prefill of one window.
        decode_tokens_per_second: the median speed of single steps.
        prefill_speed: the ratio to the first row's, with quartiles; None for the first row.
        decode_speed: the same of single steps.
        perplexity: over the windows.
        decode_perplexity: over the last tokens of each window, given one at a time.
        perplexity_ratio: to the first row's, and two standard errors; None for the first row.
        decode_perplexity_ratio: the same of the last tokens.
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
    prefill_speed: Ratio | None = None
    decode_speed: Ratio | None = None
    perplexity: float | None = None
    decode_perplexity: float | None = None
    perplexity_ratio: Ratio | None = None
    decode_perplexity_ratio: Ratio | None = None
    largest_logit_difference: float | None = None
    prefill_backend: str = ""
    decode_backend: str = ""
    remark: str = ""
    layers: tuple[LayerShape, ...] = ()
    storage: Storage | None = None


def cells(row: Row) -> list[str]:
    """The cells of a row that ran, in the order of `MEASURED`.

    Examples:
        >>> from regard.compare.measure import Row, cells
        >>> from regard.turns import Ratio
        >>> row = Row("int8", False, 12_240.0, 87_724, 908.0, 21.8, Ratio(0.9, 0.8, 1.1, 6),
        ...     Ratio(0.85, 0.82, 0.88, 24), 13.55, 10.2, Ratio(1.001, 0.999, 1.003, 2046),
        ...     Ratio(1.008, 0.996, 1.02, 128), 0.91)
        >>> cells(row)[2:]
        ['13.550 ±0.2%', '10.200 ±1.2%', '9.1e-01', 'same (0.80-1.10)', '0.85 (0.82-0.88)']
    """
    return [
        f"{row.cache_bytes_per_token:,.0f}",
        f"{row.context_in_memory:,}",
        _perplexity(row.perplexity, row.perplexity_ratio),
        _perplexity(row.decode_perplexity, row.decode_perplexity_ratio),
        f"{row.largest_logit_difference:.1e}",
        str(row.prefill_speed or f"{row.prefill_tokens_per_second:,.0f} tokens/s"),
        str(row.decode_speed or f"{row.decode_tokens_per_second:,.1f} tokens/s"),
    ]


def _perplexity(value: float | None, ratio: Ratio | None) -> str:
    return f"{value:,.3f}" + ("" if ratio is None else f" ±{ratio.high / ratio.value - 1:.1%}")


@dataclass
class Sample:
    """The measurements of one runner so far, window by window."""

    runner: Runner
    bytes_per_token: float = 0.0
    losses: list[Tensor] = field(default_factory=list)
    decode_losses: list[Tensor] = field(default_factory=list)
    difference: float = 0.0
    timings: Timings = field(default_factory=Timings)

    def read(self, window: Int[Tensor, " L"]) -> Float[Tensor, "1 L E"]:
        """Prefill one window, measure its cache, and decode its last tokens; nothing is timed.

        Returns the hidden states of the prefill; the caches hold the window without its last token.
        """
        self.runner.reset()
        hidden = self.timings.observe("prefill", partial(self.runner.hidden, window[None]))
        self.bytes_per_token = self.runner.cache_bytes / len(window)
        self.decode_losses.append(decode_losses(self.runner, window))
        return hidden

    def judge(self, losses: Float[Tensor, " T"], difference: float) -> None:
        """Add the losses over one window, and the largest difference of a logit."""
        self.losses.append(losses)
        self.difference = max(self.difference, difference)

    def step_after(self, window: Int[Tensor, " L"]) -> partial[Tensor]:
        """A decoding step, run twice already, after the window's tokens but for the last few."""
        start = max(1, len(window) - STEPS - 2)
        for cache in self.runner.caches:
            cache.truncate(min(start, cache.length))
        step = partial(self.runner.step, window[None, -1:])
        self.timings.observe("decode", step)  # the first step may compile and allocate
        step()  # no backend is counted any more, as in the steps that are timed
        return step

    def prefill(self, window: Int[Tensor, " L"]) -> Tensor:
        """The prefill of one window; the caches are empty before and afterwards."""
        hidden = self.runner.hidden(window[None])
        self.runner.reset()
        return hidden

    def row(self, name: str, exact: bool, first: "Sample", *, context: int, memory: int) -> Row:
        """The row of the table that these measurements make, compared with the first row's."""
        losses, decoded = torch.cat(self.losses), torch.cat(self.decode_losses)
        row = Row(
            name,
            exact,
            cache_bytes_per_token=self.bytes_per_token,
            context_in_memory=int(memory // self.bytes_per_token),
            perplexity=math.exp(losses.double().mean()),
            decode_perplexity=math.exp(decoded.double().mean()),
            largest_logit_difference=self.difference,
            **self.timings.speeds(context),
        )
        if first is self:
            return row
        return replace(
            row,
            perplexity_ratio=perplexity_ratio(losses, torch.cat(first.losses)),
            decode_perplexity_ratio=perplexity_ratio(decoded, torch.cat(first.decode_losses)),
        )


def time_steps(samples: Sequence[Sample], window: Int[Tensor, " L"]) -> None:
    """Time decoding steps of the first sample and another in turns, after they read the window."""
    runs = [(each.timings, each.step_after(window)) for each in samples]
    take_turns("decode", runs, STEPS)


def time_prefills(samples: Sequence[Sample], window: Int[Tensor, " L"]) -> None:
    """Time prefills of one window by all samples in turns; their caches are empty afterwards."""
    for each in samples:
        each.runner.reset()
    runs = [(each.timings, partial(each.prefill, window)) for each in samples]
    take_turns("prefill", runs, PREFILLS)


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


def decode_losses(runner: Runner, window: Int[Tensor, " L"]) -> Float[Tensor, " T"]:
    """The losses of the last tokens of a window that was just prefilled, given one at a time.

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
    return F.cross_entropy(wide, following.flatten(), reduction="none")
