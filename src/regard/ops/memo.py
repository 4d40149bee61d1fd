"""The memo of descriptions and of the backends chosen for them, by all that they depend on.

Describing a call takes as long as several operators, and the layers of a model repeat one another.
The key of a call is made from every argument, and from the few facts around it that torch keeps. A
description in the table holds no tensor: those of the present call are put into a copy.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.masks import EVERYTHING, AllOf, Mask, Span
from regard.ops.bias import Alibi, RelativeBias, ScoreBias
from regard.ops.call import begins_with
from regard.ops.choose import rounded
from regard.ops.mask_tensors import holds_data, mask_key
from regard.ops.prepared import Prepared
from regard.rates import SPEED
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
    q, k, v, span, mask, *rest = given
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
    slots = _slots(span, mask, given.score_bias, q.shape[2], keys)
    if slots is None:
        return None
    around = torch.is_grad_enabled(), torch.get_float32_matmul_precision(), SPEED.version
    shapes = q.shape, batch, kv_heads, width, v.shape[:2], v.shape[3], keys == v.shape[2]
    of_q = q.dtype, q.device, q.layout, q.requires_grad
    of_k = k.dtype, k.device, k.layout, k.requires_grad
    of_v = v.dtype, v.device, v.layout, v.requires_grad
    return rule, slots, options, around, shapes, of_q, of_k, of_v, begins_with(k, v)


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


def _slots(
    span: Span | None, mask: Mask, bias: Tensor | ScoreBias | None, queries: int, keys: int
) -> object | None:
    """The span in a key. Where no key is hidden, only the number of keys counts, and rounded up, as
    choices are: so the next step of a growing cache is described as this one."""
    if span is None:
        if mask is EVERYTHING and keys and queries and bias is None:
            return rounded(keys)
        return None, keys
    q_start, q_stop, kv_start, kv_stop = span.q_start, span.q_stop, span.kv_start, span.kv_stop
    if type(q_start) is not int or q_stop - q_start != queries:
        return None
    few = mask is EVERYTHING or queries == 1  # of more queries most rules hide something
    plain = few and bias is None and queries and kv_start != kv_stop and not holds_data(mask)
    if plain and mask.within(span) is EVERYTHING:
        return rounded(kv_stop - kv_start)
    return q_start, q_stop, kv_start, kv_stop


def recall(key: Key | None, given: Arguments) -> Prepared | None:
    """The description of an equal call, as that of this one; None if there is none."""
    if key is None or (entry := _ENTRIES.get(key)) is None:
        return None
    prepared, parts, whole = entry
    call = prepared.call
    if type(key[1]) is int:  # no key is hidden, and there may be more or fewer
        span = given.span or Span(0, given.q.shape[2], 0, given.k.shape[2])
        if span != call.given_span:
            call = call.at(span)
    if not whole:
        mask = call.mask if parts is None else _remaining(given.mask, parts)
        tensors = {"sinks": given.sinks, "score_bias": given.score_bias}
        call = call.but(given_mask=given.mask, mask=mask, **tensors)
    if call is prepared.call:
        return prepared
    return Prepared(call, prepared.name, prepared.requested, prepared.choices)


def memoise(key: Key | None, given: Arguments, prepared: Prepared) -> Prepared:
    """Store a description, if it may be; returns it."""
    if key is None:
        return prepared
    call, parts = prepared.call, None
    if holds_data(call.mask):
        parts = _parts_in(given.mask, call.mask)
        if parts is None:  # a mask made for this call, such as one that was placed
            return prepared
    if len(_ENTRIES) >= _MOST:
        _ENTRIES.clear()
    whole = not holds_data(call.given_mask) and call.sinks is None and call.score_bias is None
    if whole:
        _ENTRIES[key] = Entry(prepared, parts, whole)
        return prepared
    mask = EVERYTHING if parts is not None else call.mask
    bare = call.but(given_mask=EVERYTHING, mask=mask, sinks=None, score_bias=None)
    _ENTRIES[key] = Entry(prepared._replace(call=bare), parts, whole)
    return prepared


def _pieces(mask: Mask) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, AllOf) else (mask,)


def _parts_in(given: Mask, mask: Mask) -> tuple[int, ...] | None:
    """Which parts of a mask make up the simplified one; None if some are others."""
    places = {id(part): index for index, part in enumerate(_pieces(given))}
    found = [places.get(id(part)) for part in _pieces(mask)]
    return None if None in found else tuple(index for index in found if index is not None)


def _remaining(mask: Mask, parts: tuple[int, ...]) -> Mask:
    pieces = _pieces(mask)
    if len(parts) == len(pieces):
        return mask
    return pieces[parts[0]] if len(parts) == 1 else AllOf(tuple(pieces[at] for at in parts))
