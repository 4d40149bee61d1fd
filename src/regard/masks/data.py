"""Rules with data for each row of a batch: chunks, prefixes, documents, padding."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from regard.masks.algebra import EVERYTHING, NOTHING, Mask, Reach
from regard.masks.row_data import (
    DataMask,
    as_booleans,
    as_rows,
    at_row,
    bounds,
    check_size,
    check_vector,
    chunk_index,
    distinct,
    first_true,
    index,
    is_whole,
    last_true,
    row_index,
    same_fields,
)
from regard.span import Span


@dataclass(frozen=True, eq=False, repr=False)
class Chunked(DataMask):
    """A chunked mask: each query may attend to the keys of its own chunk of `size` slots.

    `Causal() & Chunked(size)` is the local attention of Llama 4.

    Args:
        size: slots in a chunk, at least 1.
        start: `[B]` integers, the slot of each row's first real token, for left padding:
            `Padding(...).start`.

    Raises:
        ValueError: if `size` is below 1 or `start` is not `[B]`.

    Examples:
        >>> from regard import Chunked
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
    starts: tuple[int, ...] | None = field(init=False, default=None)  # the values of `start`

    def __post_init__(self) -> None:
        check_size("Chunked", self.size, "it counts the keys of a chunk")
        check_vector("start", self.start)
        (start,) = self._copies(self.start)
        self._set(start=start, starts=(0,) if start is None else distinct(start))

    @property
    def batch(self) -> int | None:
        return None if self.start is None else self.start.shape[0]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        self._check_unchanged()
        start = 0 if self.start is None else at_row(self.start, b)
        return chunk_index(q_idx - start, self.size) == chunk_index(kv_idx - start, self.size)

    def within(self, span: Span) -> Mask:
        self._check_unchanged()
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

    def _hidden_keys(self, b: int, q: int, k: int) -> str:
        start = 0 if self.start is None else int(at_row(self.start, index(b)))
        mine, its = (q - start) // self.size, (k - start) // self.size
        return f"keys of other chunks (key in chunk {its}, query in {mine})"

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other, ("size", "start"))

    def __hash__(self) -> int:
        return self._hash(self.size)


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(DataMask):
    """A prefix mask: every query may attend to the first `lengths` keys.

    `Causal() | Prefix(n)` is the mask of a prefix language model.

    Args:
        lengths: one number, one for each row, or `[B]` integers.
        start: `[B]` integers, the slot of each row's first real token, for left padding.

    Raises:
        ValueError: if a length is negative, or `start` is not `[B]`.

    Examples:
        >>> from regard import Prefix
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
    end: int | Tensor = field(init=False)  # one past the last slot of the prefix
    ends: tuple[int, int] | None = field(init=False, default=None)  # its bounds over the rows
    begins: tuple[int, int] | None = field(init=False, default=None)  # the bounds of `start`

    def __post_init__(self) -> None:
        lengths = self.lengths
        if isinstance(lengths, Sequence):
            self._set(lengths=tuple(lengths))
            lengths = torch.tensor(
                lengths, device="cpu" if self.start is None else self.start.device
            )
        elif not isinstance(lengths, Tensor | int | torch.SymInt):
            raise TypeError(f"Prefix takes lengths as whole numbers, got {type(lengths).__name__}")
        check_vector("lengths", lengths if isinstance(lengths, Tensor) else None)
        check_vector("start", self.start)
        self._check_rows(lengths)
        lengths, start = self._copies(lengths, self.start)
        self._set(given=(self.lengths, self.start))
        if isinstance(self.lengths, Tensor):
            self._set(lengths=lengths)
        known = bounds(lengths)
        if known is not None and known[0] < 0:
            raise ValueError(f"Prefix has lengths of 0 or more, got {self.lengths!r}; 0 is none")
        end = lengths if start is None else lengths + start
        begins = bounds(0 if start is None else start)
        self._set(start=start, end=end, ends=bounds(end), begins=begins)

    def _check_rows(self, lengths: int | Tensor) -> None:
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
        self._check_unchanged()
        inside = kv_idx < (at_row(self.end, b) if isinstance(self.end, Tensor) else self.end)
        return inside if self.start is None else inside & (kv_idx >= at_row(self.start, b))

    def within(self, span: Span) -> Mask:
        self._check_unchanged()
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

    def _hidden_keys(self, b: int, q: int, k: int) -> str:
        start, end = (
            int(at_row(x, index(b))) if isinstance(x, Tensor) else x or 0
            for x in (self.start, self.end)
        )
        return f"keys outside the prefix ({start} <= key < {end})"

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other, ("lengths", "start"))

    def __hash__(self) -> int:
        return self._hash()


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

    def within(self, span: Span) -> Mask:
        self._check_unchanged()
        start = self.last_start
        if start is not None and span.first_query >= start and span.kv_start >= start:
            return EVERYTHING
        return self

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

    def within(self, span: Span) -> Mask:
        self._check_unchanged()
        stop = self.valid.shape[1] if self.hidden_stop is None else self.hidden_stop
        if span.kv_start >= stop:
            return EVERYTHING
        if torch.compiler.is_exporting():
            return self
        hidden = self.visible_start is not None and span.kv_stop <= self.visible_start
        return NOTHING if hidden else self

    def _hidden_keys(self, b: int, q: int, k: int) -> str:
        return f"padding (key {k} of row {b})"
