"""Rectangles of scores: the queries of one piece by the keys of one run, as a partial result."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.cache import Part
from regard.constants import accumulating_dtype
from regard.masks import Mask, Span
from regard.masks.runs import Finder, Runs, intersection, without_gaps
from regard.ops.attend import prepare
from regard.ops.backends.blocked import SCORES, steps_of
from regard.ops.backends.common import columns_contiguous, same_width
from regard.ops.bias import ScoreBias
from regard.ops.block_gradients import Step, for_masked, forward_block
from regard.ops.blocks import BLOCK, GAP, Gathered, plan
from regard.ops.call import Call, is_empty, is_everything
from regard.ops.partial import Partial
from regard.ops.prepared import Prepared

_BLOCKWISE = ("auto", "blocked", "sdpa")  # backends whose kernel on the CPU is torch's


@dataclass(frozen=True, eq=False)
class Scoring:
    """The options of a call's scores: scale, softcap, bias, mask; the same for all rectangles."""

    mask: Mask  # about the whole sequence
    scale: float  # as for `attend`
    softcap: float | None  # as for `attend`
    rule: ScoreBias | None  # a score bias that is a rule; tensors are passed with the queries
    biased: bool  # whether there is a score bias of either kind
    backend: str  # as for `attend`
    precision: str  # as for `attend`
    device: torch.device  # of the queries

    @property
    def fused(self) -> bool:
        """Whether torch's CPU kernel, which has a log-sum-exp, computes every block."""
        plain = self.softcap is None and not self.biased and self.scale > 0
        return plain and self.device.type == "cpu" and self.backend in _BLOCKWISE

    @cached_property
    def find(self) -> Finder:
        """The visible keys of blocks of queries."""
        return self.mask.finder()

    def call(self, span: Span, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Call:
        """The description of a rectangle."""
        return self.prepared(span, q, k, v, bias, backend="eager").call

    def prepared(
        self,
        span: Span,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        *,
        backend: str | None = None,
    ) -> Prepared:
        """The call of a rectangle, and its backend."""
        return prepare(
            q,
            k,
            v,
            mask=self.mask,
            span=span,
            scale=self.scale,
            softcap=self.softcap,
            score_bias=self.rule if bias is None else bias,
            backend=self.backend if backend is None else backend,
            precision=self.precision,
            partial=True,
        )


@dataclass(frozen=True)
class Rectangle:
    """Queries that follow one another by keys that follow one another."""

    span: Span  # their slots
    first: int  # the first query, among all that are at hand
    key: int  # the first key, among all that are at hand

    def of_queries(self, x: Tensor) -> Tensor:
        """A view of the rectangle's queries, along axis 2."""
        return x.narrow(2, self.first, self.span.num_queries)

    def of_keys(self, x: Tensor) -> Tensor:
        """A view of the rectangle's keys, along axis 2."""
        return x.narrow(2, self.key, self.span.num_keys)

    def of_scores(self, x: Tensor) -> Tensor:
        """A view of the rectangle's part of a tensor that broadcasts to all scores."""
        if x.dim() >= 1 and x.shape[-1] != 1:
            x = x.narrow(-1, self.span.kv_start, self.span.num_keys)
        if x.dim() >= 2 and x.shape[-2] != 1:
            x = x.narrow(-2, self.span.first_query, self.span.num_queries)
        return x

    def at(self, first: int, stop: int, kv_start: int, kv_stop: int) -> "Rectangle":
        """A part of it, of the queries and keys at these slots."""
        moved = first - self.span.first_query, kv_start - self.span.kv_start
        span = Span(first, stop, kv_start, kv_stop)
        return Rectangle(span, self.first + moved[0], self.key + moved[1])


def rectangles(queries: Runs, keys: Runs) -> Iterator[Rectangle]:
    """Each run of queries by each run of keys; both are side by side in memory."""
    first = 0
    for q_start, q_stop in queries:
        key = 0
        for kv_start, kv_stop in keys:
            yield Rectangle(Span(q_start, q_stop, kv_start, kv_stop), first, key)
            key += kv_stop - kv_start
        first += q_stop - q_start


def from_diagonal(mask: Mask, whole: Rectangle) -> Iterator[Rectangle]:
    """Earlier keys that all of the queries may attend to, and the rest, if there are such keys.

    What is left of a causal mask then begins with its diagonal, as torch's kernel takes it.
    """
    span = whole.span
    first, stop = span.first_query, span.last_query + 1
    before = Span(first, stop, span.kv_start, max(span.kv_start, first))
    if span.kv_start < first < span.kv_stop and is_everything(mask.within(before)):
        yield whole.at(first, stop, span.kv_start, first)
        whole = whole.at(first, stop, first, span.kv_stop)
    yield whole


def tiles(scoring: Scoring, whole: Rectangle, heads: int) -> Iterator[Rectangle]:
    """The parts of a rectangle with visible scores, each of no more scores than fit a cache;
    `heads` are the query heads in all rows of the batch."""
    span = whole.span
    size = max(BLOCK // 4, min(SCORES // max(1, heads * span.num_keys), BLOCK))
    for first in range(span.first_query, span.last_query + 1, size):
        stop = min(first + size, span.last_query + 1)
        some = scoring.find(first, stop - 1).some
        for run in without_gaps(intersection(some, [(span.kv_start, span.kv_stop)]), GAP):
            yield whole.at(first, stop, *run)


def attend_rectangle(
    scoring: Scoring,
    place: Rectangle,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    found: Partial,
) -> None:
    """Attention of this rank's queries `[B, H, L, D]` to the keys and values at hand, over one
    rectangle, merged into `found`, that of all queries, in place. A score bias that is a tensor is
    that of the whole sequence."""
    if scoring.fused and not runs_tiled(scoring, place, q, k, v):
        for part in from_diagonal(scoring.mask, place):
            _fused(scoring, part, q, k, v, found)
        return
    in_tiles = scoring.device.type == "cpu" and not scoring.fused
    parts = tiles(scoring, place, q.shape[0] * q.shape[1]) if in_tiles else [place]
    for part in parts:
        keys, values, queries = part.of_keys(k), part.of_keys(v), part.of_queries(q)
        added = None if bias is None else part.of_scores(bias)
        prepared = scoring.prepared(part.span, queries, keys, values, added)
        if not is_empty(prepared.call):
            span = part.span
            result = prepared.partial(queries, [Part(span.kv_start, span.kv_stop, (keys, values))])
            _merge(Partial(*map(part.of_queries, found)), result)


def runs_tiled(scoring: Scoring, place: Rectangle, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the compiled kernel for prefills, whose partial results are float32, is chosen."""
    if scoring.backend != "auto":
        return False
    heads = place.of_queries(q), place.of_keys(k), place.of_keys(v)
    return scoring.prepared(place.span, *heads, None).name == "tiled"


def _fused(
    scoring: Scoring, place: Rectangle, q: Tensor, k: Tensor, v: Tensor, found: Partial
) -> None:
    """By torch's kernel, in float32: it rounds its results to the dtype of its inputs."""
    width = v.shape[3]
    for part, step, inputs in fused_steps(scoring, place, q, k, v):
        out, lse, _ = forward_block(step, *inputs)
        lse = for_masked(step, lse, -torch.inf)
        here = (step.block.of_queries(part.of_queries(x)) for x in found)
        _merge(Partial(*here), Partial(out[..., :width], lse))


def fused_steps(
    scoring: Scoring, place: Rectangle, q: Tensor, k: Tensor, v: Tensor
) -> Iterator[tuple[Rectangle, Step, tuple[Tensor, Tensor, Tensor]]]:
    """The blocks of a rectangle for torch's kernel: the part of the rectangle that they divide, the
    block, and its queries, keys and values, all of one width, in float32 or float64."""
    wide = accumulating_dtype(q.dtype)
    q, k, v = (x.to(wide) for x in (place.of_queries(q), place.of_keys(k), place.of_keys(v)))
    call = scoring.call(place.span, q, k, v, None)
    if is_empty(call):
        return
    hidden = call.span.kv_start - place.span.kv_start
    part = Rectangle(call.span, place.first, place.key + hidden)
    k, v = (x.narrow(2, hidden, call.num_keys) for x in (k, v))
    q, k, v = map(columns_contiguous, same_width(q, k, v))
    blocks = [block for block in plan(call, BLOCK, whole=True) if block.runs]
    keys, values = Gathered(k, blocks), Gathered(v, blocks)
    for step in steps_of(call, blocks):
        yield part, step, (step.block.of_queries(q), keys.of(step.block), values.of(step.block))


def _merge(here: Partial, result: Partial) -> None:
    """Merge a partial result into `here`, views of the result so far, in place (`regard.merge`).
    On a CPU it is copied if `here` is empty: elsewhere the question waits for the device."""
    if here.lse.is_cpu and bool((here.lse == -torch.inf).all()):
        here.out.copy_(result.out)
        here.lse.copy_(result.lse)
        return
    lse = torch.logaddexp(here.lse, result.lse)
    share = torch.exp(result.lse - lse).masked_fill(lse == -torch.inf, 0.0)
    here.out.lerp_(result.out, share.unsqueeze(-1))
    here.lse.copy_(lse)
