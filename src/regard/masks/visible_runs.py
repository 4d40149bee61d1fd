"""Which keys a block of queries may see, as runs of slots: found on the host, from the rule.

Two answers are given for a block: runs that hold every key some query of it may see, and runs in
which every query sees every key. Both are right for all rows of a batch at once; neither is exact
for every rule, but the first is never too small and the second never too large.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.masks import (
    AllOf,
    AnyOf,
    Causal,
    Chunked,
    Dense,
    Documents,
    Everything,
    Mask,
    Not,
    Nothing,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
    Where,
)
from regard.masks.row_data import readable

FAR = 1 << 62  # beyond every slot
Runs = list[tuple[int, int]]  # half-open, in order, apart from each other
Sight = Callable[[int, int], tuple[Runs, Runs]]  # of the queries at slots first..last

ALL: Runs = [(-FAR, FAR)]
NONE: Runs = []

AnyMask = TypeVar("AnyMask", bound=Mask)
_READ: WeakKeyDictionary[Mask, Sight] = WeakKeyDictionary()


def sight(mask: Mask) -> Sight:
    """What blocks of queries may see and what all of them see; reads the rule's data here, once.

    >>> from regard.masks import Causal, Prefix, SlidingWindow
    >>> look = sight((Causal() & SlidingWindow(4)) | Prefix(2))
    >>> [(max(0, start), stop) for start, stop in look(10, 12)[0]]
    [(0, 2), (7, 13)]
    """
    match mask:
        case Everything():
            return lambda first, last: (ALL, ALL)
        case Nothing():
            return lambda first, last: (NONE, NONE)
        case Causal():
            return lambda first, last: ([(-FAR, last + 1)], [(-FAR, first + 1)])
        case SlidingWindow(size=size):
            return lambda first, last: ([(first - size + 1, FAR)], [(last - size + 1, FAR)])
        case Chunked():
            return _chunks(mask)
        case Prefix():
            return _prefix(mask)
        case Documents() if _readable(mask.ids):
            return _once(mask, _documents)
        case Padding() if _readable(mask.valid):
            return _once(mask, _padding)
        case Not(mask=inner):
            return _hidden(sight(inner))
        case AllOf(parts=parts):
            return _together([sight(part) for part in parts], meet)
        case AnyOf(parts=parts):
            return _together([sight(part) for part in parts], join)
        case Dense() | Where():
            return lambda first, last: (ALL, NONE)
    return _reached(mask)


def join(some: Runs, others: Runs) -> Runs:
    """The slots of either."""
    joined: Runs = []
    for start, stop in sorted([*some, *others]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif start < stop:
            joined.append((start, stop))
    return joined


def meet(some: Runs, others: Runs) -> Runs:
    """The slots of both."""
    met, mine, its = [], 0, 0
    while mine < len(some) and its < len(others):
        start = max(some[mine][0], others[its][0])
        stop = min(some[mine][1], others[its][1])
        if start < stop:
            met.append((start, stop))
        if some[mine][1] < others[its][1]:
            mine += 1
        else:
            its += 1
    return met


def without(runs: Runs) -> Runs:
    """The slots of none."""
    edges = [-FAR, *(edge for run in runs for edge in run), FAR]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(start, stop) for start, stop in pairs if start < stop]


def bridged(runs: Runs, gap: int) -> Runs:
    """The runs, those that lie nearer than `gap` made one: keys are cheaper than more pieces."""
    near: Runs = []
    for start, stop in runs:
        if near and start - near[-1][1] < gap:
            near[-1] = (near[-1][0], stop)
        else:
            near.append((start, stop))
    return near


def true_runs(flags: list[bool]) -> Runs:
    """Where the flags are true.

    >>> true_runs([True, False, False, True, True])
    [(0, 1), (3, 5)]
    """
    padded = [False, *flags, False]
    edges = [slot for slot in range(len(flags) + 1) if padded[slot] != padded[slot + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def covers(runs: Runs, start: int, stop: int) -> bool:
    """Whether the slots start..stop all lie in the runs."""
    return any(low <= start and stop <= high for low, high in runs)


def _readable(data: Tensor) -> bool:
    """Whether the data can be read now: not while a device records what it will do later."""
    return readable(data) and not (data.is_cuda and torch.cuda.is_current_stream_capturing())


def _once(mask: AnyMask, read: Callable[[AnyMask], Sight]) -> Sight:
    """Data is read once for each mask, not once for each layer that it goes through."""
    look = _READ.get(mask)
    if look is None:
        look = _READ[mask] = read(mask)
    return look


def _hidden(look: Sight) -> Sight:
    def hidden(first: int, last: int) -> tuple[Runs, Runs]:
        seen, full = look(first, last)
        return without(full), without(seen)

    return hidden


def _together(looks: Sequence[Sight], how: Callable[[Runs, Runs], Runs]) -> Sight:
    def together(first: int, last: int) -> tuple[Runs, Runs]:
        seen, full = zip(*(look(first, last) for look in looks), strict=True)
        return reduce(how, seen), reduce(how, full)

    return together


def _reached(mask: Mask) -> Sight:
    """A rule of somebody's own."""

    def reached(first: int, last: int) -> tuple[Runs, Runs]:
        low, high = mask.reach(Span(first, last + 1, 0, FAR))
        run = (-FAR if low is None else low, FAR if high is None else high + 1)
        return ([run] if run[0] < run[1] else NONE), NONE

    return reached


