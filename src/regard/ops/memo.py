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
from regard.ops.mask_tensors import DATALESS, holds_data, mask_key
from regard.ops.prepared import Prepared
from regard.ops.rates import SPEED
from regard.tracing import is_immediate

Key = tuple[object, ...]
_MOST = 256  # descriptions: those of the kinds of layers, for some lengths
_NUMBERS = frozenset({type(None), bool, int, float, str})
_TENSORS = frozenset({Tensor, nn.Parameter})


class Arguments(NamedTuple):
    """The arguments of `prepare`. The key of a call and its description are made from these."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    span: Span | None
    scale: float | None
    score_bias: Tensor | ScoreBias | None
    softcap: float | None
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
    q, k, v, mask, _, *rest = given
    if not (is_immediate(q, k, v) and q.dim() == k.dim() == v.dim() == 4):
        return None
    rule, around = mask_key(mask), (torch.is_grad_enabled(), torch.get_float32_matmul_precision())
    slots = _slots(given)
    if rule is None or slots is None:
        return None
    key = [rule, slots, around, SPEED.version, begins_with(k, v), k.shape[2] == v.shape[2]]
    for x in (q, k, v):
        batch, heads, _, width = x.shape
        key += batch, heads, width, x.dtype, x.device, x.layout, x.requires_grad
    key.append(q.shape[2])
    for each in rest:
        part = each if type(each) in _NUMBERS else _outline(each)
        if part is None and each is not None:
            return None
        key.append(part)
    return tuple(key)


def _outline(value: object) -> object | None:
    """What a description reads of an argument; None if that is not known."""
    if type(value) in _TENSORS:
        assert isinstance(value, Tensor)
        return value.shape, value.dtype, value.device, value.requires_grad
    if type(value) is Alibi:
        return value
    if type(value) is RelativeBias:
        weights = list(value.parameters())
        if _TENSORS.issuperset(map(type, weights)):
            return RelativeBias, value.num_heads, *(each.requires_grad for each in weights)
    return None


def _slots(given: Arguments) -> object | None:
    """The span in a key. Where no key is hidden, only the number of keys counts, and rounded up, as
    choices are: so the next step of a growing cache is described as this one."""
    mask, span = given.mask, given.span
    if span is None:
        keys = given.k.shape[2]
        if mask is EVERYTHING and keys and given.q.shape[2] and given.score_bias is None:
            return rounded(keys)
        return None, keys
    if type(span.q_start) is not int or span.q_stop - span.q_start != given.q.shape[2]:
        return None
    few = mask is EVERYTHING or given.q.shape[2] == 1  # of more queries most rules hide something
    if few and given.score_bias is None and _shows_all(mask, span):
        return rounded(span.num_keys)
    return span.q_start, span.q_stop, span.kv_start, span.kv_stop


def _shows_all(mask: Mask, span: Span) -> bool:
    """Whether the call has keys, and a rule without data hides none of them from its queries."""
    if span.kv_start == span.kv_stop or not span.num_queries:
        return False
    if mask is EVERYTHING:
        return True
    parts = mask.parts if type(mask) is AllOf else (mask,)
    return DATALESS.issuperset(map(type, parts)) and mask.within(span) is EVERYTHING


def recall(key: Key | None, given: Arguments) -> Prepared | None:
    """The description of an equal call, as that of this one; None if there is none."""
    if key is None or (entry := _ENTRIES.get(key)) is None:
        return None
    prepared, parts, whole = entry
    call = prepared.call
    if type(key[1]) is int:  # no key is hidden, and there may be more or fewer
        span = given.span or Span(0, given.q.shape[2], 0, given.k.shape[2])
        if span != call.whole:
            prepared = prepared._replace(call=call.at(span))
            _ENTRIES[key] = entry._replace(prepared=prepared)
    if whole:
        return prepared
    mask = call.mask if parts is None else _remaining(given.mask, parts)
    tensors = {"sinks": given.sinks, "score_bias": given.score_bias}
    return prepared._replace(call=prepared.call.but(asked=given.mask, mask=mask, **tensors))


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
    whole = not holds_data(call.asked) and call.sinks is None and call.score_bias is None
    if whole:
        _ENTRIES[key] = Entry(prepared, parts, whole)
        return prepared
    mask = EVERYTHING if parts is not None else call.mask
    bare = call.but(asked=EVERYTHING, mask=mask, sinks=None, score_bias=None)
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
