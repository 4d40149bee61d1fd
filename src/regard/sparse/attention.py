"""Attention to the rows of a cache that holds some of the tokens, for each key head others.

Masks speak of the slots of the sequence. Where a mask shows every token before the first query, as
a causal one does, rows need no mask, whatever their slots; else the mask is read at their slots.
"""

from typing import Any

from jaxtyping import Int
from torch import Tensor

from regard.cache import Part
from regard.layers.attending import Attending, Keys
from regard.layers.inputs import Arrival, Layer
from regard.masks import EVERYTHING, Mask, Span
from regard.ops.attend import prepare
from regard.ops.memo import Arguments, prepare_call
from regard.ops.partial import Partial, merge
from regard.ops.prepared import Prepared
from regard.sparse.slots import AtSlots


class Sparse(Attending):
    """Base class of caches that attend to some of the tokens seen."""

    def prepare(self, layer: Layer, q: Tensor, keys: Keys, at: Arrival) -> Prepared:
        """The call of a layer over the slots of all tokens seen, without sinks."""
        options = layer.options(at) | {"sinks": None}
        return prepare_call(Arguments(q, *keys.outlines, at.span, **options))


def attended_rows(
    prepared: Prepared,
    q: Tensor,
    part: Part,
    slots: Int[Tensor, "B G n"],
    sinks: Tensor | None,
) -> Tensor:
    """Attention of the queries of the last tokens, `[B, H, L, D]`, to all rows of a cache:
    `[B, H, L, Dv]`. `prepared` is the call over all slots of the sequence; the last rows of `part`
    are those of the queries' own tokens; `slots` has the slot of each row, for each key head that
    is stored; `sinks` has a score for each head."""
    call, new = prepared.call, q.shape[2]
    start, stop, _ = part
    if start == 0:  # every token is held
        mask, span = call.given_mask, call.given_span
        return prepare_rows(prepared, q, part, mask, span, sinks=sinks).run(q, (part,))
    rule = call.given_mask.within(call.given_span)
    group = call.num_heads // slots.shape[1]
    first = stop - new
    if new == 1:
        mask = _mask_of_rows(rule, slots, group, start, Span(first, stop, 0, stop))
        span = Span(first, stop, start, stop)
        return prepare_rows(prepared, q, part, mask, span, sinks=sinks).run(q, (part,))
    mask = _mask_of_rows(rule, slots[..., :-new], group, start, Span(first, stop, 0, first))
    found = [
        _partial(prepared, q, part.narrow(start, first), mask, Span(first, stop, start, first)),
        _partial(prepared, q, part.narrow(first, stop), rule, Span(first, stop, first, stop)),
    ]
    if sinks is not None:
        found.append(Partial.of_sinks(sinks))
    return merge(*found).out.to(call.dtype)


def _mask_of_rows(rule: Mask, slots: Tensor, group: int, start: int, span: Span) -> Mask:
    """The mask of rows, numbered from `start`, that lie anywhere inside the keys of a span."""
    if rule.within(span) is EVERYTHING:
        return EVERYTHING
    return AtSlots(rule, slots, group, start)


def _partial(prepared: Prepared, q: Tensor, part: Part, mask: Mask, span: Span) -> Partial:
    return prepare_rows(prepared, q, part, mask, span, partial=True).partial(q, (part,))


def prepare_rows(
    prepared: Prepared, q: Tensor, part: Part, mask: Mask, span: Span, **options: Any
) -> Prepared:
    """The call over some rows, with the settings of the call over the sequence."""
    call = prepared.call
    k, v = Keys.of((part,), call.v_head_dim).outlines
    return prepare(
        q, k, v, mask=mask, span=span, scale=call.scale, softcap=call.softcap,
        backend=prepared.requested, precision=call.precision, **options,
    )  # fmt: skip
