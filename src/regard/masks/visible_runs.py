"""The keys that a block of queries may attend to, as ranges of slots, computed on the CPU.

Two lists of ranges are computed for a block. The first contains every key that is visible to some
query of the block. In the second, every key is visible to every query. Both hold for all batch rows
together. For some rules the first is larger, or the second smaller, than necessary.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

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

STRIP = 64  # queries of a dense mask whose keys are found together
_JOINED = 1.1  # times the cells of two strips that they may have together to be one block
FAR = 1 << 62  # a slot after all others
Runs = list[tuple[int, int]]  # half-open ranges of slots, sorted, with gaps between them
Finder = Callable[[int, int], tuple[Runs, Runs]]
"""From the first and last slot of a block of queries to the keys visible to some and to all."""

ALL: Runs = [(-FAR, FAR)]
NONE: Runs = []

AnyMask = TypeVar("AnyMask", bound=Mask)
# Memo table: the data of a mask is read once for all the layers that the mask is passed to.
_FINDERS: WeakKeyDictionary[Mask, Finder] = WeakKeyDictionary()
# Strips of dense masks, by the object that a mask shares with its copies at the slots of calls.
_STRIPS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def visible_runs_of(mask: Mask) -> Finder:
    """A function that finds the visible keys of blocks of queries. Reads the rule's tensors, once.

    Examples:
        >>> from regard.masks import Causal, Prefix, SlidingWindow
        >>> find = visible_runs_of((Causal() & SlidingWindow(4)) | Prefix(2))
        >>> [(max(0, start), stop) for start, stop in find(10, 12)[0]]
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
            return _memoised(mask, _documents)
        case Padding() if _readable(mask.valid):
            return _memoised(mask, _padding)
        case Not(mask=inner):
            return _inverted(visible_runs_of(inner))
        case AllOf(parts=parts):
            return _combined([visible_runs_of(part) for part in parts], intersection)
        case AnyOf(parts=parts):
            return _combined([visible_runs_of(part) for part in parts], union)
        case Dense(keep=keep, place=Span(q_start=int())) if _on_cpu(keep):
            return _dense(mask)
        case Dense() | Where():
            return lambda first, last: (ALL, NONE)
    return _user_defined(mask)


def union(some: Runs, others: Runs) -> Runs:
    """The slots in either list."""
    joined: Runs = []
    for start, stop in sorted([*some, *others]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif start < stop:
            joined.append((start, stop))
    return joined


def intersection(some: Runs, others: Runs) -> Runs:
    """The slots in both lists."""
    common, mine, its = [], 0, 0
    while mine < len(some) and its < len(others):
        start = max(some[mine][0], others[its][0])
        stop = min(some[mine][1], others[its][1])
        if start < stop:
            common.append((start, stop))
        if some[mine][1] < others[its][1]:
            mine += 1
        else:
            its += 1
    return common


def complement(runs: Runs) -> Runs:
    """The slots in none of the runs."""
    edges = [-FAR, *(edge for run in runs for edge in run), FAR]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(start, stop) for start, stop in pairs if start < stop]


def without_gaps(runs: Runs, gap: int) -> Runs:
    """The runs, joined where fewer than `gap` slots lie between them."""
    near: Runs = []
    for start, stop in runs:
        if near and start - near[-1][1] < gap:
            near[-1] = (near[-1][0], stop)
        else:
            near.append((start, stop))
    return near


