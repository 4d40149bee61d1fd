"""Masks that show each query one interval of keys: causal, windows, chunks, padding, documents, and
prefixes together with them."""

from functools import reduce
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.masks import (
    AllOf,
    AnyOf,
    Causal,
    Chunked,
    Documents,
    Everything,
    Mask,
    Nothing,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
)
from regard.masks.row_data import readable

Interval = tuple[Tensor, Tensor]  # first slot and one past the last, `[B, L]` or `[1, L]` each
# Memo table: the layers of a model pass the same mask and span.
_FOUND: WeakKeyDictionary[Mask, tuple[tuple[int, int, int, int], Interval | None]] = (
    WeakKeyDictionary()
)


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
    if isinstance(span.q_start, Tensor) or isinstance(span.q_stop, Tensor):
        return _placed(mask, span)
    slots = (span.q_start, span.q_stop, span.kv_start, span.kv_stop)
    known = _FOUND.get(mask)
    if known is None or known[0] != slots:
        known = _FOUND[mask] = slots, _placed(mask, span)
    return known[1]


def _placed(mask: Mask, span: Span) -> Interval | None:
    queries = span.positions("cpu").reshape(-1, span.num_queries)
    found = _interval(mask, queries, span)
    if found is None:
        return None
    limits = (each - span.kv_start for each in found)
    starts, stops = (each.clamp(0, span.num_keys).to(torch.int32) for each in limits)
    return starts, stops


def _interval(mask: Mask, queries: Tensor, span: Span) -> Interval | None:
    """In slots. Without a limit it is the span's."""
    low, high = torch.full_like(queries, span.kv_start), torch.full_like(queries, span.kv_stop)
    match mask:
        case Everything():
            return low, high
        case Nothing():
            return low, low
        case Causal():
            return low, queries + 1
        case SlidingWindow(size=size):
            return queries - size + 1, high
        case Chunked(size=size, start=start) if _readable(start):
            first = _column(0 if start is None else start)
            begin = (queries - first).div(size, rounding_mode="floor") * size + first
            return begin, begin + size
        case Prefix(start=start, end=end) if _readable(start) and _readable(end):
            lowest = span.kv_start if start is None else start
            begin, stop = torch.broadcast_tensors(_column(lowest), _column(end))
            nothing = torch.zeros_like(queries)
            return begin + nothing, stop + nothing
        case Padding(valid=valid) if _readable(valid):
            return _padding(valid, queries, span)
        case Documents(ids=ids) if _readable(ids):
            return _documents(ids, queries)
        case AllOf(parts=parts):
            return _intersection(parts, queries, span)
        case AnyOf(parts=parts):
            return _union(parts, queries, span)
    return None


def _readable(data: object) -> bool:
    return not isinstance(data, Tensor) or (readable(data) and not data.is_cuda)


def _column(data: int | Tensor) -> Tensor:
    """A number for each row, or one for all, as `[B, 1]`."""
    return torch.as_tensor(data, device="cpu", dtype=torch.int64).reshape(-1, 1)


def _intersection(parts: tuple[Mask, ...], queries: Tensor, span: Span) -> Interval | None:
    low = torch.full_like(queries, span.kv_start)
    high = torch.full_like(queries, span.kv_stop)
    for part in parts:
        found = _interval(part, queries, span)
        if found is None:
            return None
        low, high = torch.maximum(low, found[0]), torch.minimum(high, found[1])
    return low, high


def _union(parts: tuple[Mask, ...], queries: Tensor, span: Span) -> Interval | None:
    """None where a part, for some query, neither overlaps nor touches those before it."""
    found = [_interval(part, queries, span) for part in parts]
    return reduce(_joined, [_inside(each, span) for each in found])


def _inside(found: Interval | None, span: Span) -> Interval | None:
    """The keys of the span alone; an empty interval begins after all slots and ends before them."""
    if found is None:
        return None
    low, high = found[0].clamp(min=span.kv_start), found[1].clamp(max=span.kv_stop)
    empty = high <= low
    return low.masked_fill(empty, _FAR), high.masked_fill(empty, -_FAR)


def _joined(one: Interval | None, other: Interval | None) -> Interval | None:
    if one is None or other is None:
        return None
    begin, end = torch.maximum(one[0], other[0]), torch.minimum(one[1], other[1])
    if bool(((begin > end) & (begin < _FAR)).any()):  # a gap between two that are not empty
        return None
    return torch.minimum(one[0], other[0]), torch.maximum(one[1], other[1])


def _padding(valid: Tensor, queries: Tensor, span: Span) -> Interval | None:
    """Slots after the data are visible."""
    missing = max(0, span.kv_stop - valid.shape[1])
    flags = torch.nn.functional.pad(valid, (0, missing), value=True)
    flags = flags[:, span.kv_start : span.kv_stop].int()
    counts, first = flags.sum(1), flags.argmax(1)
    last = flags.shape[1] - 1 - flags.flip(1).argmax(1)
    if bool(((last - first + 1 != counts) & (counts > 0)).any()):
        return None
    first = first + span.kv_start
    nothing = torch.zeros_like(queries)
    return first[:, None] + nothing, (first + counts)[:, None] + nothing


def _documents(ids: Tensor, queries: Tensor) -> Interval | None:
    """Slots after the data belong to the last document of their row."""
    if 0 in ids.shape:
        return None
    new = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
    if any(len(row.unique()) != int(count) for row, count in zip(ids, new.sum(1), strict=True)):
        return None  # a document in several pieces
    slots = torch.arange(ids.shape[1])
    begins = torch.where(new, slots, 0).cummax(1).values
    nexts = torch.where(new.roll(-1, 1), slots + 1, _FAR)
    nexts[:, -1] = _FAR
    ends = nexts.flip(1).cummin(1).values.flip(1)
    at = queries.clamp(0, ids.shape[1] - 1).expand(ids.shape[0], -1)
    return begins.gather(1, at), ends.gather(1, at)


_FAR = 1 << 40  # a slot after all others
