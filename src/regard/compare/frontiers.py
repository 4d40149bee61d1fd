"""The frontier of a model: bytes of the cache against loss, one row a method and budget.

Every method reads the beginning of each window in one pass, and then the rest token by token, from
a cache that it has made smaller. Losses are compared with the shipped cache's on the same windows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.compare.candidates import DECODED, Candidate, methods, within
from regard.compare.measure import Row
from regard.compare.needles import Document, answered
from regard.compare.runner import Progress, Runner, Runners, Work
from regard.compare.shapes import bytes_of_caches, shape_of, storage_in, storage_of
from regard.compare.texts import Texts
from regard.convert.measuring import dtype_name
from regard.hf import attention_modules, attention_of
from regard.hf.generating.predicting import logits_of
from regard.page.page import table
from regard.sparse import CondensingCache
from regard.sparse.evicting import Evicting
from regard.turns import Ratio

DRAWS = 2000  # of windows, of the bootstrap: its quantiles are then steady in the second digit
ROW = 30  # seconds of a row, about
HEADS = ("method", "cache bytes a token", "of shipped", "perplexity", "decode perplexity", "found")


@dataclass(frozen=True)
class Frontier:
    """The measurements of `frontier`.

    Attributes:
        model: its name.
        context: tokens of a window.
        windows: their number.
        text: where they are from.
        questions: about documents.
        budget: the share that was asked for, if one was.
        rows: the shipped one first.

    Examples:
        >>> from regard.compare import Frontier, Row
        >>> rows = (Row("GQA, as shipped", cache_bytes_per_token=512.0),)
        >>> Frontier("tiny", 512, 8, "my text", 0, None, rows).verdict
        'No method ran beside the shipped cache.'
    """

    model: str
    context: int
    windows: int
    text: str
    questions: int
    budget: float | None
    rows: tuple[Row, ...]

    @property
    def legend(self) -> str:
        """The meaning of the columns, for a line below the table."""
        return (
            "*: no other row has both fewer bytes and a lower decode perplexity. Perplexities: "
            "ratios to the first row's, with 95 % intervals of a paired bootstrap over windows. "
            "Found: questions answered rightly about documents that were read before the question."
        )

    @property
    def title(self) -> str:
        """The heading of a page."""
        return f"{self.model}: the smallest cache for a loss"

    @property
    def about(self) -> str:
        """The texts, for the line above the table."""
        return (
            f"{self.windows} windows of {self.context:,} tokens of {self.text}, "
            f"{self.questions} questions after compression"
        )

    def table(self, full: bool = True) -> tuple[list[str], list[list[str]]]:
        """The headings and the cells of all rows that ran; a star marks those on the frontier."""
        rows = [
            [
                f"* {row.name}" if row.best else row.name,
                f"{row.cache_bytes_per_token:,.0f}",
                f"{row.share:.0%}",
                _ratio(row.perplexity, row.perplexity_ratio),
                _ratio(row.decode_perplexity, row.decode_perplexity_ratio),
                "" if row.found is None else f"{row.found:.0%}",
            ]
            for row in self.rows
            if row.ran
        ]
        return list(HEADS), rows

    def drawn(self, row: Row) -> float | None:
        """The perplexity of a row in a picture."""
        return row.decode_perplexity

    def _repr_html_(self) -> str:
        """The verdict and the table, for notebooks and pages."""
        return f"<p>{escape(self.verdict)}</p>\n{table(self.about, *self.table())}"

    @property
    def verdict(self) -> str:
        """The row that loses least within the budget; without one, the rows on the frontier."""
        if all(row.decode_perplexity_ratio is None for row in self.rows):
            return "No method ran beside the shipped cache."
        if self.budget is None:
            names = "; ".join(f"{row.name} ({row.share:.0%})" for row in self.rows if row.best)
            return f"No row has both fewer bytes and a lower decode perplexity than: {names}."
        share = f"{self.budget:.0%} of the shipped cache"
        losses = {
            row.name: ratio
            for row in self.rows
            if (ratio := row.decode_perplexity_ratio) and (row.share or 1.0) <= self.budget + 5e-3
        }
        if not losses:
            return f"No method fits {share}."
        least, *others = sorted(losses, key=lambda name: losses[name].value)
        loss = losses[least]
        near = [name for name in others if losses[name].low <= loss.high]
        more = f"; the intervals do not tell it from {', '.join(near)}" if near else ""
        return f"At {share}, {least} loses least: {loss.value:.3f}x the decode perplexity{more}."


def _ratio(value: float | None, ratio: Ratio | None) -> str:
    if ratio is None:
        return f"{value:,.2f}"
    return f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"


def front(points: dict[str, tuple[float, float]]) -> list[str]:
    """The names on the Pareto front of points, from the least first coordinate.

    Examples:
        >>> front({"a": (2.0, 1.0), "b": (1.0, 3.0), "c": (2.0, 2.0)})
        ['b', 'a']
    """
    best: list[str] = []
    for name in sorted(points, key=points.__getitem__):
        if not best or points[name][1] < points[best[-1]][1]:
            best.append(name)
    return best


def bootstrap(losses: Float[Tensor, "N T"], base: Float[Tensor, "N T"]) -> Ratio:
    """The ratio of two perplexities of the same windows, from the losses of each token in nats, and
    the 95 % interval of a bootstrap that draws windows, both losses of one together.

    Examples:
        >>> import torch
        >>> base = torch.rand(8, 16)
        >>> round(bootstrap(base + 0.5, base).high, 4)  # exp(0.5), whatever the window
        1.6487
    """
    differences = (losses - base).double().mean(1)
    count = len(differences)
    if count < 2:
        return Ratio(math.exp(differences.mean()), 0.0, math.inf, count)
    chance = torch.Generator().manual_seed(0)
    drawn = torch.randint(count, (DRAWS, count), generator=chance)
    means = differences.cpu()[drawn].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).exp().tolist()
    return Ratio(math.exp(differences.mean()), low, high, count)


@torch.no_grad()
def frontier(
    model: Any,
    texts: Texts,
    *,
    documents: Sequence[Document] = (),
    name: str = "model",
    cache_dtype: torch.dtype | None = None,
    candidates: Sequence[Candidate] | None = None,
    budget: float | None = None,
    on_row: Callable[[Frontier], None] = lambda so_far: None,
    progress: Progress = lambda what, done, total: None,
) -> Frontier:
    """Measure the loss of a model with each of several smaller caches.

    Args:
        model: a transformers model of a family that `regard.hf` supports.
        texts: from `texts_for`; intervals need several windows.
        documents: from `documents_of`, for questions after compression.
        name: the model's name in the result.
        cache_dtype: of the checkpoint, for bytes; that of the model if None.
        candidates: the rows, the shipped one first; those of `methods` if None.
        budget: a share of the shipped cache's bytes: the rows are then those that fit.
        on_row: called after each row with the frontier so far.
        progress: as for `compare`.

    Raises:
        ValueError: if the model's attention is unknown, the windows are too short, or `budget` is
            not between 0 and 1.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.compare import Texts, frontier
        >>> from regard.compare.candidates import evicted, methods
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=1, intermediate_size=16)
        >>> model = LlamaForCausalLM(config).eval()
        >>> texts = Texts(torch.randint(20, (2, 120)), torch.randint(20, (2, 24)), "random tokens")
        >>> rows = frontier(model, texts, candidates=[methods()[0], evicted(0.5)]).rows
        >>> [f"{row.share:.0%}" for row in rows]
        ['100%', '50%']
    """
    windows = texts.windows.to(model.device)
    _check(windows, budget)
    shipped = [attention_of(module) for module in attention_modules(model).values()]
    stored, context = cache_dtype or model.dtype, windows.shape[1]
    dtype = dtype_name(stored)
    if candidates is None and budget is None:
        candidates = methods()
    elif candidates is None:
        shapes = tuple(map(shape_of, shipped))
        candidates = within(budget or 1.0, shapes, context=context, dtype=dtype)
    named = [replace(each, name=each.name.format(kind=shipped[0].kind)) for each in candidates]
    runners = Runners(model, shipped, named, texts.calibration.to(model.device), stored, 0)
    work = Work(progress, ROW * len(named) + runners.seconds)
    questions = sum(len(each.questions) for each in documents)
    result = Frontier(name, context, len(windows), texts.source, questions, budget, ())
    first: _Losses | None = None
    for each in named:
        runner = runners.of(each, work)
        work.begin(each.name, ROW)
        if isinstance(runner, str):
            row = Row(each.name, remark=runner)
        else:
            mine = _measure(runner, windows, documents, dtype)
            first = first or mine
            row = mine.row(each.name, first)
        result = replace(result, rows=_marked([*result.rows, row]))
        on_row(result)
    work.end()
    return result


def _check(windows: Int[Tensor, "N L"], budget: float | None) -> None:
    """Raise for windows or a budget that cannot be measured."""
    least = 2 * DECODED - 8
    if windows.shape[1] < least:
        raise ValueError(
            f"windows have {least} tokens or more, {DECODED} of which are decoded, got "
            f"{windows.shape[1]}; give a longer context"
        )
    if budget is not None and not 0.0 < budget < 1.0:
        raise ValueError(f"budget is a share between 0 and 1, got {budget}; give 0.25, say")


@dataclass(frozen=True)
class _Losses:
    """Losses of one method on the beginnings and on the ends of windows, `[N, T]`."""

    bytes_per_token: float
    beginnings: Float[Tensor, "N T"]
    ends: Float[Tensor, "N D"]
    answers: Bool[Tensor, "documents facts"] | None

    def row(self, name: str, first: "_Losses") -> Row:
        row = Row(
            name,
            cache_bytes_per_token=self.bytes_per_token,
            share=self.bytes_per_token / first.bytes_per_token,
            perplexity=math.exp(self.beginnings.double().mean()),
            decode_perplexity=math.exp(self.ends.double().mean()),
            found=None if self.answers is None else float(self.answers.double().mean()),
        )
        if first is self:
            return row
        return replace(
            row,
            perplexity_ratio=bootstrap(self.beginnings, first.beginnings),
            decode_perplexity_ratio=bootstrap(self.ends, first.ends),
        )


def _measure(
    runner: Runner, windows: Int[Tensor, "N L"], documents: Sequence[Document], dtype: str
) -> _Losses:
    """Read all windows as the rows of one batch, and answer the questions."""
    begin = windows.shape[1] - DECODED
    runner.reset()
    hidden = runner.read(windows[:, :begin])
    beginnings = _losses(runner, hidden[:, :-1], windows[:, 1:begin])
    states = [hidden[:, -1:]]
    for at in range(begin, windows.shape[1] - 1):
        states.append(runner.hidden(windows[:, at : at + 1]))
    ends = _losses(runner, torch.cat(states, 1), windows[:, begin:])
    taken = _bytes_per_token(runner, len(windows), dtype)
    answers = answered(runner, documents) if documents else None
    return _Losses(taken, beginnings, ends, answers)


def _losses(runner: Runner, hidden: Tensor, tokens: Tensor) -> Float[Tensor, "N T"]:
    """The losses of tokens, from the hidden states before them: a row of the batch at a time."""
    found = []
    for states, following in zip(hidden, tokens, strict=True):
        logits = logits_of(runner.model, states[None])[0].float()
        found.append(F.cross_entropy(logits, following, reduction="none"))
    return torch.stack(found)


def _bytes_per_token(runner: Runner, rows: int, dtype: str) -> float:
    """Bytes in the caches of all layers a token seen, in the checkpoint's dtype where a formula is
    known, else as they are."""
    total = 0.0
    for layer, cache in zip(runner.layers, runner.caches, strict=True):
        stored: Any = cache
        shape, evicts = shape_of(layer), isinstance(stored, Evicting | CondensingCache)
        held = stored.rows if evicts else stored.length
        held = round(fmean(held)) if isinstance(held, tuple) else held  # of each key head
        storage = storage_in(stored) if evicts else storage_of([stored], [shape.window])
        if storage is None or not held:
            total += stored.nbytes / rows / stored.length
        else:
            total += bytes_of_caches([shape], storage, context=held, dtype=dtype) / stored.length
    return total


def _marked(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows, with those on the Pareto front marked."""
    points = {
        row.name: (row.cache_bytes_per_token, row.decode_perplexity)
        for row in rows
        if row.cache_bytes_per_token is not None and row.decode_perplexity is not None
    }
    best = front(points)
    return tuple(replace(row, best=row.name in best) for row in rows)
