"""The rules: which keys a query may see, by place, by data, or by any function.

Constructors read their data once; `within` never does, so nothing here waits for a device.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard.masks.algebra import (
    EVERYTHING,
    NOTHING,
    Mask,
    Reach,
)
from regard.masks.row_data import (
    TOKENS_SAY,
    check_unchanged,
    clip,
    code,
    kind,
    lasting,
    positive,
    row,
)
from regard.span import Span
from regard.versions import Versions


class BeyondData(ValueError):
    """A rule was asked about slots that its data does not cover."""


MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
HIDDEN_BELOW = -1e4  # a mask's "minus infinity" may be its dtype's lowest number, or this


@dataclass(frozen=True)
class Causal(Mask):
    """No key after the query: `kv <= q`.

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

    def _hides(self, b: int, q: int, k: int) -> str:
        return f"keys after the query ({k} > {q})"


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """The `size` newest keys, counting the query's own: a window of 1 sees only itself.

    Does not hide what comes after the query; combine it with `Causal()`.

    Raises:
        ValueError: if `size` is below 1.

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
        positive("SlidingWindow", "a window of 1 sees the query's own key alone", self.size)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx > q_idx - self.size

    def within(self, span: Span) -> Mask:
        if torch.compiler.is_exporting():  # one program serves every length
            return self
        if span.kv_start > span.last_query - self.size:
            return EVERYTHING
        return NOTHING if span.kv_stop - 1 <= span.first_query - self.size else self

    def reach(self, span: Span) -> Reach:
        return max(0, span.first_query - self.size + 1), None

    def _hides(self, b: int, q: int, k: int) -> str:
        return f"keys {self.size} or more before the query ({q} - {k} = {q - k})"


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """This call's rectangle, cell by cell: its queries by the keys they meet.

    `within(span)` places it at those slots; outside them it shows nothing. Until then it stands at
    slot 0.

    Args:
        keep: `[L, S]`, `[B, L, S]` or `[B, H, L, S]` booleans, True where a query may look; axes of
            size 1 broadcast.

    Raises:
        TypeError: if `keep` is not boolean, and so has no agreed polarity.
        ValueError: if it has fewer than two dimensions or more than four, or, once placed, if it is
            not the size of the call.

    >>> print(Dense(torch.eye(2).bool()).within(Span(4, 6, 0, 2)).draw())
    Dense(keep=<[2, 2] bool>)
      0 1
    4 ■ ·
    5 · ■
    """

    keep: Tensor
    place: Span | None = field(default=None, kw_only=True)
    read: Versions = field(init=False)

    def __post_init__(self) -> None:
        keep = self.keep
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
            raise TypeError(
                f"Dense takes booleans, True where a query may look, got {kind(keep)}; for 0 and "
                "-inf there is Dense.from_additive(t), for a mask of tokens Padding(valid): "
                + TOKENS_SAY
            )
        if not 2 <= keep.dim() <= 4:
            raise ValueError(
                "Dense takes [L, S], [B, L, S] or [B, H, L, S], "
                f"got shape {tuple(keep.shape)}; a mask of tokens is Padding(valid)"
            )
        object.__setattr__(self, "keep", lasting(keep.unsqueeze(1) if keep.dim() == 3 else keep))
        object.__setattr__(self, "read", Versions(self.keep))

    @classmethod
    def from_additive(cls, t: Tensor) -> "Dense":
        """From a mask that is added to scores: 0 shows, -1e4 and below hides.

        Raises:
            TypeError: if `t` is not floating point.
            ValueError: if another value occurs; `split_additive(t)` gives `(mask, score_bias)`.
        """
        if not isinstance(t, Tensor) or not t.is_floating_point():
            raise TypeError(
                f"an additive mask is floating point, got {kind(t)}; Dense(keep) takes booleans, "
                "True where a query may look"
            )
        hidden = t <= torch.tensor(
            HIDDEN_BELOW, dtype=t.dtype, device="cpu"
        )  # bfloat16 holds -9984 for it
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
        check_unchanged(self, self.read)
        keep, extent = self.keep.to(kv_idx.device), self.extent
        first = extent.q_start
        rows = q_idx - (row(first, b) if isinstance(first, Tensor) else first)
        columns = kv_idx - extent.kv_start
        inside = (rows >= 0) & (rows < extent.num_queries)
        inside = inside & (columns >= 0) & (columns < extent.num_keys)
        index = [clip(rows, keep.shape[-2]), clip(columns, keep.shape[-1])]
        if keep.dim() == 4:
            index = [clip(b, keep.shape[0]), clip(h, keep.shape[1]), *index]
        return inside & keep[tuple(index)]

    def within(self, span: Span) -> Mask:
        check_unchanged(self, self.read)
        if self.place is not None:
            return self
        want, got = (span.num_queries, span.num_keys), tuple(self.keep.shape[-2:])
        if any(have != size and have != 1 for have, size in zip(got, want, strict=True)):
            raise ValueError(
                f"Dense(keep) is this call's rectangle of [L, S] = {list(want)} queries by keys, "
                f"got shape {list(self.keep.shape)}; with a cache, S counts the past too"
            )
        return replace(self, place=span)

    def reach(self, span: Span) -> Reach:
        return (0, None) if self.place is None else (self.place.kv_start, self.place.kv_stop - 1)

    def _dense(
        self, span: Span, batch: int, heads: int, device: torch.device | str | None
    ) -> Tensor:
        """Slices of the rectangle where it holds the span, so that nothing is looked up."""
        check_unchanged(self, self.read)
        extent, keep = self.extent, self.keep if device is None else self.keep.to(device)
        first = _first_row(extent, span)
        column = span.kv_start - extent.kv_start
        beside = column < 0 or span.kv_stop > extent.kv_stop
        if first is None or beside:
            return super()._dense(span, batch, heads, device)
        if keep.shape[-2] != 1:
            keep = keep.narrow(-2, first, span.num_queries)
        if keep.shape[-1] != 1:
            keep = keep.narrow(-1, column, span.num_keys)
        return keep.expand(*keep.shape[:-2], span.num_queries, span.num_keys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Dense) or self.keep is not other.keep:
            return False
        mine, its = self.place, other.place
        return mine is its or (not _is_ragged(mine) and not _is_ragged(its) and mine == its)

    def __hash__(self) -> int:
        return hash((Dense, id(self.keep)))

    def __repr__(self) -> str:
        return code("Dense", keep=self.keep)


def _is_ragged(span: Span | None) -> bool:
    return span is not None and isinstance(span.q_start, Tensor)


def _first_row(place: Span, span: Span) -> int | None:
    """Which row of the placed rectangle the span's queries begin at; None if they leave it."""
    if _is_ragged(place) or _is_ragged(span):
        same = place.q_start is span.q_start and place.num_queries == span.num_queries
        return 0 if same else None
    first = span.first_query - place.first_query
    return first if first >= 0 and span.last_query <= place.last_query else None


@dataclass(frozen=True)
class Where(Mask):
    """Any function `(b, h, q_idx, kv_idx) -> bool`: a FlexAttention `mask_mod`.

    Raises:
        TypeError: if it is not a function, or answers with something other than booleans.
        BeyondData: a `ValueError`, when it is asked about slots that its data does not reach.

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
                f"got {kind(self.mask_mod)}; a tensor goes in Dense(keep)"
            )

    @property
    def opaque(self) -> bool:
        return True

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        try:
            seen: object = self.mask_mod(b, h, q_idx, kv_idx)
        except IndexError as error:
            raise BeyondData(
                f"{self!r} indexes data that does not reach these slots ({error}); with a cache, "
                "slots count from its first token: give the data of every slot there will be"
            ) from error
        if isinstance(seen, bool):
            return (kv_idx == kv_idx) & seen
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            raise TypeError(
                f"{self!r} answers True where a query may look, got {kind(seen)}; "
                "compare to get booleans, scores are changed by score_bias"
            )
        return seen

    def __repr__(self) -> str:
        return f"Where({getattr(self.mask_mod, '__name__', repr(self.mask_mod))})"
