"""Rules that hold data for each row of a batch: chunks, prefixes, documents, padding."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.masks.algebra import EVERYTHING, NOTHING, Mask, Reach
from regard.masks.row_data import (
    bounds,
    check_unchanged,
    chunk,
    code,
    distinct,
    equal,
    first_true,
    index,
    is_whole,
    last_true,
    lasting,
    positive,
    row,
    row_index,
    rows,
    vector,
    zero_or_one,
)
from regard.span import Span
from regard.versions import Versions


@dataclass(frozen=True, eq=False, repr=False)
class Chunked(Mask):
    """Keys of the query's own chunk of `size` slots (Llama 4's local attention, with `Causal()`).

    Args:
        size: of a chunk, at least 1.
        start: `[B]` integers, the first real slot of each row, for left padding;
            `Padding(...).start`.

    Raises:
        ValueError: if `size` is below 1 or `start` is not `[B]`.

    >>> print(Chunked(2).draw(4))
    Chunked(size=2)
      0 1 2 3
    0 ■ ■ · ·
    1 ■ ■ · ·
    2 · · ■ ■
    3 · · ■ ■
    """

    size: int
    start: Tensor | None = None
    starts: tuple[int, ...] | None = field(init=False, default=None)  # those that occur
    read: Versions = field(init=False)

    def __post_init__(self) -> None:
        positive("Chunked", "it counts the keys of a chunk", self.size)
        vector("start", self.start)
        object.__setattr__(self, "start", _lasting(self.start))
        object.__setattr__(self, "starts", (0,) if self.start is None else distinct(self.start))
        object.__setattr__(self, "read", _read(self.start))

    @property
    def batch(self) -> int | None:
        return None if self.start is None else self.start.shape[0]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        check_unchanged(self, self.read)
        start = 0 if self.start is None else row(self.start, b)
        return chunk(q_idx - start, self.size) == chunk(kv_idx - start, self.size)

    def within(self, span: Span) -> Mask:
        check_unchanged(self, self.read)
        if not self.starts or torch.compiler.is_exporting():
            return self
        slots = (span.first_query, span.last_query, span.kv_start, span.kv_stop - 1)
        chunks = [[(slot - start) // self.size for slot in slots] for start in self.starts]
        if all(first == last == low == high for first, last, low, high in chunks):
            return EVERYTHING
        apart = all(high < first or low > last for first, last, low, high in chunks)
        return NOTHING if apart else self

    def reach(self, span: Span) -> Reach:
        if not self.starts:
            return 0, None
        size, first, last = self.size, span.first_query, span.last_query
        low = min((first - start) // size * size + start for start in self.starts)
        high = max((last - start) // size * size + start for start in self.starts)
        return max(0, low), high + size - 1

    def _hides(self, b: int, q: int, k: int) -> str:
        start = 0 if self.start is None else int(row(self.start, index(b)))
        mine, its = (q - start) // self.size, (k - start) // self.size
        return f"keys of other chunks (key in chunk {its}, query in {mine})"

    def __repr__(self) -> str:
        return code("Chunked", size=self.size, start=self.start)

    def __eq__(self, other: object) -> bool:
        return equal(self, other, ("size", "start"))

    def __hash__(self) -> int:
        return hash((Chunked, self.size, id(self.start)))


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    """The first `lengths` slots, seen by all: `Causal() | Prefix(n)` is a prefix language model.

    Args:
        lengths: one number, one for each row, or `[B]` integers.
        start: `[B]` integers, the first real slot of each row, for left padding.

    Raises:
        ValueError: if a length is negative, or `start` is not `[B]`.

    >>> from regard.masks import Causal
    >>> print((Causal() | Prefix(2)).draw(4))
    Causal() | Prefix(lengths=2)
      0 1 2 3
    0 ■ ■ · ·
    1 ■ ■ · ·
    2 ■ ■ ■ ·
    3 ■ ■ ■ ■
    """

    lengths: int | Sequence[int] | Tensor
    start: Tensor | None = None
    end: int | Tensor = field(init=False)
    ends: tuple[int, int] | None = field(init=False, default=None)
    begins: tuple[int, int] | None = field(init=False, default=None)
    read: Versions = field(init=False)

    def __post_init__(self) -> None:
        lengths = self.lengths
        if isinstance(lengths, Sequence):
            object.__setattr__(self, "lengths", tuple(lengths))
            lengths = torch.tensor(
                lengths, device="cpu" if self.start is None else self.start.device
            )
        elif not isinstance(lengths, Tensor | int | torch.SymInt):
            raise TypeError(f"Prefix takes lengths as whole numbers, got {type(lengths).__name__}")
        vector("lengths", lengths if isinstance(lengths, Tensor) else None)
        vector("start", self.start)
        self._agree(lengths)
        lengths = _lasting(lengths)
        object.__setattr__(self, "start", _lasting(self.start))
        known = bounds(lengths)
        if known is not None and known[0] < 0:
            raise ValueError(f"Prefix has lengths of 0 or more, got {self.lengths!r}; 0 is none")
        end = lengths if self.start is None else lengths + self.start
        object.__setattr__(self, "end", end)
        object.__setattr__(self, "ends", bounds(end))
        object.__setattr__(self, "begins", bounds(0 if self.start is None else self.start))
        object.__setattr__(self, "read", _read(lengths, self.start))

    def _agree(self, lengths: int | Tensor) -> None:
        if not isinstance(lengths, Tensor) or self.start is None:
            return
        if 1 not in (len(lengths), len(self.start)) and len(lengths) != len(self.start):
            raise ValueError(
                f"Prefix has one length and one start for each row, got {len(lengths)} lengths "
                f"and {len(self.start)} starts; give as many of both"
            )

    @property
    def batch(self) -> int | None:
        return self.end.shape[0] if isinstance(self.end, Tensor) else None

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        check_unchanged(self, self.read)
        inside = kv_idx < (row(self.end, b) if isinstance(self.end, Tensor) else self.end)
        return inside if self.start is None else inside & (kv_idx >= row(self.start, b))

    def within(self, span: Span) -> Mask:
        check_unchanged(self, self.read)
        if self.ends is None or self.begins is None or torch.compiler.is_exporting():
            return self
        if span.kv_stop <= self.ends[0] and span.kv_start >= self.begins[1]:
            return EVERYTHING
        hidden = span.kv_start >= self.ends[1] or span.kv_stop <= self.begins[0]
        return NOTHING if hidden else self

    def reach(self, span: Span) -> Reach:
        if self.ends is None or self.begins is None:
            return 0, None
        return self.begins[0], self.ends[1] - 1

    def _hides(self, b: int, q: int, k: int) -> str:
        start, end = (
            int(row(x, index(b))) if isinstance(x, Tensor) else x or 0
            for x in (self.start, self.end)
        )
        return f"keys outside the prefix ({start} <= key < {end})"

    def __repr__(self) -> str:
        return code("Prefix", lengths=self.lengths, start=self.start)

    def __eq__(self, other: object) -> bool:
        return equal(self, other, ("lengths", "start"))

    def __hash__(self) -> int:
        lengths = id(self.lengths) if isinstance(self.lengths, Tensor) else self.lengths
        return hash((Prefix, lengths, id(self.start)))


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """Tokens see their own document only: packed sequences.

    Args:
        ids: `[B, S]` or `[S]` integers, one for each token. Beyond them a row's last id continues.

    Raises:
        TypeError: if `ids` are not integers.
        ValueError: if they are not of one or two dimensions, or none.

    >>> print(Documents(torch.tensor([0, 0, 1])).draw())
    Documents(ids=<[1, 3] int64>)
      0 1 2
    0 ■ ■ ·
    1 ■ ■ ·
    2 · · ■
    """

    ids: Tensor
    last_start: int | None = field(init=False, default=None)  # where every row is in its last one
    read: Versions = field(init=False)

    def __post_init__(self) -> None:
        ids = rows("Documents", "ids", self.ids)
        if not is_whole(ids):
            raise TypeError(
                f"Documents takes integer ids, one for each token, got {ids.dtype}; "
                "a mask of real tokens is Padding(valid)"
            )
        if ids.shape[1] == 0:
            raise ValueError(
                f"Documents continues a row's last id, got rows of none: shape {tuple(ids.shape)}; "
                "give one id at least, or leave the mask out"
            )
        object.__setattr__(self, "ids", lasting(ids))
        object.__setattr__(self, "last_start", last_true(ids != ids[:, -1:]))
        object.__setattr__(self, "read", _read(self.ids))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Int[Tensor, " documents_and_1"]) -> "Documents":
        """From cumulative lengths `[0, n1, n1 + n2, ...]`, as packed kernels take them.

        Raises:
            ValueError: if they do not start at 0, or fall.

        >>> Documents.from_cu_seqlens(torch.tensor([0, 2, 5])).ids.tolist()
        [[0, 0, 1, 1, 1]]
        """
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or not is_whole(cu_seqlens):
            raise ValueError(
                "cu_seqlens holds whole numbers [0, n1, n1 + n2, ...], got shape "
                f"{tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}; ids go in Documents(ids)"
            )
        lengths = cu_seqlens.diff()
        if int(cu_seqlens[0]) != 0 or bool((lengths < 0).any()):
            raise ValueError(
                f"cu_seqlens starts at 0 and never falls, got {cu_seqlens.tolist()}; "
                "lengths become it by cumsum, with a 0 in front"
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
        check_unchanged(self, self.read)
        return self._at(b, q_idx) == self._at(b, kv_idx)

    def _at(self, b: Tensor, slot: Tensor) -> Tensor:
        ids = self.ids.to(slot.device)
        return ids[row_index(ids, b), slot.clamp(0, ids.shape[1] - 1)]

    def within(self, span: Span) -> Mask:
        check_unchanged(self, self.read)
        start = self.last_start
        if start is not None and span.first_query >= start and span.kv_start >= start:
            return EVERYTHING
        return self

    def _hides(self, b: int, q: int, k: int) -> str:
        mine, its = (int(self._at(index(b), index(slot))) for slot in (q, k))
        return f"other documents (key in {its}, query in {mine})"

    def __repr__(self) -> str:
        return code("Documents", ids=self.ids)


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """Keys that are real tokens.

    Args:
        valid: `[B, S]` or `[S]`, True (or 1) for real tokens; keys beyond are visible.

    `start` is `[B]`: each row's first real slot, as `Chunked` and `Prefix` take it.

    Raises:
        TypeError: if `valid` is floating point, whose polarity nobody can know.
        ValueError: if it holds numbers other than 0 and 1.

    >>> Padding(torch.tensor([[0, 0, 1, 1]])).start.tolist()
    [2]
    """

    valid: Tensor
    hidden_stop: int | None = field(init=False, default=None)  # keys from here on are all visible
    shown_start: int | None = field(init=False, default=None)  # keys before are all hidden
    start: Tensor = field(init=False)
    read: Versions = field(init=False)

    def __post_init__(self) -> None:
        valid = lasting(zero_or_one(rows("Padding", "valid", self.valid)))
        object.__setattr__(self, "valid", valid)
        object.__setattr__(self, "hidden_stop", last_true(~valid))
        object.__setattr__(self, "shown_start", first_true(valid))
        beyond = valid.new_ones(valid.shape[0], 1)
        first = torch.cat([valid, beyond], dim=1).to(torch.int8).argmax(dim=1)
        object.__setattr__(self, "start", first)
        object.__setattr__(self, "read", _read(valid))

    @classmethod
    def from_lengths(cls, lengths: Tensor | Sequence[int], total: int | None = None) -> "Padding":
        """Right padding: `lengths` real tokens in each row of `total` slots.

        Raises:
            ValueError: if `lengths` are not `[B]` whole numbers from 0 to `total`.

        >>> Padding.from_lengths([1, 3]).valid.int().tolist()
        [[1, 0, 0], [1, 1, 1]]
        """
        counts = torch.as_tensor(lengths)
        vector("lengths", counts)
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
        check_unchanged(self, self.read)
        valid = self.valid.to(kv_idx.device)
        size = valid.shape[1]
        if size == 0:
            return kv_idx == kv_idx
        return valid[row_index(valid, b), kv_idx.clamp(0, size - 1)] | (kv_idx >= size)

    def within(self, span: Span) -> Mask:
        check_unchanged(self, self.read)
        stop = self.valid.shape[1] if self.hidden_stop is None else self.hidden_stop
        if span.kv_start >= stop:
            return EVERYTHING
        if torch.compiler.is_exporting():
            return self
        hidden = self.shown_start is not None and span.kv_stop <= self.shown_start
        return NOTHING if hidden else self

    def _hides(self, b: int, q: int, k: int) -> str:
        return f"padding (key {k} of row {b})"

    def __repr__(self) -> str:
        return code("Padding", valid=self.valid)


def _lasting(value: Any) -> Any:
    return lasting(value) if isinstance(value, Tensor) else value


def _read(*data: object) -> Versions:
    return Versions(*(each for each in data if isinstance(each, Tensor)))
