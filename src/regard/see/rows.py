"""The attention weights of a call that ran, by the definition, in blocks of rows.

A block holds all visible keys of its queries, so its softmax is exact without the rest. Nothing is
as large as queries x keys.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard.cache import Part
from regard.constants import accumulating_dtype
from regard.masks import Dense, Span
from regard.ops.call import Call, is_everything, narrowed
from regard.ops.definition import scores_of, softmax
from regard.ops.parts import concatenated, visible_parts
from regard.ops.prepared import Prepared
from regard.tracing import without_autocast

BLOCK = 2**20  # weights of a block: 4 MiB of float32, which a core's cache holds about


@dataclass(frozen=True)
class Block:
    """The weights of some queries of one batch row.

    Args:
        weights: `[H, queries, keys]`, in float32 or float64.
        query: the first query, as an index into the tokens of the cache and the call.
        key: the first key, likewise.
    """

    weights: Float[Tensor, "H R S"]
    query: int
    key: int


@dataclass(frozen=True)
class OneRow:
    """A call of attention that ran, reduced to one row of its batch.

    Args:
        call: the call, over all keys that it read.
        q: queries.
        k: keys, in float32 or float64.
        row: the row of the batch.
        past: tokens before the first query. Its slot is another number where a window's cache
            numbers the keys it still holds from 0.
    """

    call: Call
    q: Float[Tensor, "H L D"]
    k: Float[Tensor, "G S D"]
    row: int
    past: int

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.call.num_heads

    @property
    def last_key(self) -> int:
        """The last key that a query may attend to, as an index into the tokens."""
        return self.call.span.kv_stop - 1 + self._dropped

    @property
    def _q_start(self) -> int:
        """The slot of the first query."""
        start = self.call.given_span.q_start
        return int(start[self.row]) if isinstance(start, Tensor) else start

    @property
    def _dropped(self) -> int:
        """Tokens before slot 0."""
        ragged = isinstance(self.call.given_span.q_start, Tensor)
        return 0 if ragged else max(0, self.past - self._q_start)

    def blocks(self) -> Iterator[Block]:
        """The weights of all queries, some at a time."""
        size = max(1, BLOCK // (self.heads * max(1, self.call.num_keys)))
        for start in range(0, self.call.num_queries, size):
            yield self.block(start, min(start + size, self.call.num_queries))

    def block(self, start: int, stop: int) -> Block:
        """The weights of the queries `start` up to `stop` of the call."""
        call = _of_rows(self.call, self.row, self._q_start + start, stop - start)
        first = call.span.kv_start - self.call.span.kv_start
        k = self.k.narrow(1, first, call.num_keys)
        with without_autocast(call.device):
            q = self.q[:, start:stop].to(k.dtype) * call.scale
            grouped = q.reshape(call.num_kv_heads, -1, q.shape[-1])
            raw = (grouped @ k.mT).view(1, call.num_heads, stop - start, call.num_keys)
            weights = _softmax(call, scores_of(call, raw))
        return Block(weights[0], self.past + start, call.span.kv_start + self._dropped)


def one_row(prepared: Prepared, q: Tensor, parts: Iterable[Part], row: int, past: int) -> OneRow:
    """One row of the batch of a call that ran."""
    part = concatenated(visible_parts(prepared.span, parts))
    call = prepared.call.over(part)
    return OneRow(call, q[row], part.streams[0][row].to(accumulating_dtype(call.dtype)), row, past)


def _softmax(call: Call, scores: Tensor) -> Tensor:
    """`definition.softmax`; in fewer passes where no row is fully masked and there is no sink."""
    rows_see = bool((scores.amax(-1) > -torch.inf).all()) if scores.shape[-1] else False
    return scores.softmax(-1) if call.sinks is None and rows_see else softmax(call, scores)


def _of_rows(call: Call, row: int, q_start: int, count: int) -> Call:
    """The call for `count` of its queries, of one batch row."""
    span = Span(q_start, q_start + count, call.span.kv_start, call.span.kv_stop)
    mask = call.mask.within(span)
    span = narrowed(span, mask)
    mask = mask.within(span)
    device, heads = call.device, call.num_heads
    if not is_everything(mask):
        keep = mask.dense(span, batch=call.batch, heads=heads, device=device)
        mask = Dense(_in_row(keep, row)).within(span)
    return replace(
        call,
        batch=1,
        span=span,
        given_span=span,
        mask=mask,
        score_bias=_bias(call, row, span),
    )


def _bias(call: Call, row: int, span: Span) -> Tensor | None:
    """What is added to the scores of a span, for one batch row."""
    bias = call.score_bias
    if bias is None:
        return None
    if not isinstance(bias, Tensor):
        dtype = accumulating_dtype(call.dtype)
        return _in_row(bias.bias(span, device=call.device, dtype=dtype), row)
    whole = call.given_span
    own = whole.q_start[row] if isinstance(whole.q_start, Tensor) else whole.q_start
    if bias.dim() >= 2 and bias.shape[-2] != 1:
        bias = bias.narrow(-2, span.first_query - int(own), span.num_queries)
    if bias.dim() and bias.shape[-1] != 1:
        bias = bias.narrow(-1, span.kv_start - whole.kv_start, span.num_keys)
    return _in_row(bias, row)


def _in_row(values: Tensor, row: int) -> Tensor:
    """Of a tensor that broadcasts to `[B, H, L, S]`, one batch row."""
    if values.dim() < 4 or values.shape[0] == 1:
        return values
    return values.narrow(0, row, 1)
