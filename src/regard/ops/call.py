"""A call of attention, described before anything is computed, and run on keys in parts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.cache import Part
from regard.cache.codes import Coded, CodedStreams
from regard.heads import group_heads
from regard.masks import EVERYTHING, Mask, Span
from regard.ops.bias import ScoreBias
from regard.ops.partial import Partial, accumulator, merge
from regard.tracing import without_autocast


class Backend(NamedTuple):
    """One way to compute attention: a sentence when it cannot, a guess of the time, and the work.

    `run` returns the output in the dtype of the queries. `partial` is None where a backend gives
    no log-sum-exp; then keys in several parts are joined before it runs. `coded` reads keys and
    values as codes, where a cache holds them so; None where they are written out first.
    `any_length` says that it does not object to lengths, so that an exported program may hold it.
    `note` says in a sentence what it gives up for a call, if it gives up anything.
    """

    objection: "Callable[[Call], str | None]"
    estimate: "Callable[[Call], float]"
    run: "Callable[[Call, Tensor, Tensor, Tensor], Tensor]"
    partial: "Callable[[Call, Tensor, Tensor, Tensor], Partial] | None" = None
    coded: "Callable[[Call, Tensor, Sequence[Coded | Tensor]], Tensor] | None" = None
    any_length: bool = True
    note: "Callable[[Call], str | None] | None" = None


@dataclass(frozen=True, eq=False)
class Call:
    """Everything a backend may look at. Made by `prepare`, from shapes; run on the keys in parts.

    `mask` is what was asked, simplified inside `span`; `span` holds only the keys that some query
    may see; `whole` is the rectangle as it came. `immediate` says that numbers are computed now, on
    plain tensors: nothing is traced, transformed or differentiated forward.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device
    asked: Mask
    mask: Mask
    whole: Span
    span: Span
    scale: float
    score_bias: Tensor | ScoreBias | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float
    precision: str
    needs_grad: bool
    immediate: bool
    joined: bool = False
    name: str = ""
    backend: Backend | None = None

    @property
    def num_queries(self) -> int:
        return self.span.num_queries

    @property
    def num_keys(self) -> int:
        return self.span.num_keys

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    def run(self, q: Float[Tensor, "B H L D"], parts: Iterable[Part]) -> Float[Tensor, "B H L Dv"]:
        """Attend to keys that lie in one or several parts, as caches return them.

        A part holds the streams (keys, values), or one stream alone whose first `v_head_dim`
        columns are the values.
        """
        assert self.backend is not None, "prepare() chooses the backend"
        with without_autocast(self.device):
            return self._run(q, self.cut(parts))

    def _run(self, q: Float[Tensor, "B H L D"], visible: list[Part]) -> Float[Tensor, "B H L Dv"]:
        assert self.backend is not None
        if len(visible) > 1 and (self.backend.partial is None or self.dropout):
            visible = [join(visible)]
        if len(visible) == 1:
            streams = visible[0].streams
            if isinstance(streams, CodedStreams) and self.backend.coded is not None:
                call = self.over(visible[0])
                return self.backend.coded(call, q, streams.coded)
            call, k, v = self.at(visible[0])
            return self.backend.run(call, q, k, v)
        return self._partial(q, visible).out.to(self.dtype)

    def partial(self, q: Float[Tensor, "B H L D"], parts: Iterable[Part]) -> Partial:
        """The same, unfinished: the output so far and the log-sum-exp of the scores."""
        with without_autocast(self.device):
            return self._partial(q, self.cut(parts))

    def _partial(self, q: Float[Tensor, "B H L D"], visible: list[Part]) -> Partial:
        assert self.backend is not None and self.backend.partial is not None
        pieces = [Partial.nothing(q.device)]
        if self.sinks is not None:
            pieces.append(Partial.of_sinks(self.sinks))
        for part in visible:
            call, k, v = replace(self, sinks=None).at(part)
            pieces.append(self.backend.partial(call, q, k, v))
        out, lse = merge(*pieces)
        shape = (*q.shape[:3], self.v_head_dim)
        return Partial(out.expand(shape), lse.expand(shape[:3]))

    def cut(self, parts: Iterable[Part]) -> list[Part]:
        """The parts, without the keys that no query may see; an empty one where none is left."""
        cut: list[Part] = []
        empty: list[Part] = []
        for part in parts:
            start = max(part.kv_start, self.span.kv_start)
            stop = min(part.kv_stop, self.span.kv_stop)
            if start >= stop:
                start = self.span.kv_start
                nothing = part.narrow(part.kv_start, part.kv_start)
                empty = [Part(start, start, nothing.streams)]
                continue
            if (start, stop) != (part.kv_start, part.kv_stop):
                part = part.narrow(start, stop)
            cut.append(part)
        return cut or empty

    def at(self, part: Part) -> "tuple[Call, Tensor, Tensor]":
        """This call over one part of the keys, with its keys and values."""
        call, k = self.over(part), part.streams[0]
        v = k[..., : self.v_head_dim] if call.joined else part.streams[1]
        return call, k, v

    def over(self, part: Part) -> "Call":
        """This call over one part of the keys."""
        joined = len(part.streams) == 1
        call = self if joined == self.joined else replace(self, joined=joined)
        if (part.kv_start, part.kv_stop) != (self.span.kv_start, self.span.kv_stop):
            span = replace(self.span, kv_start=part.kv_start, kv_stop=part.kv_stop)
            call = replace(call, span=span, mask=self.mask.within(span))
        return call

    def keep(self) -> Bool[Tensor, "..."]:
        """The mask as a tensor that broadcasts to `[B, H, L, S]`; at least two-dimensional."""
        return self.mask.dense(
            self.span, batch=self.batch, heads=self.num_heads, device=self.device
        )

    def bias(self) -> Float[Tensor, "..."] | None:
        """What is added to the scores of this span's keys, in their dtype: float32, or float64 for
        float64 queries. Broadcasts to `[B, H, L, S]`."""
        bias, dtype = self.score_bias, accumulator(self.dtype)
        if bias is None:
            return None
        if not isinstance(bias, Tensor):
            return bias.bias(self.span, device=self.device, dtype=dtype).to(dtype)
        if bias.dim() and bias.shape[-1] != 1:
            bias = bias.narrow(-1, self.span.kv_start - self.whole.kv_start, self.num_keys)
        return bias.to(dtype)

    def may_look(self) -> bool:
        """Whether the call may run first and check its result for NaN, which is cheaper than
        `clean`: on plain CPU tensors without a graph, where reading a number waits for nothing."""
        return self.immediate and not self.needs_grad and self.device.type == "cpu"

    def clean(
        self, k: Float[Tensor, "B G S D"], v: Float[Tensor, "B G S Dv"], keep: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Zero the keys and values that no query sees: padding and stale slots may hold anything,
        and 0 * nan is nan."""
        seen = keep.any(-2)
        if seen.dim() < 3:
            unseen = ~seen.reshape(1, 1, -1, 1)
        elif seen.shape[1] in (1, self.num_kv_heads):
            unseen = ~seen.unsqueeze(-1)
        else:
            unseen = ~group_heads(seen.unsqueeze(-1), self.num_kv_heads).any(2)
        return k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)


def join(parts: list[Part]) -> Part:
    """One part out of several that follow one another."""
    if len(parts) == 1:
        return parts[0]
    streams = tuple(
        torch.cat(pieces, 2) for pieces in zip(*(p.streams for p in parts), strict=True)
    )
    return Part(parts[0].kv_start, parts[-1].kv_stop, streams)


def narrowed(span: Span, mask: Mask) -> Span:
    """The span without the keys before the first and after the last that `mask` may show."""
    if torch.compiler.is_exporting():  # one program serves every length
        return span
    low, high = mask.reach(span)
    start = span.kv_start if low is None else max(span.kv_start, low)
    stop = span.kv_stop if high is None else min(span.kv_stop, high + 1)
    start = min(start, span.kv_stop)  # nothing left, but still inside the span
    stop = max(start, stop)
    if (start, stop) == (span.kv_start, span.kv_stop):
        return span
    return replace(span, kv_start=start, kv_stop=stop)


def shown(value: float | None) -> str:
    """A number in a message; inside a compiled graph it may be symbolic, and has no digits."""
    return "a number" if torch.compiler.is_compiling() else str(value)


def is_everything(mask: Mask) -> bool:
    """Whether nothing is left to hide."""
    return mask is EVERYTHING or mask == EVERYTHING


def is_empty(call: Call) -> bool:
    """Whether there is nothing to compute: no batch, no query, or no key in sight."""
    return 0 in (call.batch, call.num_queries, call.num_keys)