def true_runs(flags: list[bool]) -> Runs:
    """The runs of indices at which the flags are true.

    Examples:
        >>> true_runs([True, False, False, True, True])
        [(0, 1), (3, 5)]
    """
    padded = [False, *flags, False]
    edges = [slot for slot in range(len(flags) + 1) if padded[slot] != padded[slot + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def contains(runs: Runs, start: int, stop: int) -> bool:
    """Whether the slots `start..stop` all lie in one run."""
    return any(low <= start and stop <= high for low, high in runs)


def _readable(data: Tensor) -> bool:
    """Whether the data can be read now: no CUDA graph is being captured."""
    return readable(data) and not (data.is_cuda and torch.cuda.is_current_stream_capturing())


def _on_cpu(data: Tensor) -> bool:
    return readable(data) and data.device.type == "cpu"


def _memoised(mask: AnyMask, read: Callable[[AnyMask], Finder]) -> Finder:
    found = _FINDERS.get(mask)
    if found is None:
        found = _FINDERS[mask] = read(mask)
    return found


def _inverted(find: Finder) -> Finder:
    def inverted(first: int, last: int) -> tuple[Runs, Runs]:
        some, every = find(first, last)
        return complement(every), complement(some)

    return inverted


def _combined(finders: Sequence[Finder], combine: Callable[[Runs, Runs], Runs]) -> Finder:
    def combined(first: int, last: int) -> tuple[Runs, Runs]:
        some, every = zip(*(find(first, last) for find in finders), strict=True)
        return reduce(combine, some), reduce(combine, every)

    return combined


def _user_defined(mask: Mask) -> Finder:
    """For a subclass of `Mask` outside of regard: from its `reach`."""

    def reached(first: int, last: int) -> tuple[Runs, Runs]:
        low, high = mask.reach(Span(first, last + 1, 0, FAR))
        return _run(-FAR if low is None else low, FAR if high is None else high + 1), NONE

    return reached


def _run(start: int, stop: int) -> Runs:
    return [(start, stop)] if start < stop else NONE


def _chunks(mask: Chunked) -> Finder:
    size, starts = mask.size, mask.starts
    if not starts:  # not readable
        return lambda first, last: (ALL, NONE)

    def chunks(first: int, last: int) -> tuple[Runs, Runs]:
        some, every = NONE, ALL
        for start in starts:
            low, high = (first - start) // size, (last - start) // size
            runs = [(low * size + start, (high + 1) * size + start)]
            some = union(some, runs)
            every = intersection(every, runs) if low == high else NONE
        return some, every

    return chunks


def _prefix(mask: Prefix) -> Finder:
    if mask.begins is None or mask.ends is None:  # not readable
        return lambda first, last: (ALL, NONE)
    found = _run(mask.begins[0], mask.ends[1]), _run(mask.begins[1], mask.ends[0])
    return lambda first, last: found


def _padding(mask: Padding) -> Finder:
    if 0 in mask.valid.shape:
        return lambda first, last: (ALL, ALL)
    found = _endless(mask.valid.any(0).tolist()), _endless(mask.valid.all(0).tolist())
    return lambda first, last: found


def _endless(valid: list[bool]) -> Runs:
    """Runs of real tokens; all slots after the data are real tokens, too."""
    runs = true_runs([*valid, True])
    runs[-1] = (runs[-1][0], FAR)
    return runs


def _documents(mask: Documents) -> Finder:
    if 0 in mask.ids.shape:
        return lambda first, last: (ALL, NONE)
    rows = [_row_documents(row) for row in mask.ids]

    def documents(first: int, last: int) -> tuple[Runs, Runs]:
        some, every = NONE, ALL
        for starts, ids, runs_of in rows:
            segments = range(bisect_right(starts, first) - 1, bisect_right(starts, last))
            found = {ids[max(0, segment)] for segment in segments}
            runs = reduce(union, [runs_of[document] for document in found])
            some = union(some, runs)
            every = intersection(every, runs) if len(found) == 1 else NONE
        return some, every

    return documents


def _row_documents(row: Tensor) -> tuple[list[int], list[int], dict[int, Runs]]:
    """For the segments of a row, their first slots and documents; for each document, its runs."""
    change = (row[1:] != row[:-1]).nonzero().squeeze(1) + 1
    starts = [0, *change.tolist()]
    ids = row[torch.tensor(starts, device=row.device)].tolist()
    edges = [-FAR, *starts[1:], FAR]  # the first and the last segment have no end
    runs_of: dict[int, Runs] = {}
    for document, start, stop in zip(ids, edges[:-1], edges[1:], strict=True):
        runs_of.setdefault(document, []).append((start, stop))
    return starts, ids, runs_of


class Strip(NamedTuple):
    """Consecutive rows of a dense mask: columns that are True in some, and in all of them."""

    some: Runs
    every: Runs


def dense_edges(mask: Dense) -> list[int]:
    """The rows of a dense mask where blocks of queries should begin: other keys are visible there.

    Examples:
        >>> keep = torch.zeros(256, 256, dtype=torch.bool)
        >>> keep[:128, :128] = keep[128:, 128:] = True
        >>> dense_edges(Dense(keep))
        [128]
    """
    edges, joined, apart, rows = [], NONE, 0, 0
    for index, strip in enumerate(_strips(mask)):
        both, apart = union(joined, strip.some), apart + _length(strip.some)
        rows += 1
        if rows * _length(both) > _JOINED * apart:
            edges.append(index * STRIP)
            both, apart, rows = strip.some, _length(strip.some), 1
        joined = both
    return edges


def _length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def _dense(mask: Dense) -> Finder:
    """Blocks of queries see what the strips that they meet see. Queries without a row see none."""
    place, strips = mask.extent, _strips(mask)
    whole = mask.keep.shape[-1] == 1  # broadcasts over the keys
    repeated = mask.keep.shape[-2] == 1

    def placed(runs: Runs) -> Runs:
        if whole:
            return [(place.kv_start, place.kv_stop)] if runs else NONE
        return [(start + place.kv_start, stop + place.kv_start) for start, stop in runs]

    def dense(first: int, last: int) -> tuple[Runs, Runs]:
        inside = place.first_query <= first and last <= place.last_query
        low, high = (0, 0) if repeated else (first - place.first_query, last - place.first_query)
        here = strips[max(0, low // STRIP) : max(0, high // STRIP + 1)]
        some = reduce(union, (strip.some for strip in here), NONE)
        every = reduce(intersection, (strip.every for strip in here), ALL)
        return placed(some), placed(every) if inside else NONE

    return dense


def _strips(mask: Dense) -> list[Strip]:
    """The strips of a dense mask, over all rows and heads of its batch; read once."""
    strips: list[Strip] | None = _STRIPS.get(mask.versions)
    if strips is None:
        strips = [_strip(rows) for rows in mask.keep.view(torch.uint8).split(STRIP, -2)]
        _STRIPS[mask.versions] = strips
    return strips


def _strip(rows: Tensor) -> Strip:
    axes = tuple(range(rows.dim() - 1))
    some, every = rows.amax(axes).bool(), rows.amin(axes).bool()
    return Strip(_runs(some), _runs(every))


def _runs(flags: Tensor) -> Runs:
    edges = [0, *((flags[1:] != flags[:-1]).nonzero().squeeze(1) + 1).tolist(), len(flags)]
    return list(pairwise(edges))[0 if bool(flags[0]) else 1 :: 2]
