"""Rules that hold data for each row of a batch: chunks, prefixes, documents, padding."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.algebra import EVERYTHING, NOTHING, Mask, Reach
from regard.rows import (
    bounds,
    chunk,
    code,
    equal,
    last_true,
    positive,
    row,
    row_index,
    rows,
    vector,
    zero_or_one,
)
from regard.span import Span


@dataclass(frozen=True, eq=False, repr=False)
class Chunked(Mask):
    """Keys of the query's own chunk of `size` slots (Llama 4's local attention, with `Causal()`).

    Args:
        size: of a chunk, at least 1.
        start: `[B]`, the first real slot of each row, for left padding; `Padding(...).start`.

    Raises:
        ValueError: if `size` is below 1 or `start` is not `[B]`.
    """

    size: int
    start: Tensor | None = None
    bounds: tuple[int, int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        positive("Chunked", "it counts the keys of a chunk", self.size)
        vector("start", self.start)
        object.__setattr__(self, "bounds", (0, 0) if self.start is None else bounds(self.start))

    @property
    def batch(self) -> int | None:
        return None if self.start is None else self.start.shape[0]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        start = 0 if self.start is None else row(self.start, b)
        return chunk(q_idx - start, self.size) == chunk(kv_idx - start, self.size)

    def within(self, span: Span) -> Mask:
        if self.bounds is None or self.bounds[0] != self.bounds[1] or not span.num_keys:
            return self
        first, last = (self._chunk_of(slot) for slot in (span.first_query, span.last_query))
        low, high = (self._chunk_of(slot) for slot in (span.kv_start, span.kv_stop - 1))
        if first == last == low == high:
            return EVERYTHING
        return NOTHING if high < first or low > last else self

    def reach(self, span: Span) -> Reach:
        if self.bounds is None:
            return 0, None
        low, high = self.bounds
        begin = (span.first_query - high) // self.size * self.size + low
        end = ((span.last_query - low) // self.size + 1) * self.size + high - 1
        return max(0, begin), end

    def _chunk_of(self, slot: int) -> int:
        assert self.bounds is not None
        return (slot - self.bounds[0]) // self.size

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
        lengths: one number, a list, or `[B]`.
        start: `[B]`, the first real slot of each row, for left padding.

    Raises:
        ValueError: if a length is negative, or `start` is not `[B]`.
    """

    lengths: int | Sequence[int] | Tensor
    start: Tensor | None = None
    ends: tuple[int, int] | None = field(init=False, default=None)
    begins: tuple[int, int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        lengths = self.lengths
        if isinstance(lengths, list | tuple):
            object.__setattr__(self, "lengths", torch.tensor(lengths, dtype=torch.int64))
        vector("lengths", self.lengths if isinstance(self.lengths, Tensor) else None)
        vector("start", self.start)
        known = self._bounds_of(self.lengths)
        if known is not None and known[0] < 0:
            raise ValueError(f"Prefix has lengths of 0 or more, got {lengths!r}")
        object.__setattr__(self, "begins", self._bounds_of(0 if self.start is None else self.start))
        object.__setattr__(self, "ends", self._bounds_of(self._end()))

    @staticmethod
    def _bounds_of(value: object) -> tuple[int, int] | None:
        if isinstance(value, Tensor):
            return bounds(value)
        assert isinstance(value, int)
        return value, value

    def _end(self) -> int | Tensor:
        assert isinstance(self.lengths, int | Tensor)
        return self.lengths if self.start is None else self.lengths + self.start

    @property
    def batch(self) -> int | None:
        end = self._end()
        return end.shape[0] if isinstance(end, Tensor) else None

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        end = self._end()
        inside = kv_idx < (row(end, b) if isinstance(end, Tensor) else end)
        if self.start is not None:
            inside = inside & (kv_idx >= row(self.start, b))
        return inside & (q_idx == q_idx)

    def within(self, span: Span) -> Mask:
        if self.ends is None or self.begins is None:
            return self
        if span.kv_stop <= self.ends[0] and span.kv_start >= self.begins[1]:
            return EVERYTHING
        hidden = span.kv_start >= self.ends[1] or span.kv_stop <= self.begins[0]
        return NOTHING if hidden else self

    def reach(self, span: Span) -> Reach:
        if self.ends is None or self.begins is None:
            return 0, None
        return self.begins[0], self.ends[1] - 1

    def __repr__(self) -> str:
        return code("Prefix", lengths=self.lengths, start=self.start)

    def __eq__(self, other: object) -> bool:
        return equal(self, other, ("lengths", "start"))

    def __hash__(self) -> int:
        return hash((Prefix, self.lengths if isinstance(self.lengths, int) else id(self.lengths)))


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """Tokens see their own document only: packed sequences.

    Args:
        ids: `[B, S]` or `[S]` integers, one for each token. Beyond them a row's last id continues.

    Raises:
        TypeError, ValueError: if `ids` are not integers of one or two dimensions, or none.
    """

    ids: Tensor
    last_start: int | None = field(init=False, default=None)  # where every row is in its last one

    def __post_init__(self) -> None:
        ids = rows("Documents", "ids", self.ids)
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise TypeError(f"Documents takes integer ids, got {ids.dtype}; cast them to int64")
        object.__setattr__(self, "ids", ids)
        differ = ids != ids[:, -1:]
        object.__setattr__(self, "last_start", last_true(differ))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> "Documents":
        """From cumulative lengths `[0, n1, n1 + n2, ...]`, as packed kernels take them.

        >>> Documents.from_cu_seqlens(torch.tensor([0, 2, 5])).ids.tolist()
        [[0, 0, 1, 1, 1]]
        """
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
            raise ValueError(
                "cu_seqlens is a list of whole numbers [0, n1, n1 + n2, ...], "
                f"got shape {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
            )
        lengths = cu_seqlens.diff()
        if int(cu_seqlens[0]) != 0 or bool((lengths < 0).any()):
            raise ValueError(f"cu_seqlens starts at 0 and never falls, got {cu_seqlens.tolist()}")
        return cls(
            torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)[None]
        )

    @property
    def batch(self) -> int | None:
        return self.ids.shape[0]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self._at(b, q_idx) == self._at(b, kv_idx)

    def _at(self, b: Tensor, slot: Tensor) -> Tensor:
        ids = self.ids.to(slot.device)
        return ids[row_index(ids, b), slot.clamp(0, ids.shape[1] - 1)]

    def within(self, span: Span) -> Mask:
        start = self.last_start
        if start is not None and span.first_query >= start and span.kv_start >= start:
            return EVERYTHING
        return self

    def __repr__(self) -> str:
        return code("Documents", ids=self.ids)


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """Keys that are real tokens.

    Args:
        valid: `[B, S]` or `[S]`, True (or 1) for real tokens; keys beyond are visible.

    Raises:
        TypeError: if `valid` is floating point, whose polarity nobody can know.
        ValueError: if it holds numbers other than 0 and 1.

    >>> Padding(torch.tensor([[0, 0, 1, 1]])).start.tolist()
    [2]
    """

    valid: Tensor
    hidden_stop: int | None = field(init=False, default=None)  # keys from here on are all visible
    start: Tensor = field(init=False)

    def __post_init__(self) -> None:
        valid = rows("Padding", "valid", self.valid)
        if valid.dtype != torch.bool:
            valid = zero_or_one(valid)
        object.__setattr__(self, "valid", valid)
        object.__setattr__(self, "hidden_stop", last_true(~valid))
        stop = torch.full_like(valid[:, :1], True)
        first = torch.cat([valid, stop], dim=1).to(torch.int8).argmax(dim=1)
        object.__setattr__(self, "start", first)

    @classmethod
    def from_lengths(cls, lengths: Tensor | Sequence[int], total: int | None = None) -> "Padding":
        """Right padding: `lengths` real tokens in each row of `total` slots.

        >>> Padding.from_lengths([1, 3]).valid.int().tolist()
        [[1, 0, 0], [1, 1, 1]]
        """
        counts = torch.as_tensor(lengths)
        slots = torch.arange(int(counts.max()) if total is None else total, device=counts.device)
        return cls(slots < counts[:, None])

    @property
    def batch(self) -> int | None:
        return self.valid.shape[0]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        valid = self.valid.to(kv_idx.device)
        size = valid.shape[1]
        if size == 0:
            return (kv_idx == kv_idx) & (q_idx == q_idx)
        seen = valid[row_index(valid, b), kv_idx.clamp(0, size - 1)] | (kv_idx >= size)
        return seen & (q_idx == q_idx)

    def within(self, span: Span) -> Mask:
        stop = self.valid.shape[1] if self.hidden_stop is None else self.hidden_stop
        return EVERYTHING if span.kv_start >= stop else self

    def __repr__(self) -> str:
        return code("Padding", valid=self.valid)
