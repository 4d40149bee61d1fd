"""A mask as the tensors that a kernel takes, memoised: booleans, or an interval of keys for each
query. Masks in keys of memo tables."""

from collections.abc import Callable, Hashable
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from regard.masks import (
    AllOf,
    AnyOf,
    Causal,
    Documents,
    Everything,
    Mask,
    Not,
    Nothing,
    SlidingWindow,
    Span,
)
from regard.masks.row_data import DataMask, row_masks
from regard.masks.runs import FAR, NEAR, intersection
from regard.ops.call import Call, is_everything

DATALESS = frozenset({Everything, Nothing, Causal, SlidingWindow})
_SHORT = 1 << 16  # elements of a mask that are kept: to make more takes longer than to look for it
_MOST = 16  # memoised results: those of the kinds of layers, for a few batches

Made = TypeVar("Made")
Interval = tuple[Tensor, Tensor]  # first slot and one past the last, `[B, L]` or `[1, L]` each


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


# Memo table: layers with equal masks and spans share the results, each in a tuple.
_MADE: dict[Hashable, tuple[Any]] = {}


def make_once(mask: Mask, span: Span, make: Callable[[], Made], *others: Hashable) -> Made:
    """`make()`, memoised by the mask, the span and the other values; not memoised where rows start
    at different slots, nor for rules of a user, whose tensors may be written."""
    q_start, q_stop = span.q_start, span.q_stop
    rule = None if isinstance(q_start, Tensor) else mask_key(mask)
    if rule is None:
        return make()
    key = (rule, q_start, q_stop, span.kv_start, span.kv_stop, *others)
    known: tuple[Made] | None = _MADE.get(key)
    if known is None:
        if len(_MADE) >= _MOST:
            _MADE.clear()
        with torch.inference_mode(False):  # autograd refuses tensors made in inference mode
            known = _MADE[key] = (make(),)
    return known[0]


def mask_key(mask: object) -> object | None:
    """A mask in a key: its value, or a weak reference to the versions of its tensors. None for
    rules of a user, and for rules whose tensors were written."""
    if type(mask) in DATALESS:
        return mask
    if parts := _parts_of(mask):
        found: list[object] = [type(mask)]
        for part in parts:
            if (key := mask_key(part)) is None:
                return None
            found.append(key)
        return tuple(found)
    if not isinstance(mask, DataMask) or mask.versions.changed:
        return None
    if mask.place is not None:  # it shares its versions with the same rule at other slots
        return None
    return ref(mask.versions)


def holds_data(mask: Mask) -> bool:
    """Whether a mask holds tensors, or is a rule of a user, which may."""
    if type(mask) in DATALESS:
        return False
    parts = _parts_of(mask)
    return any(map(holds_data, parts)) if parts else True


def _parts_of(mask: object) -> tuple[Mask, ...]:
    """The masks that a mask combines."""
    if isinstance(mask, AllOf | AnyOf):
        return mask.parts
    return (mask.mask,) if isinstance(mask, Not) else ()


def is_short(call: Call, heads: int = 1) -> bool:
    """Whether the mask of a call, written for so many heads, is worth a place in the memo table:
    it has few elements, and an immediate call on a CPU reads them."""
    elements = call.batch * heads * call.num_queries * call.num_keys
    return elements <= _SHORT and call.immediate and call.device.type == "cpu"


def mask_tensors(call: Call) -> MaskTensors:
    """The mask of a call as tensors; memoised for short calls."""
    if is_short(call):
        return make_once(call.mask, call.span, lambda: _tensors_of(call, read=True), call.batch)
    return _tensors_of(call, read=False)


def addend_once(call: Call, make: Callable[[Call], Made]) -> Made:
    """`make(call)`, the addend of a mask for the query heads of each key head; memoised for short
    calls without a bias."""
    masked = call.score_bias is None and not is_everything(call.mask)
    if not (masked and is_short(call, call.num_heads)):
        return make(call)
    heads = (call.num_heads, call.num_kv_heads)
    return make_once(call.mask, call.span, lambda: make(call), make, call.batch, *heads, call.dtype)


def _tensors_of(call: Call, *, read: bool) -> MaskTensors:
    keep = call.keep()
    masked = ~keep.any(-1, keepdim=True)
    if read and not bool(masked.any()):
        return MaskTensors(keep, keep, None)
    return MaskTensors(keep, keep | masked, masked)


