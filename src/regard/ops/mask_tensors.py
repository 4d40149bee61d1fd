"""Masks in keys of memo tables, and the tensors that a kernel takes for a mask, memoised."""

from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.masks import (
    AllOf,
    AnyOf,
    Causal,
    Everything,
    Mask,
    Not,
    Nothing,
    SlidingWindow,
)
from regard.masks.row_data import DataMask
from regard.ops.call import Call
from regard.versions import Versions

DATALESS = frozenset({Everything, Nothing, Causal, SlidingWindow})
_SHORT = 1 << 16  # elements of a mask that are kept: to make more takes longer than to look for it


class MaskTensors(NamedTuple):
    """A mask as tensors that broadcast to `[B, H, L, S]`.

    Attributes:
        keep: True where a query may attend to a key.
        visible: the same, and True in fully masked rows, so that no softmax is over nothing.
        masked: queries that may attend to no key; None if it is known that there are none.
    """

    keep: Bool[Tensor, "*some L S"]
    visible: Bool[Tensor, "*some L S"]
    masked: Bool[Tensor, "*some L 1"] | None


# Memo table: the layers of a model get the same data, which lives as long as its rule.
_LATEST: WeakKeyDictionary[Versions, tuple[object, MaskTensors]] = WeakKeyDictionary()


def mask_tensors(call: Call) -> MaskTensors:
    """The mask of a call as tensors; memoised for short calls on a CPU under a rule with data."""
    data, key = _only_data(call.mask), _key_of(call)
    if data is None or key is None:
        keep = call.keep()
        masked = ~keep.any(-1, keepdim=True)
        return MaskTensors(keep, keep | masked, masked)
    known = _LATEST.get(data.versions)
    if known is None or known[0] != key:
        known = _LATEST[data.versions] = key, _made(call)
    return known[1]


def _key_of(call: Call) -> object | None:
    """All that the tensors of a mask depend on; None for calls whose tensors are not kept."""
    span = call.span
    if not call.immediate or call.device.type != "cpu" or isinstance(span.q_start, Tensor):
        return None
    if call.batch * call.num_queries * call.num_keys > _SHORT:
        return None
    rule = mask_key(call.mask)
    if rule is None:
        return None
    return rule, span.q_start, span.kv_start, call.num_queries, call.num_keys, call.batch


def _made(call: Call) -> MaskTensors:
    with torch.inference_mode(False):  # autograd refuses tensors made in inference mode
        keep = call.keep()
        masked = ~keep.any(-1, keepdim=True)
        some = bool(masked.any())
        return MaskTensors(keep, keep | masked if some else keep, masked if some else None)


def _only_data(mask: Mask) -> DataMask | None:
    """The rule with data in a mask, if there is one, and all others are rules of positions."""
    found: DataMask | None = None
    for part in mask.parts if isinstance(mask, AllOf) else (mask,):
        if type(part) in DATALESS:
            continue
        if found is not None or not isinstance(part, DataMask):
            return None
        found = part
    return found


def mask_key(mask: object) -> object | None:
    """A mask in a key: its value, or a weak reference to the versions of its tensors. None for
    rules of a user, and for rules whose tensors were written."""
    kind = type(mask)
    if kind in DATALESS:
        return mask
    if isinstance(mask, AllOf | AnyOf):
        found: list[object] = [kind]
        for part in mask.parts:
            if (key := mask_key(part)) is None:
                return None
            found.append(key)
        return tuple(found)
    if isinstance(mask, Not):
        inner = mask_key(mask.mask)
        return None if inner is None else (kind, inner)
    if not isinstance(mask, DataMask) or mask.versions.changed:
        return None
    if mask.place is not None:  # it shares its versions with the same rule at other slots
        return None
    return ref(mask.versions)


def holds_data(mask: Mask) -> bool:
    """Whether a mask holds tensors, or is a rule of a user, which may."""
    if type(mask) in DATALESS:
        return False
    if isinstance(mask, AllOf | AnyOf):
        return any(map(holds_data, mask.parts))
    return holds_data(mask.mask) if isinstance(mask, Not) else True
