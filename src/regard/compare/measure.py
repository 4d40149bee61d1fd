"""One row of the comparison: cache, speed, perplexity and distance from the unmodified model."""

import math
import statistics
from dataclasses import dataclass, field
from functools import partial

from jaxtyping import Float, Int
from torch import Tensor

from regard.compare.runner import Runner
from regard.convert.measuring import Timings, compare_logits
from regard.plan.shapes import LayerShape, Storage

MEASURED = {  # attributes of Row: the heading ("" names the memory), and the format
    "cache_bytes_per_token": ("cache bytes a token", ",.0f"),
    "context_in_memory": ("", ",.0f"),
    "prefill_tokens_per_second": ("prefill tokens/s", ",.0f"),
    "decode_tokens_per_second": ("decode tokens/s", ",.1f"),
    "perplexity": ("perplexity", ",.3f"),
    "largest_logit_difference": ("logits differ by at most", ".1e"),
}


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
    largest_logit_difference: float | None = None
    prefill_backend: str = ""
    decode_backend: str = ""
    remark: str = ""
    layers: tuple[LayerShape, ...] = ()
    storage: Storage | None = None


@dataclass
class Sample:
    """The measurements of one runner so far, window by window."""

    bytes_per_token: float = 0.0
    losses: list[float] = field(default_factory=list)
    difference: float = 0.0
    timings: Timings = field(default_factory=Timings)

    def add(
        self, runner: Runner, window: Int[Tensor, " L"], reference: Float[Tensor, "1 L E"]
    ) -> None:
        """Prefill one window, measure its cache and its logits, then decode a few tokens.

        `reference` is the hidden states of the unmodified model. The caches are empty afterwards.
        """
        hidden = self.timings.prefill(partial(runner.hidden, window[None]))
        self.bytes_per_token = runner.cache_bytes / len(window)
        loss, difference, _ = compare_logits(runner.model, window, hidden, reference)
        self.losses.append(loss)
        self.difference = max(self.difference, difference)
        self.timings.decode(runner.step, window[None])
        runner.reset()

    def row(self, name: str, exact: bool, *, context: int, memory: int) -> Row:
        """The row of the table that these measurements make."""
        return Row(
            name,
            exact,
            cache_bytes_per_token=self.bytes_per_token,
            context_in_memory=int(memory // self.bytes_per_token),
            perplexity=math.exp(statistics.fmean(self.losses)),
            largest_logit_difference=self.difference,
            **self.timings.speeds(context),
        )