def intervals_of(mask: Mask, span: Span) -> Interval | None:
    """The keys of `span` that each query may attend to, as indices from the span's first key on.

    None where the keys of some query are not one interval, or where that is not known. An interval
    whose stop is not above its start is empty. Reads the rule's tensors.

    Examples:
        >>> from regard.masks import Causal, SlidingWindow, Span
        >>> starts, stops = intervals_of(Causal() & SlidingWindow(2), Span(3, 6, 1, 6))
        >>> list(zip(starts[0].tolist(), stops[0].tolist(), strict=True))
        [(1, 3), (2, 4), (3, 5)]
    """

    def make() -> Interval | None:
        queries = span.positions("cpu").reshape(-1, span.num_queries)
        found = _interval(mask, queries, span)
        if found is None:
            return None
        limits = (each - span.kv_start for each in found)
        starts, stops = (each.clamp(0, span.num_keys).to(torch.int32) for each in limits)
        return starts, stops

    return make_once(mask, span, make)


def _interval(mask: Mask, queries: Tensor, span: Span) -> Interval | None:
    """Visible keys as an interval of slots; an empty one begins after all slots."""
    if mask.opaque:
        return None
    if isinstance(mask, AllOf | AnyOf):
        join = _common if isinstance(mask, AllOf) else _joined
        found = reduce(join, [_interval(part, queries, span) for part in mask.parts])
    else:
        found = _by_distance(mask, queries) if mask.relative else _by_rows(mask, queries, span)
    if found is None:
        return None
    low, high = found[0].clamp(min=span.kv_start), found[1].clamp(max=span.kv_stop)
    empty = high <= low
    return low.masked_fill(empty, FAR), high.masked_fill(empty, NEAR)


def _common(one: Interval | None, other: Interval | None) -> Interval | None:
    if one is None or other is None:
        return None
    return torch.maximum(one[0], other[0]), torch.minimum(one[1], other[1])


def _joined(one: Interval | None, other: Interval | None) -> Interval | None:
    """The union of two intervals of each query; None if there is a gap between them."""
    if one is None or other is None:
        return None
    begin, end = torch.maximum(one[0], other[0]), torch.minimum(one[1], other[1])
    if bool(((begin > end) & (begin < FAR)).any()):
        return None
    return torch.minimum(one[0], other[0]), torch.maximum(one[1], other[1])


def _by_distance(mask: Mask, queries: Tensor) -> Interval | None:
    """Intervals of a rule of distance: that of the query at slot 0, shifted to each query."""
    runs = mask.runs(0, 0).some
    if len(runs) > 1:
        return None
    low, high = (runs or [(0, 0)])[0]
    return queries + low, queries + high


def _by_rows(mask: Mask, queries: Tensor, span: Span) -> Interval | None:
    """The intervals of a rule with few data, computed row by row."""
    if not mask.lasting or mask.row(0) is None:
        return None
    if isinstance(mask, Documents) and (found := _of_documents(mask.ids, queries)) is not None:
        return found
    rows, firsts = row_masks(mask, mask.batch or 1), queries[:, 0].tolist()
    intervals = []
    for index in range(max(len(rows), len(firsts))):
        limits = _limits(rows[index % len(rows)], firsts[index % len(firsts)], span)
        if limits is None:
            return None
        counts, *keys = (torch.tensor(each, device="cpu") for each in zip(*limits, strict=True))
        intervals.append(torch.stack(keys).repeat_interleave(counts, 1))
    low, high = torch.stack(intervals, 1)
    return low, high


def _of_documents(ids: Tensor, queries: Tensor) -> Interval | None:
    """Intervals of thousands of documents; None if a document lies in several pieces."""
    begins = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0))
    if not begins.sum(1).equal((ids.sort(1).values.diff(dim=1) != 0).sum(1)):
        return None
    slots = torch.arange(ids.shape[1], device="cpu")
    low = slots.where(begins, NEAR).cummax(1).values
    high = F.pad(slots.where(begins, FAR)[:, 1:], (0, 1), value=FAR)
    high = high.flip(1).cummin(1).values.flip(1)
    rows = max(len(ids), len(queries))
    index = queries.clamp(max=len(slots) - 1).expand(rows, -1)
    return low.expand(rows, -1).gather(1, index), high.expand(rows, -1).gather(1, index)


def _limits(mask: Mask, first: int, span: Span) -> list[tuple[int, int, int]] | None:
    """Numbers of queries to all of which the same interval is visible, and its limits."""
    find, keys, stop = mask.finder(), [(span.kv_start, span.kv_stop)], first + span.num_queries
    left = [*pairwise([first, *find(first, stop - 1).edges_between(first, stop), stop])][::-1]
    limits = []
    while left:
        begin, end = left.pop()
        some, every = (intersection(each, keys) for each in find(begin, end - 1)[:2])
        if len(some) <= 1 and some == every:
            limits.append((end - begin, *(some or [(0, 0)])[0]))
        elif end - begin == 1:
            return None
        else:
            middle = (begin + end) // 2
            left += [(middle, end), (begin, middle)]
    return limits
