"""One row of the comparison: cache, speed, perplexity and distance from the unmodified model.

Perplexity is measured twice: over a window in one pass, and over its last tokens decoded one at a
time. Only the second reads every key and value from the cache, as generation does. Speeds and
perplexities are compared with the first row: times of the same round, losses of the same tokens.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.compare.runner import Runner
from regard.compare.shapes import bytes_of_caches, shape_of, storage_of
from regard.convert.measuring import Timings, compare_logits, dtype_name, take_turns
from regard.plan.planning import largest
from regard.plan.shapes import LayerShape, Storage
from regard.turns import LEAST, Ratio, perplexity_ratio

MEASURED = {  # attributes of Row with their headings; {..} are attributes of Comparison
    "cache_bytes_per_token": "cache bytes a token",
    "run_bytes_per_token": "the same in {dtype}",
    "context_in_memory": "tokens in {within}",
    "perplexity": "perplexity",
    "decode_perplexity": "decode perplexity",
    "largest_logit_difference": "logits differ by at most",
    "prefill_speed": "prefill speed",
    "decode_speed": "decode speed",
}

SHORT = (  # columns that fit 80 characters
    "cache_bytes_per_token",
    "context_in_memory",
    "perplexity",
    "decode_perplexity",
    "decode_speed",
)

PREFILLS = LEAST  # of each row, in turns with the first row's
STEPS = 24  # at most that take turns with the first row's; fewer once the ratio is known
DECODED = STEPS + 1  # tokens of a window that are decoded: one that may compile, then the turns


@dataclass(frozen=True)
class Row:
    """One row of a comparison or a frontier: the measurements of one attention and its cache.

    Attributes:
        name: its name in the table.
        exact: whether only rounding is lost.
        cache_bytes_per_token: over all layers, in the checkpoint's dtype; None, as the others, if
            the model cannot have it.
        context_in_memory: the number of tokens whose cache, in the checkpoint's dtype, fits in the
            given memory; also None if any number fits, as of windows.
        prefill_tokens_per_second: the speed of the prefill of one window: the median of those that
            took turns, or the faster of two.
        decode_tokens_per_second: the median speed of single steps.
        prefill_speed: the ratio to the first row's, with quartiles; None for the first row, and
            unless prefills take turns.
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
        run_bytes_per_token: as `cache_bytes_per_token`, in the dtype in which the model ran.
        share: of a frontier: of the shipped row's bytes.
        found: of a frontier: the share of the questions that are answered rightly; None without
            documents.
        best: of a frontier: whether no other row has both fewer bytes and a lower decode
            perplexity.

    Examples:
        >>> from regard.compare import Row
        >>> row = Row("MHA, spelled out", exact=True, remark="the model is MHA as shipped")
        >>> row.perplexity is None
        True
    """

    name: str
    exact: bool = False
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
    run_bytes_per_token: float | None = None
    share: float | None = None
    found: float | None = None
    best: bool = False

    @property
    def ran(self) -> bool:
        """Whether the model can have it."""
        return self.decode_perplexity is not None


def cells(row: Row, columns: Iterable[str] = MEASURED) -> list[str]:
    """The cells of a row that ran, in these columns of `MEASURED`.

    Examples:
        >>> from regard.compare.measure import SHORT, Row, cells
        >>> from regard.turns import Ratio
        >>> row = Row("int8", False, 12_240.0, 87_724, 908.0, 21.8, Ratio(0.9, 0.8, 1.1, 6),
        ...     Ratio(0.85, 0.82, 0.88, 24), 13.55, 10.2, Ratio(1.001, 0.999, 1.003, 2046),
        ...     Ratio(1.008, 0.996, 1.02, 128), 0.91)
        >>> cells(row, SHORT)
        ['12,240', '87,724', '13.55 ±0.2%', '10.20 ±1.2%', '0.85 ±4%']
    """
    fitting, run = row.context_in_memory, row.run_bytes_per_token
    texts = {
        "cache_bytes_per_token": f"{row.cache_bytes_per_token:,.0f}",
        "run_bytes_per_token": "" if run is None else f"{run:,.0f}",
        "context_in_memory": "any" if fitting is None else f"{fitting:,}",
        "perplexity": _perplexity(row.perplexity, row.perplexity_ratio),
        "decode_perplexity": _perplexity(row.decode_perplexity, row.decode_perplexity_ratio),
        "largest_logit_difference": f"{row.largest_logit_difference:.1e}",
        "prefill_speed": _speed(row.prefill_tokens_per_second, row.prefill_speed),
        "decode_speed": _speed(row.decode_tokens_per_second, row.decode_speed),
    }
    return [texts[name] for name in columns]


def _perplexity(value: float | None, ratio: Ratio | None) -> str:
    if ratio is None:
        return f"{value:,.2f}"
    error = ratio.high / ratio.value - 1
    return f"{value:,.2f} ±{error:.1%}" if error < 0.1 else f"{value:,.2f} ±{error:.0%}"


def _speed(tokens: float | None, ratio: Ratio | None) -> str:
    """The ratio, or tokens a second of a row without one."""
    return f"{tokens:,.1f}/s" if ratio is None else ratio.brief


@dataclass
class Sample:
    """The measurements of one runner so far, window by window."""

    runner: Runner  # what is measured
    bytes_per_token: float = 0.0  # of its caches, in the dtype in which it ran
    losses: list[Tensor] = field(default_factory=list)  # of the windows' tokens
    decode_losses: list[Tensor] = field(default_factory=list)  # of their last, one at a time
    difference: float = 0.0  # of a logit from the unmodified model's, at most
    timings: Timings = field(default_factory=Timings)  # of prefills and steps

    def read(self, window: Int[Tensor, " L"], wanted: Float[Tensor, "K V"]) -> None:
        """Prefill one window, compare its last logits with those that are wanted, and measure the
        cache, which then holds the window."""
        self.runner.reset()
        hidden = self.timings.observe("prefill", partial(self.runner.hidden, window[None]))
        self.bytes_per_token = self.runner.cache_bytes / len(window)
        losses, difference = compare_logits(self.runner.model, window, hidden[0], wanted)
        self.losses.append(losses)
        self.difference = max(self.difference, difference, key=lambda x: (math.isnan(x), x))

    def decode(self, window: Int[Tensor, " L"], first: "Sample | None" = None) -> None:
        """Decode the last tokens of a window that the caches hold, one at a time.

        With `first`, whose caches hold the window, too, the steps take turns with those of the same
        tokens there until the ratio of their times is known.
        """
        steps = Steps(self, window)
        if first is not None:
            others = [Steps(first, window)] if first is not self else []
            take_turns("decode", [(each.sample.timings, each) for each in (*others, steps)], STEPS)
        self.decode_losses.append(steps.losses())

    def prefill(self, window: Int[Tensor, " L"]) -> Tensor:
        """The prefill of one window; the caches are empty before and afterwards."""
        hidden = self.runner.hidden(window[None])
        self.runner.reset()
        return hidden

    def row(
        self, name: str, exact: bool, first: "Sample", *, context: int, memory: int, dtype: str
    ) -> Row:
        """The row of the table that these measurements make, compared with the first row's; its
        caches are stated in `dtype`."""
        losses, decoded = torch.cat(self.losses), torch.cat(self.decode_losses)
        layers = tuple(map(shape_of, self.runner.layers))
        storage = storage_of(self.runner.caches, [layer.window for layer in layers])

        def taken(tokens: int, dtype: str = dtype) -> int:
            """Bytes by a formula, or without one in proportion to those that were measured."""
            if storage is None:
                return round(self.bytes_per_token * tokens)
            return bytes_of_caches(layers, storage, context=tokens, dtype=dtype)

        def ratio(own: Tensor, base: list[Tensor]) -> Ratio | None:
            return None if first is self else perplexity_ratio(own, torch.cat(base))

        return Row(
            name,
            exact,
            cache_bytes_per_token=taken(context) / context,
            run_bytes_per_token=taken(context, dtype_name(self.runner.model.dtype)) / context,
            context_in_memory=largest(taken, memory),
            layers=layers,
            storage=storage,
            perplexity=math.exp(losses.double().mean()),
            decode_perplexity=math.exp(decoded.double().mean()),
            perplexity_ratio=ratio(losses, first.losses),
            decode_perplexity_ratio=ratio(decoded, first.decode_losses),
            largest_logit_difference=self.difference,
            **self.timings.speeds(context),
        )


class Steps:
    """Decoding steps of one token, over the last tokens of a window.

    The caches of the sample's runner hold the window, or what earlier steps left of it. The first
    step is taken at once: it may compile. Calls beyond the window repeat its last token.
    """

    def __init__(self, sample: Sample, window: Int[Tensor, " L"]) -> None:
        start = max(0, len(window) - 1 - DECODED)
        sample.runner.truncate(start)
        self.sample, self._following = sample, window[start + 1 :]
        self._tokens = chain(window[start:-1].split(1), repeat(window[-1:]))
        self._logits: list[Tensor] = []
        sample.timings.observe("decode", self)

    def __call__(self) -> Float[Tensor, "1 1 V"]:
        logits = self.sample.runner.step(next(self._tokens)[None])
        self._logits.append(logits[0])
        return logits

    def losses(self) -> Float[Tensor, " T"]:
        """The losses of the window's last tokens, after the steps that are not yet taken."""
        while len(self._logits) < len(self._following):
            self()
        logits = torch.cat(self._logits[: len(self._following)])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, self._following, reduction="none")


def time_prefills(samples: Sequence[Sample], window: Int[Tensor, " L"]) -> None:
    """Time prefills of one window by all samples in turns; their caches are empty afterwards."""
    for each in samples:
        each.runner.reset()
    runs = [(each.timings, partial(each.prefill, window)) for each in samples]
    take_turns("prefill", runs, PREFILLS)