def _chunks(mask: Chunked) -> Sight:
    size, starts = mask.size, mask.starts
    if not starts:  # not to be read
        return lambda first, last: (ALL, NONE)

    def chunks(first: int, last: int) -> tuple[Runs, Runs]:
        seen, full = NONE, ALL
        for start in starts:
            low, high = (first - start) // size, (last - start) // size
            here = [(low * size + start, (high + 1) * size + start)]
            seen = join(seen, here)
            full = meet(full, here) if low == high else NONE
        return seen, full

    return chunks


def _prefix(mask: Prefix) -> Sight:
    if mask.begins is None or mask.ends is None:
        return lambda first, last: (ALL, NONE)
    seen, full = (mask.begins[0], mask.ends[1]), (mask.begins[1], mask.ends[0])
    found = ([seen] if seen[0] < seen[1] else NONE), ([full] if full[0] < full[1] else NONE)
    return lambda first, last: found


def _padding(mask: Padding) -> Sight:
    if 0 in mask.valid.shape:
        return lambda first, last: (ALL, ALL)
    seen, full = (_endless(rows.tolist()) for rows in (mask.valid.any(0), mask.valid.all(0)))
    return lambda first, last: (seen, full)


def _endless(valid: list[bool]) -> Runs:
    """Runs of real tokens; beyond the data all are real."""
    runs = true_runs([*valid, True])
    runs[-1] = (runs[-1][0], FAR)
    return runs


def _documents(mask: Documents) -> Sight:
    if 0 in mask.ids.shape:
        return lambda first, last: (ALL, NONE)
    rows = [_row_documents(row) for row in mask.ids]

    def documents(first: int, last: int) -> tuple[Runs, Runs]:
        seen, full = NONE, ALL
        for starts, ids, places in rows:
            here = range(bisect_right(starts, first) - 1, bisect_right(starts, last))
            mine = {ids[max(0, segment)] for segment in here}
            runs = reduce(join, [places[document] for document in mine])
            seen = join(seen, runs)
            full = meet(full, runs) if len(mine) == 1 else NONE
        return seen, full

    return documents


def _row_documents(row: Tensor) -> tuple[list[int], list[int], dict[int, Runs]]:
    """Where a row's segments start, which document each is of, and where each document lies."""
    change = (row[1:] != row[:-1]).nonzero().squeeze(1) + 1
    starts = [0, *change.tolist()]
    ids = row[torch.tensor(starts, device=row.device)].tolist()
    edges = [-FAR, *starts[1:], FAR]  # the first and the last go on
    places: dict[int, Runs] = {}
    for document, start, stop in zip(ids, edges[:-1], edges[1:], strict=True):
        places.setdefault(document, []).append((start, stop))
    return starts, ids, places
