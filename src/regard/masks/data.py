"""Rules about the tokens of a batch: documents, padding."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from regard.masks.mask import Reach
from regard.masks.row_data import (
    DataMask,
    as_booleans,
    as_rows,
    bounds,
    changes,
    check_vector,
    first_true,
    index,
    is_whole,
    last_true,
    may_read,
    row_index,
)
from regard.masks.runs import ALL, FAR, Finder, Runs, Shown, intersection, true_runs, union, unknown
from regard.span import Span

# For the segments of a row, their first slots and documents; for each document, its runs.
Segments = tuple[list[int], list[int], dict[int, Runs]]


@dataclass(frozen=True, eq=False, repr=False)
class Documents(DataMask):
    """A document mask, for packed sequences: each query may attend to its own document.

    Args:
        ids: `[B, S]` or `[S]` integers, the document of each token. The last id of a row holds for
            all slots after it, too.

    Raises:
        TypeError: if `ids` are not integers.
        ValueError: if they do not have one or two dimensions, or are empty.

    Examples:
        >>> import torch
        >>> from regard import Documents
        >>> print(Documents(torch.tensor([0, 0, 1])).draw())
        Documents(ids=<[1, 3] int64>)
          0 1 2
        0 ■ ■ ·
        1 ■ ■ ·
        2 · · ■
    """

    ids: Tensor
    last_start: int | None = field(init=False, default=None)  # all rows: last document from here

    def __post_init__(self) -> None:
        ids = as_rows("Documents", "ids", self.ids)
        if not is_whole(ids):
            raise TypeError(
                f"Documents takes integer ids, one for each token, got {ids.dtype}; "
                "a mask of real tokens is Padding(valid)"
            )
        if ids.shape[1] == 0:
            raise ValueError(
                f"Documents continues a row's last id, got empty rows: shape {tuple(ids.shape)}; "
                "give one id at least, or leave the mask out"
            )
        (ids,) = self._copies(ids)
        self._set(ids=ids, last_start=last_true(ids != ids[:, -1:]))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Int[Tensor, " documents_and_1"]) -> "Documents":
        """From cumulative lengths `[0, n1, n1 + n2, ...]`, as kernels for packed sequences take.

        Raises:
            ValueError: if they do not start at 0, or decrease.

        Examples:
            >>> Documents.from_cu_seqlens(torch.tensor([0, 2, 5])).ids.tolist()
            [[0, 0, 1, 1, 1]]
        """
        cu_seqlens = torch.as_tensor(cu_seqlens)
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or not is_whole(cu_seqlens):
            raise ValueError(
                "cu_seqlens holds whole numbers [0, n1, n1 + n2, ...], got shape "
                f"{tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}; ids go in Documents(ids)"
            )
        lengths = cu_seqlens.diff()
        if int(cu_seqlens[0]) != 0 or bool((lengths < 0).any()):
            raise ValueError(
                f"cu_seqlens starts at 0 and never decreases, got {cu_seqlens.tolist()}; "
                "it is the cumsum of the lengths, with a 0 in front"
            )
        documents = torch.arange(len(lengths), device=lengths.device)
        return cls(documents.repeat_interleave(lengths)[None])

    @property
    def batch(self) -> int | None:
        return self.ids.shape[0]

    @property
    def extent(self) -> Span | None:
        return Span(0, self.ids.shape[1], 0, self.ids.shape[1])

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        self._check_unchanged()
        return self._id(b, q_idx) == self._id(b, kv_idx)

    def _id(self, b: Tensor, slot: Tensor) -> Tensor:
        ids = self.ids.to(slot.device)
        return ids[row_index(ids, b), slot.clamp(0, ids.shape[1] - 1)]

    def runs(self, first: int, last: int) -> Shown:
        start = self.last_start
        return Shown(ALL, [] if start is None or first < start else [(start, FAR)])

    def finder(self) -> Finder:
        if 0 in self.ids.shape or not may_read(self.ids):
            return unknown
        rows, edges = self._segments

        def find(first: int, last: int) -> Shown:
            found = [_seen(row, first, last) for row in rows]
            some, every = found[0]
            for its_some, its_every in found[1:]:
                some, every = union(some, its_some), intersection(every, its_every)
            return Shown(some, every, edges)

        return find

    @cached_property
    def _segments(self) -> tuple[list[Segments], list[int]]:
        return [_segments_of(row) for row in self.ids], changes(self.ids)

    def _hidden_keys(self, b: int, q: int, k: int) -> str:
        mine, its = (int(self._id(index(b), index(slot))) for slot in (q, k))
        return f"other documents (key in {its}, query in {mine})"


@dataclass(frozen=True, eq=False, repr=False)
class Padding(DataMask):
    """A padding mask: each query may attend to the keys that are real tokens.

    Args:
        valid: `[B, S]` or `[S]`, True (or 1) for real tokens. Keys after the last are visible.

    `start` is `[B]`, the slot of each row's first real token, as `Chunked` and `Prefix` take it.

    Raises:
        TypeError: if `valid` is floating point, because its meaning would be ambiguous.
        ValueError: if it holds numbers other than 0 and 1.

    Examples:
        >>> import torch
        >>> from regard import Padding
        >>> Padding(torch.tensor([[0, 0, 1, 1]])).start.tolist()
        [2]
    """

    valid: Tensor
    hidden_stop: int | None = field(init=False, default=None)  # keys from here on are all visible
    visible_start: int | None = field(init=False, default=None)  # keys before are all hidden
    start: Tensor = field(init=False)

    def __post_init__(self) -> None:
        (valid,) = self._copies(as_booleans(as_rows("Padding", "valid", self.valid)))
        beyond = valid.new_ones(valid.shape[0], 1)
        start = torch.cat([valid, beyond], dim=1).to(torch.int8).argmax(dim=1)
        hidden_stop, visible_start = last_true(~valid), first_true(valid)
        self._set(valid=valid, hidden_stop=hidden_stop, visible_start=visible_start, start=start)

    @classmethod
    def from_lengths(cls, lengths: Tensor | Sequence[int], total: int | None = None) -> "Padding":
        """Right padding: `lengths` real tokens in each row of `total` slots.

        Raises:
            ValueError: if `lengths` are not `[B]` whole numbers from 0 to `total`.

        Examples:
            >>> Padding.from_lengths([1, 3]).valid.int().tolist()
            [[1, 0, 0], [1, 1, 1]]
        """
        counts = torch.as_tensor(lengths)
        check_vector("lengths", counts)
        known = bounds(counts)
        size = total if total is not None or known is None else known[1]
        if size is None or (known is not None and not 0 <= known[0] <= known[1] <= size):
            raise ValueError(
                f"lengths are from 0 to total={total}, got {lengths!r}; total=None is their "
                "largest, and has to be given where they cannot be read"
            )
        slots = torch.arange(size, device=counts.device)
        return cls(slots < counts[:, None])

    @property
    def batch(self) -> int | None:
        return self.valid.shape[0]

    @property
    def extent(self) -> Span | None:
        return Span(0, self.valid.shape[1], 0, self.valid.shape[1])

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        self._check_unchanged()
        valid = self.valid.to(kv_idx.device)
        size = valid.shape[1]
        if size == 0:
            return kv_idx == kv_idx
        return valid[row_index(valid, b), kv_idx.clamp(0, size - 1)] | (kv_idx >= size)

    def runs(self, first: int, last: int) -> Shown:
        stop = self.valid.shape[1] if self.hidden_stop is None else self.hidden_stop
        return Shown([(self.visible_start or 0, FAR)], [(stop, FAR)])

    def reach(self, span: Span) -> Reach:
        return 0, None  # keys that are padding in all rows are left to blocks of queries

    def finder(self) -> Finder:
        if not may_read(self.valid):
            return unknown
        return lambda first, last: self._shown

    @cached_property
    def _shown(self) -> Shown:
        if 0 in self.valid.shape:
            return Shown(ALL, ALL)
        columns, beyond = (self.valid.any(0), self.valid.all(0)), self.valid.shape[1]
        some, every = (union(true_runs(each), [(beyond, FAR)]) for each in columns)
        return Shown(some, every, [*changes(self.valid), beyond])

    def _hidden_keys(self, b: int, q: int, k: int) -> str:
        return f"padding (key {k} of row {b})"


def _seen(segments: Segments, first: int, last: int) -> tuple[Runs, Runs]:
    """The keys of one batch row visible to some, and to all, of the queries `first..last`."""
    starts, ids, runs_of = segments
    here = {*ids[bisect_right(starts, first) - 1 : bisect_right(starts, last)]}
    if len(here) == 1:
        (document,) = here
        return runs_of[document], runs_of[document]
    return union(*(runs_of[document] for document in here)), []


def _segments_of(row: Tensor) -> Segments:
    change = (row[1:] != row[:-1]).nonzero().squeeze(1) + 1
    starts = [0, *change.tolist()]
    ids = row[torch.tensor(starts, device=row.device)].tolist()
    edges = [-FAR, *starts[1:], FAR]  # the first and the last segment have no end
    runs_of: dict[int, Runs] = {}
    for document, start, stop in zip(ids, edges[:-1], edges[1:], strict=True):
        runs_of.setdefault(document, []).append((start, stop))
    return starts, ids, runs_of
