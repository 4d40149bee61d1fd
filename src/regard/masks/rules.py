"""Rules by position, or by any function.

Constructors read tensors once; `within` reads none, so that no call waits for a device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import torch
from torch import Tensor

from regard.masks.mask import EVERYTHING, NOTHING, Mask, Reach
from regard.masks.row_data import (
    EqualByData,
    at_row,
    bounds,
    check_size,
    check_vector,
    described,
    distinct,
    index,
)
from regard.masks.runs import FAR, NEAR, Shown, run, unknown
from regard.span import Span

# Exceptions of a mistake in a function that a user gives; any other exception interrupts the call.
MISTAKES = (
    *(ArithmeticError, AttributeError, LookupError, NameError),
    *(RuntimeError, TypeError, ValueError),
)


class BeyondData(ValueError):
    """The error of a `Where` that is evaluated at slots which its data does not cover.

    Examples:
        >>> import torch
        >>> from regard.masks import BeyondData, Span, Where
        >>> ids = torch.tensor([0, 0, 1])
        >>> same = Where(lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx])
        >>> try:
        ...     same.dense(Span(3, 4, 0, 4))
        ... except BeyondData as error:
        ...     print(str(error).rpartition("; ")[2])
        with a cache, slots count from its first token: give data for all slots of the sequence
    """


MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Causal(Mask):
    """The causal mask: each query may attend to the keys up to its own, `kv <= q`.

    Examples:
        >>> from regard import Causal
        >>> print(Causal().draw(3))
        Causal()
          0 1 2
        0 ■ · ·
        1 ■ ■ ·
        2 ■ ■ ■
    """

    relative = True

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx

    def runs(self, first: int, last: int) -> Shown:
        return Shown([(NEAR, last + 1)], [(NEAR, first + 1)])

    def within(self, span: Span) -> Mask:
        # As `runs` says; every layer asks at every step.
        if span.kv_stop <= span.first_query + 1:
            return EVERYTHING
        return self if span.kv_start <= span.last_query else NOTHING

    def reach(self, span: Span) -> Reach:
        return 0, span.last_query

    def _hidden_keys(self, b: int, q: int, k: int) -> str:
        return f"keys after the query ({k} > {q})"


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """A sliding window: each query may attend to its own key and the `size - 1` before it.

    Sliding window attention (Beltagy et al. 2020, arXiv:2004.05150). Keys after the query are
    visible, too; combine it with `Causal()`.

    Args:
        size: keys, the query's own counted.

    Raises:
        ValueError: if `size` is below 1.

    Examples:
        >>> from regard import Causal, SlidingWindow
        >>> print((Causal() & SlidingWindow(2)).draw(4))
        Causal() & SlidingWindow(size=2)
          0 1 2 3
        0 ■ · · ·
        1 ■ ■ · ·
        2 · ■ ■ ·
        3 · · ■ ■
    """

    size: int
    relative = True

    def __post_init__(self) -> None:
        check_size("SlidingWindow", self.size, "a window of 1 is the query's own key alone")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx > q_idx - self.size

    def runs(self, first: int, last: int) -> Shown:
        return Shown([(first - self.size + 1, FAR)], [(last - self.size + 1, FAR)])

    def _hidden_keys(self, b: int, q: int, k: int) -> str:
        return f"keys {self.size} or more before the query ({q} - {k} = {q - k})"


@dataclass(frozen=True, eq=False, repr=False)
class Chunked(EqualByData):
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
        _, start = self._copies(self.size, self.start)
        self._set(start=start, starts=(0,) if start is None else distinct(start))

    @property
    def batch(self) -> int | None:
        return None if self.start is None else self.start.shape[0]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        self._check_unchanged()
        start = 0 if self.start is None else at_row(self.start, b)
        mine, its = (
            torch.div(slot - start, self.size, rounding_mode="floor") for slot in (q_idx, kv_idx)
        )
        return mine == its

    def runs(self, first: int, last: int) -> Shown:
        if not self.starts:
            return unknown(first, last)
        size, starts = self.size, self.starts
        lows = [(first - start) // size * size + start for start in starts]
        stops = [(last - start) // size * size + start + size for start in starts]
        alike = all(low + size == stop for low, stop in zip(lows, stops, strict=True))
        edges = (slot for low in lows for slot in range(low + size, last + 1, size))
        every = [(max(lows), min(stops))] if alike else []
        return Shown([(min(lows), max(stops))], every, edges)

    def _hidden_keys(self, b: int, q: int, k: int) -> str:
        start = 0 if self.start is None else int(at_row(self.start, index(b)))
        mine, its = (q - start) // self.size, (k - start) // self.size
        return f"keys of other chunks (key in chunk {its}, query in {mine})"


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(EqualByData):
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
        check_vector("start", self.start)
        rows = lengths if isinstance(lengths, Sequence) else (lengths,)
        if not all(isinstance(each, Tensor | Integral | torch.SymInt) for each in rows):
            raise TypeError(f"Prefix takes lengths as whole numbers, got {lengths!r}")
        if isinstance(lengths, Sequence):
            self._set(lengths=tuple(lengths))
            lengths = torch.tensor(lengths, device=getattr(self.start, "device", "cpu"))
        check_vector("lengths", lengths if isinstance(lengths, Tensor) else None)
        self._check_rows(lengths)
        lengths, start = self._copies(lengths, self.start)
        self._set(given=(self.lengths, self.start))
        if isinstance(self.lengths, Tensor):
            self._set(lengths=lengths)
        if (known := bounds(lengths)) is not None and not 0 <= known[0] <= known[1] < 2**63:
            raise ValueError(f"Prefix has lengths of 0 or more, < 2**63, got {self.lengths!r}")
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

    def runs(self, first: int, last: int) -> Shown:
        if self.ends is None or self.begins is None:
            return unknown(first, last)
        (low, begin), (end, high) = self.begins, self.ends
        return Shown(run(low, high), run(begin, end), (low, begin, end, high))

    def _hidden_keys(self, b: int, q: int, k: int) -> str:
        start, end = (
            int(at_row(x, index(b))) if isinstance(x, Tensor) else x or 0
            for x in (self.start, self.end)
        )
        return f"keys outside the prefix ({start} <= key < {end})"


@dataclass(frozen=True)
class Where(Mask):
    """A mask from any function `(b, h, q_idx, kv_idx) -> bool`: a FlexAttention `mask_mod`.

    Args:
        mask_mod: takes tensors of indices that broadcast; returns booleans, True for visible, of
            their shape or of one that broadcasts to it.

    Raises:
        TypeError: if it is not a function, or returns something other than booleans.
        ValueError: if the function raises, as `if` and `and` do of several queries and keys, or
            returns booleans of another shape.
        BeyondData: a `ValueError`, if it is evaluated at slots that its data does not cover.

    Examples:
        >>> from regard import Causal, Where
        >>> def every_other(b, h, q_idx, kv_idx):
        ...     return (q_idx - kv_idx) % 2 == 0
        >>> print((Causal() & Where(every_other)).draw(4))
        Causal() & Where(every_other)
          0 1 2 3
        0 ■ · · ·
        1 · ■ · ·
        2 ■ · ■ ·
        3 · ■ · ■
    """

    mask_mod: MaskMod
    opaque = True

    def __post_init__(self) -> None:
        if not callable(self.mask_mod) or isinstance(self.mask_mod, Tensor):
            raise TypeError(
                "Where takes a function (b, h, q_idx, kv_idx) -> bool, "
                f"got {described(self.mask_mod)}; a tensor goes in Dense(keep)"
            )

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        try:
            visible: object = self.mask_mod(b, h, q_idx, kv_idx)
        except (BeyondData, torch.OutOfMemoryError):
            raise
        except IndexError as error:
            raise BeyondData(
                f"{self!r} indexes data that does not cover these slots ({error}); with a cache, "
                "slots count from its first token: give data for all slots of the sequence"
            ) from error
        except MISTAKES as error:
            raise ValueError(
                f"{self!r} raised {type(error).__name__} ({error}); its function takes "
                "(b, h, q_idx, kv_idx), tensors with the indices of many queries and keys: "
                "combine comparisons with & | ~ and torch.where, not with and, or, not, if"
            ) from error
        if isinstance(visible, bool):
            return (kv_idx == kv_idx) & visible
        if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
            raise TypeError(
                f"{self!r} returns True where a query may attend, got {described(visible)}; "
                "compare to get booleans, or change scores with score_bias"
            )
        self._check_shape(visible, b, h, q_idx, kv_idx)
        return visible

    def _check_shape(self, visible: Tensor, *indices: Tensor) -> None:
        cells = torch.broadcast_shapes(*(each.shape for each in indices))
        last = cells[len(cells) - visible.dim() :] if visible.dim() <= len(cells) else None
        if last is None or any(
            have not in (1, want) for have, want in zip(visible.shape, last, strict=True)
        ):
            raise ValueError(
                f"{self!r} returned booleans of shape {list(visible.shape)} for indices that "
                f"broadcast to {list(cells)}; compare or index with the indices that it is given"
            )

    def __repr__(self) -> str:
        return f"Where({getattr(self.mask_mod, '__name__', repr(self.mask_mod))})"
