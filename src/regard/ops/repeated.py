"""Calls that repeat: the layers of a model have equal shapes, and the next step has one key more.

Describing a call takes as long as several operators. So the latest description is memoised, with
all that it was made from; it holds no tensor.
"""

from typing import Any

import torch
from torch import Tensor

from regard.masks import EVERYTHING, AllOf, Causal, Everything, Mask, SlidingWindow, Span
from regard.ops.call import begins_with
from regard.ops.choose import choose, rounded
from regard.ops.prepared import Prepared
from regard.ops.rates import SPEED
from regard.tracing import is_immediate

Facts = tuple[object, ...]
_DATALESS = frozenset({Everything, Causal, SlidingWindow})
_latest: tuple[Facts, Prepared, bool] | None = None  # the last says whether no key is hidden


def facts_of(
    q: Tensor, k: Tensor, v: Tensor, mask: object, bias: object, sinks: object, *options: Any
) -> Facts | None:
    """All that a description depends on but the span; None for calls that are not memoised: with
    gradients, a bias, sinks, a mask that holds data, or traced."""
    if torch.compiler.is_compiling() or bias is not None or sinks is not None:
        return None
    if torch.is_grad_enabled() or not _is_dataless(mask) or not is_immediate(q, k, v):
        return None
    shapes = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
    places = (q.device, k.device, v.device, q.layout, k.layout, v.layout)
    return mask, shapes, places, begins_with(k, v), options, SPEED.version


def _is_dataless(mask: object) -> bool:
    if type(mask) is AllOf:
        return all(type(part) in _DATALESS for part in mask.parts)
    return type(mask) in _DATALESS


def memoise(facts: Facts | None, prepared: Prepared) -> Prepared:
    """Memoise a description, if it may be; returns it."""
    global _latest
    call = prepared.call
    if facts is not None and not isinstance(call.whole.q_start, Tensor):
        _latest = facts, prepared, _shows_all(call.asked, call.whole)
    return prepared


def described_before(
    facts: Facts | None, span: Span | None, backend: str, *, partial: bool
) -> Prepared | None:
    """The latest description if it is that of this call, or differs in the number of keys alone."""
    global _latest
    latest = _latest
    if facts is None or latest is None or latest[0] != facts:
        return None
    _, prepared, showed_all = latest
    call, name = prepared.call, prepared.name
    if span is None or (isinstance(span.q_start, int) and call.whole == span):
        return prepared  # without a span it follows from the mask and the shapes
    if isinstance(span.q_start, Tensor):
        return None
    if not (showed_all and _shows_all(call.asked, span) and span.num_queries == call.num_queries):
        return None
    if rounded(span.num_keys) == rounded(call.num_keys):
        prepared = Prepared(call.at(span), name)
    else:
        call = call.at(span)
        name = choose(call, backend, partial=partial)
        prepared = Prepared(call, name)
    _latest = facts, prepared, True
    return prepared


def _shows_all(mask: Mask, span: Span) -> bool:
    """Whether the call has keys, and none is hidden from its queries."""
    if span.kv_start == span.kv_stop or not span.num_queries:
        return False
    return mask.within(span) is EVERYTHING
