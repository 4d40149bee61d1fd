"""The one interval of keys that each query may attend to, where a mask shows one to each."""

from functools import reduce
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.masks.algebra import AllOf, AnyOf
from regard.masks.mask import Mask
from regard.masks.row_data import row_masks
from regard.masks.runs import intersection
from regard.span import Span

Interval = tuple[Tensor, Tensor]  # first slot and one past the last, `[B, L]` or `[1, L]` each
FAR = 1 << 40  # a slot after all others
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
    """In slots of the span; an empty interval begins after all slots and ends before them."""
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
    return low.masked_fill(empty, FAR), high.masked_fill(empty, -FAR)


def _common(one: Interval | None, other: Interval | None) -> Interval | None:
    if one is None or other is None:
        return None
    return torch.maximum(one[0], other[0]), torch.minimum(one[1], other[1])


def _joined(one: Interval | None, other: Interval | None) -> Interval | None:
    """None where there is a gap between two intervals of a query that are not empty."""
    if one is None or other is None:
        return None
    begin, end = torch.maximum(one[0], other[0]), torch.minimum(one[1], other[1])
    if bool(((begin > end) & (begin < FAR)).any()):
        return None
    return torch.minimum(one[0], other[0]), torch.maximum(one[1], other[1])


def _by_distance(mask: Mask, queries: Tensor) -> Interval | None:
    """Of a rule that depends on distance alone: as far from each query as from that at slot 0."""
    runs = mask.runs(0, 0).some
    if len(runs) > 1:
        return None
    low, high = (max(-FAR, min(each, FAR)) for each in (runs or [(0, 0)])[0])
    return queries + low, queries + high


def _by_rows(mask: Mask, queries: Tensor, span: Span) -> Interval | None:
    """Of a rule with few data, row by row."""
    if not mask.lasting or mask.row(0) is None:
        return None
    rows, firsts = row_masks(mask, mask.batch or 1), queries[:, 0].tolist()
    found = []
    for index in range(max(len(rows), len(firsts))):
        limits = _limits(rows[index % len(rows)], firsts[index % len(firsts)], span)
        if limits is None:
            return None
        counts, keys = torch.tensor(limits, device="cpu").split((1, 2), 1)
        found.append(keys.repeat_interleave(counts.squeeze(1), 0).T)
    low, high = torch.stack(found, 1)
    return low, high


def _limits(mask: Mask, first: int, span: Span) -> list[tuple[int, int, int]] | None:
    """Numbers of queries to all of which the same interval is visible, and its limits."""
    find, keys, stop = mask.finder(), [(span.kv_start, span.kv_stop)], first + span.num_queries
    left = [*pairwise([first, *find(first, stop - 1).edges_between(first, stop), stop])][::-1]
    limits: list[tuple[int, int, int]] = []
    while left:
        begin, end = left.pop()
        some, every, _ = find(begin, end - 1)
        if len(some) != 1 or some != every:
            some, every = intersection(some, keys), intersection(every, keys)
        if len(some) <= 1 and some == every:
            low, high = some[0] if some else (0, 0)
            limits.append((end - begin, max(low, -FAR), min(high, FAR)))
        elif end - begin == 1:
            return None
        else:
            middle = (begin + end) // 2
            left += [(middle, end), (begin, middle)]
    return limits
