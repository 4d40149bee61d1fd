"""Descriptions of calls and the backends chosen for them, memoised by all that they depend on.

Describing a call takes as long as several operators, and the layers of a model repeat one another.
The key of a call is made from every argument, and from the few facts around it that torch keeps. A
description in the table holds no tensor: those of the present call are put into a copy.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.masks import EVERYTHING, AllOf, Mask, Span
from regard.ops.bias import Alibi, RelativeBias, ScoreBias
from regard.ops.call import Call, begins_with, narrowed
from regard.ops.check import (
    check_bias,
    check_mask,
    check_mask_sizes,
    check_options,
    check_sinks,
    check_tensors,
    default_span,
)
from regard.ops.choose import choose, rounded
from regard.ops.mask_tensors import holds_data, mask_key
from regard.ops.prepared import Prepared
from regard.rates import current_version
from regard.tracing import is_immediate

Key = tuple[object, ...]
_MOST = 256  # descriptions: those of the kinds of layers, for some lengths
_NUMBERS = frozenset({type(None), bool, int, float, str})
_UNKNOWN = object()
_TENSORS = frozenset({Tensor, nn.Parameter})


class Arguments(NamedTuple):
    """The arguments of `prepare`. The key of a call and its description are made from these."""

    q: Tensor
    k: Tensor
    v: Tensor
    span: Span | None
    mask: Mask
    scale: float | None = None
    score_bias: Tensor | ScoreBias | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    backend: str = "auto"
    precision: str = "strict"
    partial: bool = False


class Entry(NamedTuple):
    """A description in the table.

    Attributes:
        prepared: the description, without the tensors of its call.
        parts: which parts of the mask that was given remain, where these hold tensors; else None.
        whole: whether nothing has to be put into a copy.
    """

    prepared: Prepared
    parts: tuple[int, ...] | None
    whole: bool


_ENTRIES: dict[Key, Entry] = {}


def key_of(given: Arguments) -> Key | None:
    """All that the description of a call depends on; None for calls that are not memoised: traced
    ones, and those with rows at different slots or with rules of a user."""
    q, k, v, _, mask, *rest = given
    if not is_immediate(q, k, v):
        return None
    rule, options = mask_key(mask), tuple[object, ...](rest)
    if rule is None or not q.dim() == k.dim() == v.dim() == 4:
        return None
    if not _NUMBERS.issuperset(map(type, options)):
        options = tuple([x if type(x) in _NUMBERS else _outline(x) for x in options])
        if _UNKNOWN in options:
            return None
    batch, kv_heads, keys, width = k.shape
    slots = _slots(given, rule, keys)
    if slots is None:
        return None
    around = torch.is_grad_enabled(), torch.get_float32_matmul_precision(), current_version()
    shapes = q.shape, batch, kv_heads, width, v.shape[:2], v.shape[3], keys == v.shape[2]
    of_q = q.dtype, q.device, q.layout, q.requires_grad
    of_k = k.dtype, k.device, k.layout, k.requires_grad
    of_v = v.dtype, v.device, v.layout, v.requires_grad
    joined = v.shape[3] < width and begins_with(k, v)
    return rule, slots, options, around, shapes, of_q, of_k, of_v, joined


def _outline(value: object) -> object:
    """The facts that a description reads of an argument; `_UNKNOWN` of arguments of other types."""
    if type(value) in _TENSORS:
        assert isinstance(value, Tensor)
        return value.shape, value.dtype, value.device, value.requires_grad
    if type(value) is Alibi:
        return value
    if type(value) is RelativeBias:
        weights = list(value.parameters())
        if _TENSORS.issuperset(map(type, weights)):
            return RelativeBias, value.num_heads, *(each.requires_grad for each in weights)
    return _UNKNOWN


def _slots(given: Arguments, rule: object, keys: int) -> object | None:
    """The span in a key. Where no key is hidden, only the number of keys counts, and rounded up, as
    choices are: so the next step of a growing cache is described as this one."""
    span, mask, bias, queries = given.span, given.mask, given.score_bias, given.q.shape[2]
    if span is None:
        if mask is EVERYTHING and keys and queries and bias is None:
            return rounded(keys)
        return None, keys
    if not isinstance(span, Span):
        return None
    q_start, q_stop, kv_start, kv_stop = span.q_start, span.q_stop, span.kv_start, span.kv_stop
    if not type(q_start) is type(kv_start) is type(kv_stop) is int or q_stop - q_start != queries:
        return None
    if bias is None and queries and kv_start != kv_stop:
        if queries == 1 and (rule is mask or not holds_data(mask)):  # of more, most rules hide some
            mask = mask.within(span)
        if mask is EVERYTHING:
            return rounded(kv_stop - kv_start)
    return q_start, q_stop, kv_start, kv_stop


def prepare_call(given: Arguments) -> Prepared:
    """The description of a call: that of an equal call in the table, or a new one."""
    key = key_of(given)
    entry = None if key is None else _ENTRIES.get(key)
    if key is None or entry is None:
        prepared = _describe(given)
        _memoise(key, given, prepared)
        return prepared
    prepared, parts, whole = entry
    call, own = prepared.call, dict[str, object]()
    if type(key[1]) is int:  # no key is hidden, and there may be more or fewer
        span = given.span or Span(0, given.q.shape[2], 0, given.k.shape[2])
        if span != call.given_span:
            own = {"given_span": span, "span": span}
    if not whole:
        mask = call.mask if parts is None else _remaining(given.mask, parts)
        own |= {"given_mask": given.mask, "mask": mask}
        own |= {"sinks": given.sinks, "score_bias": given.score_bias}
    return Prepared(call.but(**own), *prepared[1:]) if own else prepared


def _memoise(key: Key | None, given: Arguments, prepared: Prepared) -> None:
    """Store a description that has a key, unless its mask was made for this call."""
    call, parts = prepared.call, None
    if key is None:
        return
    if holds_data(call.mask):
        parts = _parts_in(given.mask, call.mask)
        if parts is None:  # such as a mask that was placed
            return
    if len(_ENTRIES) >= _MOST:
        _ENTRIES.clear()
    whole = not holds_data(call.given_mask) and call.sinks is None and call.score_bias is None
    if not whole:
        mask = EVERYTHING if parts is not None else call.mask
        bare = call.but(given_mask=EVERYTHING, mask=mask, sinks=None, score_bias=None)
        prepared = prepared._replace(call=bare)
    _ENTRIES[key] = Entry(prepared, parts, whole)


def _pieces(mask: Mask) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, AllOf) else (mask,)


def _parts_in(given: Mask, mask: Mask) -> tuple[int, ...] | None:
    """The indices of a mask's parts that its simplification keeps; None if it has others."""
    places = {id(part): index for index, part in enumerate(_pieces(given))}
    pieces = [id(part) for part in _pieces(mask)]
    return tuple(places[part] for part in pieces) if places.keys() >= {*pieces} else None


