"""The attention weights of a call that ran, by the definition, in blocks of rows.

A block holds all visible keys of its queries, so its softmax is exact without the rest. Nothing is
as large as queries x keys.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.cache import Part
from regard.constants import accumulating_dtype
from regard.masks import Dense, Span
from regard.ops import blocks
from regard.ops.call import Call, narrowed
from regard.ops.definition import scores_of, softmax
from regard.ops.parts import concatenated, visible_parts
from regard.ops.prepared import Prepared
from regard.tracing import without_autocast

BLOCK = 2**20  # weights of a block: 4 MiB of float32, which a core's cache holds about


@dataclass(frozen=True)
class RowBlock:
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
        call: the call of this row, over all keys that it read.
        q: queries.
        k: keys, in float32 or float64.
        row: the row of the batch.
        past: tokens before the first query. Its slot is another number where a window's cache
            numbers the keys it still holds from 0.
        dropped: tokens before slot 0.
    """

    call: Call
    q: Float[Tensor, "H L D"]
    k: Float[Tensor, "G S D"]
    row: int
    past: int
    dropped: int

    @property
    def last_key(self) -> int:
        """The last key that a query may attend to, as an index into the tokens."""
        return self.call.span.kv_stop - 1 + self.dropped

    def blocks(self) -> Iterator[RowBlock]:
        """The weights of all queries, some at a time."""
        size = max(1, BLOCK // (self.call.num_heads * max(1, self.call.num_keys)))
        for start in range(0, self.call.num_queries, size):
            yield self.block(start, min(size, self.call.num_queries - start))

    def block(self, start: int, count: int) -> RowBlock:
        """The weights of `count` queries of the call from `start`."""
        whole, mask = self.call.span, self.call.mask
        span = whole.part(start, start + count, whole.kv_start, whole.kv_stop)
        span = narrowed(span, mask.within(span))
        keys = [(span.kv_start, span.kv_stop)]
        some = blocks.Block((0, 1), start, count, keys, whole.kv_start, mask, aligned=False)
        call = blocks.part_of(self.call, some)
        k = self.k.narrow(1, span.kv_start - whole.kv_start, call.num_keys)
        with without_autocast(call.device):
            q = self.q[:, start : start + count].to(k.dtype) * call.scale
            grouped = q.reshape(call.num_kv_heads, -1, q.shape[-1])
            raw = (grouped @ k.mT).view(1, call.num_heads, count, call.num_keys)
            weights = _softmax(call, scores_of(call, raw))
        row = self.row if len(weights) > 1 else 0  # a rule of biases may have rows of its own
        return RowBlock(weights[row], self.past + start, span.kv_start + self.dropped)


def one_row(prepared: Prepared, q: Tensor, parts: Iterable[Part], row: int, past: int) -> OneRow:
    """One row of the batch of a call that ran."""
    part = concatenated(visible_parts(prepared.span, parts))
    call = prepared.call.over(part)
    k = part.streams[0][row].to(accumulating_dtype(call.dtype))
    start, ragged = call.given_span.q_start, isinstance(call.given_span.q_start, Tensor)
    dropped = 0 if ragged else max(0, past - int(start))
    return OneRow(_of_row(call, row), q[row], k, row, past, dropped)


def _of_row(call: Call, row: int) -> Call:
    """The call of one batch row: its own slots of queries, mask and bias."""
    start = call.given_span.q_start
    q_start = int(start[row]) if isinstance(start, Tensor) else start
    slots = q_start, q_start + call.num_queries
    span, given = (
        Span(*slots, each.kv_start, each.kv_stop) for each in (call.span, call.given_span)
    )
    mask = call.mask if call.mask.batch in (None, 1) else call.mask.row(row)
    if mask is None:  # its rows are not known one by one
        mask = Dense(_in_row(call.keep(), row)).within(call.span)
    bias = call.score_bias
    return call.but(
        batch=1,
        span=span,
        given_span=given,
        mask=mask.within(span),
        score_bias=_in_row(bias, row) if isinstance(bias, Tensor) else bias,
    )


def _softmax(call: Call, scores: Tensor) -> Tensor:
    """`definition.softmax`; in fewer passes where no row is fully masked and there is no sink."""
    rows_see = bool((scores.amax(-1) > -torch.inf).all()) if scores.shape[-1] else False
    return scores.softmax(-1) if call.sinks is None and rows_see else softmax(call, scores)


def _in_row(values: Tensor, row: int) -> Tensor:
    """One batch row of a tensor that broadcasts to `[B, H, L, S]`."""
    return values if values.dim() < 4 or values.shape[0] == 1 else values.narrow(0, row, 1)
