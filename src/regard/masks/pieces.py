"""A mask for some of the rows and queries of a call: simpler there than over the whole call.

All of this reads the data of rules, once each, and only where it lies on the CPU.
"""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from regard.masks import (
    EVERYTHING,
    AllOf,
    AnyOf,
    Causal,
    Chunked,
    Dense,
    Documents,
    Mask,
    Not,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
    Where,
)
from regard.masks.row_data import readable
from regard.masks.visible_runs import Runs, contains, dense_edges, visible_runs_of

# Memo tables, by identity: rules are read once for all the layers that they are passed to.
_ROWS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_EDGES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def row_masks(mask: Mask, batch: int) -> list[Mask]:
    """The mask of each row of a batch; the mask alone if it is not known row by row.

    Examples:
        >>> from regard.masks import Causal
        >>> row_masks(Causal() & Padding.from_lengths([1, 3]), 2)
        [Causal() & Padding(valid=<[1, 3] bool>), Causal() & Padding(valid=<[1, 3] bool>)]
    """
    if batch == 1 or mask.batch in (None, 1) or not _is_known(mask):
        return [mask]
    return [_row(mask, row) for row in range(batch)]


def edges_of(mask: Mask, first: int, stop: int) -> list[int]:
    """The slots between `first` and `stop` at which queries begin to attend to other keys.

    Examples:
        >>> edges_of(Documents(torch.tensor([0, 0, 1, 1, 1, 2])), 0, 6)
        [2, 5]
    """
    return sorted({slot for slot in _edges(mask, first, stop) if first < slot < stop})


class Shown(NamedTuple):
    """A part of a mask, and the keys that it shows to some and to all of a block of queries."""

    part: Mask
    some: Runs
    every: Runs


def shown_by_parts(mask: Mask) -> Callable[[int, int], list[Shown]]:
    """A function that finds what each part of an intersection shows to the queries `first..last`;
    for the blocks of one call, since data may change later."""
    parts = mask.parts if isinstance(mask, AllOf) else (mask,)
    finders = [(part, visible_runs_of(part)) for part in parts]
    return lambda first, last: [Shown(part, *find(first, last)) for part, find in finders]


def hiding(shown: Iterable[Shown], runs: Runs) -> Mask:
    """The intersection of the parts that hide some of these keys from some of the queries.

    Examples:
        >>> from regard.masks import Causal, Chunked
        >>> hiding(shown_by_parts(Causal() & Chunked(4))(4, 7), [(4, 8)])
        Causal()
    """
    parts = [
        part
        for part, _, every in shown
        if not all(contains(every, start, stop) for start, stop in runs)
    ]
    return reduce(lambda one, other: one & other, parts) if parts else EVERYTHING


def is_relative(mask: Mask) -> bool:
    """Whether a rule depends on the distance of query and key alone.

    Examples:
        >>> from regard.masks import Causal, SlidingWindow
        >>> is_relative(Causal() & SlidingWindow(4)), is_relative(Prefix(4))
        (True, False)
    """
    match mask:
        case AllOf(parts=parts) | AnyOf(parts=parts):
            return all(map(is_relative, parts))
        case Not(mask=inner):
            return is_relative(inner)
    return isinstance(mask, Causal | SlidingWindow)


def _is_known(mask: Mask) -> bool:
    """Whether the mask of a row can be made: from data on the CPU that can be read."""
    match mask:
        case AllOf(parts=parts) | AnyOf(parts=parts):
            return all(map(_is_known, parts))
        case Not(mask=inner):
            return _is_known(inner)
        case Documents(ids=data) | Padding(valid=data) | Dense(keep=data):
            return _on_cpu(data)
        case Chunked(start=start):
            return _on_cpu(start)
        case Prefix(start=start, end=end):
            return _on_cpu(start) and _on_cpu(end)
        case Where():
            return False
    return type(mask).__module__.startswith("regard.masks.") and mask.batch is None


def _on_cpu(data: object) -> bool:
    return not isinstance(data, Tensor) or (readable(data) and data.device.type == "cpu")


def _row(mask: Mask, row: int) -> Mask:
    """The mask of one row."""
    match mask:
        case AllOf(parts=parts):
            return reduce(lambda one, other: one & other, [_row(part, row) for part in parts])
        case AnyOf(parts=parts):
            return reduce(lambda one, other: one | other, [_row(part, row) for part in parts])
        case Not(mask=inner):
            return Not(_row(inner, row))
    if mask.batch in (None, 1):
        return mask
    rows: dict[int, Mask] = _ROWS.setdefault(mask, {})
    if row not in rows:
        rows[row] = _row_of_data(mask, row)
    return rows[row]


def _row_of_data(mask: Mask, row: int) -> Mask:
    def of(data: Tensor) -> Tensor:
        return data[row : row + 1] if data.shape[0] > 1 else data

    match mask:
        case Documents(ids=ids):
            return Documents(of(ids))
        case Padding(valid=valid):
            return Padding(of(valid))
        case Dense(keep=keep, place=place):
            return Dense(of(keep), place=place)
        case Chunked(size=size, start=Tensor() as start):
            return Chunked(size, of(start))
        case Prefix(lengths=lengths, start=start):
            if not isinstance(lengths, int):
                lengths = of(torch.as_tensor(lengths))
            return Prefix(lengths, None if start is None else of(start))
    raise AssertionError(f"{mask!r} has no data by row")


def _edges(mask: Mask, first: int, stop: int) -> Iterable[int]:
    match mask:
        case AllOf(parts=parts) | AnyOf(parts=parts):
            return [slot for part in parts for slot in _edges(part, first, stop)]
        case Not(mask=inner):
            return _edges(inner, first, stop)
        case Documents(ids=data) if _on_cpu(data):
            return _memoised(mask, lambda: _changes(data))
        case Padding(valid=data) if _on_cpu(data):
            return _memoised(mask, lambda: [*_changes(data), data.shape[1]])
        case Chunked(size=size, starts=starts) if starts:
            return [
                slot
                for start in starts
                for slot in range(first + (start - first) % size, stop, size)
            ]
        case Prefix(begins=begins, ends=ends) if begins and ends:
            return [*begins, *ends]
        case Dense(keep=keep, place=Span(q_start=int(start))) if _on_cpu(keep):
            return [start + row for row in dense_edges(mask)]
    return ()


def _memoised(mask: Mask, find: Callable[[], list[int]]) -> list[int]:
    found: list[int] | None = _EDGES.get(mask)
    if found is None:
        found = _EDGES[mask] = find()
    return found


def _changes(data: Tensor) -> list[int]:
    """The columns that differ from the one before in some row."""
    found: list[int] = ((data[:, 1:] != data[:, :-1]).any(0).nonzero().squeeze(1) + 1).tolist()
    return found