def _remaining(mask: Mask, parts: tuple[int, ...]) -> Mask:
    pieces = _pieces(mask)
    if len(parts) == len(pieces):
        return mask
    return pieces[parts[0]] if len(parts) == 1 else AllOf(tuple(pieces[at] for at in parts))


def _describe(given: Arguments) -> Prepared:
    """The description of a call that no other equals, and the backend chosen for it."""
    q, k, v, span, mask, scale, score_bias, softcap, sinks, *_ = given
    check_options(dropout=given.dropout, softcap=softcap, precision=given.precision, scale=scale)
    check_tensors(q, k, v)
    check_mask(mask)
    check_sinks(sinks, q)
    whole = _span_of(q, k, mask, score_bias, span)
    check_bias(score_bias, (*q.shape[:3], whole.num_keys), q.device)
    check_mask_sizes(mask, q.shape[0], q.shape[1])
    placed = mask.within(whole)
    visible = narrowed(whole, placed)
    tensors = _tensors_of(q, k, v, sinks, score_bias)
    call = Call(
        batch=q.shape[0],
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[3],
        v_head_dim=v.shape[3],
        dtype=q.dtype,
        device=q.device,
        given_mask=mask,
        mask=placed.within(visible),
        given_span=whole,
        span=visible,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        score_bias=score_bias,
        softcap=softcap,
        sinks=sinks,
        dropout=given.dropout,
        precision=given.precision,
        needs_grad=torch.is_grad_enabled() and any(each.requires_grad for each in tensors),
        immediate=is_immediate(*tensors),
        joined=begins_with(k, v),
        partial=given.partial,
    )
    return Prepared(call, choose(call, given.backend), given.backend, {})


def _span_of(
    q: Tensor, k: Tensor, mask: Mask, score_bias: Tensor | ScoreBias | None, span: Span | None
) -> Span:
    """The span as it was given, or the one that the shapes imply; it must hold the queries."""
    whole = default_span(mask, score_bias, q.shape[2], k.shape[2]) if span is None else span
    if not isinstance(whole, Span) or isinstance(whole.num_queries + whole.num_keys, float):
        raise TypeError(f"span holds whole numbers, got {whole!r}; give Span(past, past + L, 0, S)")
    if isinstance(whole.q_start, Tensor) and len(whole.q_start) not in (1, q.shape[0]):
        raise ValueError(f"q has {q.shape[0]} rows, and span the slots of {len(whole.q_start)}")
    if whole.num_queries != q.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} queries where span={whole} holds {whole.num_queries}; "
            f"give Span(past, past + {q.shape[2]}, 0, S)"
        )
    return whole


def _tensors_of(*arguments: Tensor | ScoreBias | None) -> list[Tensor]:
    """The tensors among the arguments, and the parameters of rules."""
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    for rule in arguments:
        if isinstance(rule, nn.Module):
            tensors += rule.parameters()
    return tensors
