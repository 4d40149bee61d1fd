"""Rules: which keys a query may attend to, by position, by a boolean tensor, or by any function.

Constructors read tensors once; `within` reads none, so that no call waits for a device.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.constants import Device
from regard.masks.algebra import EVERYTHING, NOTHING, Mask, Reach
from regard.masks.row_data import (
    TOKEN_MASKS,
    DataMask,
    at_row,
    check_size,
    clamped,
    described,
)
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
HIDDEN_BELOW = -1e4  # additive masks hide with -inf, their dtype's lowest number, or this one


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

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx

    def within(self, span: Span) -> Mask:
        if span.first_query >= span.kv_stop - 1:
            return EVERYTHING
        return NOTHING if span.last_query < span.kv_start else self

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

    def __post_init__(self) -> None:
        check_size("SlidingWindow", self.size, "a window of 1 is the query's own key alone")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx > q_idx - self.size

    def within(self, span: Span) -> Mask:
        if torch.compiler.is_exporting():  # the exported program must hold for every length
            return self
        if span.kv_start > span.last_query - self.size:
            return EVERYTHING
        return NOTHING if span.kv_stop - 1 <= span.first_query - self.size else self

    def reach(self, span: Span) -> Reach:
        return max(0, span.first_query - self.size + 1), None

    def _hidden_keys(self, b: int, q: int, k: int) -> str:
        return f"keys {self.size} or more before the query ({q} - {k} = {q - k})"


@dataclass(frozen=True, eq=False, repr=False)
class Dense(DataMask):
    """A dense mask: a boolean for each query and key of one call.

    `within(span)` places it at the slots of `span`; other keys are hidden.

    Args:
        keep: `[L, S]`, `[B, L, S]` or `[B, H, L, S]` booleans, True where a query may attend; axes
            of size 1 broadcast.
        place: the slots of its queries and keys; from slot 0 if None. Set by `within`.

    Raises:
        TypeError: if `keep` is not boolean, because its meaning would be ambiguous.
        ValueError: if it has fewer than two dimensions or more than four, or if `within` is called
            with a span of another size.

    Examples:
        >>> import torch
        >>> from regard import Dense, Span
        >>> print(Dense(torch.eye(2).bool()).within(Span(4, 6, 0, 2)).draw())
        Dense(keep=<[2, 2] bool>)
          0 1
        4 ■ ·
        5 · ■
    """

    keep: Tensor
    place: Span | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        keep = self.keep
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
            raise TypeError(
                f"Dense takes booleans, True where a query may attend, got {described(keep)}; for "
                "0 and -inf there is Dense.from_additive(t), for a mask of tokens Padding(valid): "
                + TOKEN_MASKS
            )
        if not 2 <= keep.dim() <= 4:
            raise ValueError(
                "Dense takes [L, S], [B, L, S] or [B, H, L, S], "
                f"got shape {tuple(keep.shape)}; a mask of tokens is Padding(valid)"
            )
        keep = keep.unsqueeze(1) if keep.dim() == 3 else keep
        if not torch.compiler.is_compiling() and keep.is_inference():
            keep = keep.clone()  # else the tensor itself, which may be large
        self._watch([keep])
        self._set(keep=keep)

    @classmethod
    def from_additive(cls, t: Tensor) -> "Dense":
        """From a mask that is added to scores: 0 is visible, -1e4 and below is hidden.

        Raises:
            TypeError: if `t` is not floating point.
            ValueError: if it has other values; `split_additive(t)` returns `(mask, score_bias)`.

        Examples:
            >>> Dense.from_additive(torch.tensor([[0.0, -torch.inf]])).keep
            tensor([[ True, False]])
        """
        if not isinstance(t, Tensor) or not t.is_floating_point():
            raise TypeError(
                f"an additive mask is floating point, got {described(t)}; Dense(keep) takes "
                "booleans, True where a query may attend"
            )
        threshold = torch.tensor(HIDDEN_BELOW, dtype=t.dtype, device="cpu")  # bfloat16: -9984
        hidden = t <= threshold
        if not bool((hidden | (t == 0)).all()):
            raise ValueError(
                "an additive mask holds 0 (visible) or -1e4 and below (hidden), got other values "
                "too: it also changes scores; use mask, score_bias = split_additive(t)"
            )
        return cls(~hidden)

    @property
    def batch(self) -> int | None:
        return self.keep.shape[0] if self.keep.dim() == 4 else None

    @property
    def heads(self) -> int | None:
        return self.keep.shape[1] if self.keep.dim() == 4 else None

    @property
    def extent(self) -> Span:
        if self.place is not None:
            return self.place
        return Span(0, self.keep.shape[-2], 0, self.keep.shape[-1])

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        self._check_unchanged()
        keep, extent = self.keep.to(kv_idx.device), self.extent
        first = extent.q_start
        rows = q_idx - (at_row(first, b) if isinstance(first, Tensor) else first)
        columns = kv_idx - extent.kv_start
        inside = (rows >= 0) & (rows < extent.num_queries)
        inside = inside & (columns >= 0) & (columns < extent.num_keys)
        index = [clamped(rows, keep.shape[-2]), clamped(columns, keep.shape[-1])]
        if keep.dim() == 4:
            index = [clamped(b, keep.shape[0]), clamped(h, keep.shape[1]), *index]
        return inside & keep[tuple(index)]

    def within(self, span: Span) -> Mask:
        self._check_unchanged()
        if self.place is not None:
            return self
        sizes, given = (span.num_queries, span.num_keys), tuple(self.keep.shape[-2:])
        if any(mine != size and mine != 1 for mine, size in zip(given, sizes, strict=True)):
            raise ValueError(
                f"Dense(keep) has a value for each query and key of a call, here {list(sizes)}, "
                f"got shape {list(self.keep.shape)}; with a cache, the cached keys count, too"
            )
        placed = copy(self)  # with the same `versions`, by which its data is memoised
        placed._set(place=span)
        return placed

    def reach(self, span: Span) -> Reach:
        place = self.place or span  # `within` will place it there
        return place.kv_start, place.kv_stop - 1

    def _dense(self, span: Span, batch: int, heads: int, device: Device) -> Tensor:
        """A slice of the tensor, without indexing, where it contains the span."""
        self._check_unchanged()
        extent, keep = self.extent, self.keep if device is None else self.keep.to(device)
        first = _first_row(extent, span)
        column = span.kv_start - extent.kv_start
        if first is None or column < 0 or span.kv_stop > extent.kv_stop:
            return super()._dense(span, batch, heads, device)
        if keep.shape[-2] != 1:
            keep = keep.narrow(-2, first, span.num_queries)
        if keep.shape[-1] != 1:
            keep = keep.narrow(-1, column, span.num_keys)
        return keep.expand(*keep.shape[:-2], span.num_queries, span.num_keys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Dense) or self.keep is not other.keep:
            return False
        if self.versions.numbers != other.versions.numbers:
            return False
        mine, its = self.place, other.place
        return mine is its or (not _is_ragged(mine) and not _is_ragged(its) and mine == its)

    def __hash__(self) -> int:
        return hash((Dense, id(self.keep)))


def _is_ragged(span: Span | None) -> bool:
    return span is not None and isinstance(span.q_start, Tensor)


def _first_row(place: Span, span: Span) -> int | None:
    """The row of the dense mask for the first query of `span`; None if a query has no row."""
    if _is_ragged(place) or _is_ragged(span):
        same = place.q_start is span.q_start and place.num_queries == span.num_queries
        return 0 if same else None
    first = span.first_query - place.first_query
    return first if first >= 0 and span.last_query <= place.last_query else None


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

    def __post_init__(self) -> None:
        if not callable(self.mask_mod) or isinstance(self.mask_mod, Tensor):
            raise TypeError(
                "Where takes a function (b, h, q_idx, kv_idx) -> bool, "
                f"got {described(self.mask_mod)}; a tensor goes in Dense(keep)"
            )

    @property
    def opaque(self) -> bool:
        return True

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
