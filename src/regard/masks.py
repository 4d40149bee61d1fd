"""The rules: which keys a query may see, by place, by data, or by any function.

Constructors read their data once; `within` never does, so nothing here waits for a device.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard.algebra import (
    EVERYTHING,
    NOTHING,
    AllOf,
    AnyOf,
    Everything,
    Mask,
    Not,
    Nothing,
    Reach,
)
from regard.masks_data import Chunked, Documents, Padding, Prefix
from regard.rows import clip, code, kind, positive, row
from regard.span import Span

__all__ = [
    "EVERYTHING",
    "NOTHING",
    "AllOf",
    "AnyOf",
    "Causal",
    "Chunked",
    "Dense",
    "Documents",
    "Everything",
    "Mask",
    "Not",
    "Nothing",
    "Padding",
    "Prefix",
    "SlidingWindow",
    "Span",
    "Where",
]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
HIDDEN_BELOW = -1e4  # a mask's "minus infinity" may be its dtype's lowest number, or this


@dataclass(frozen=True)
class Causal(Mask):
    """No key after the query: `kv <= q`."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx

    def within(self, span: Span) -> Mask:
        if span.first_query >= span.kv_stop - 1:
            return EVERYTHING
        return NOTHING if span.last_query < span.kv_start else self

    def reach(self, span: Span) -> Reach:
        return 0, span.last_query


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """The `size` newest keys, counting the query's own: a window of 1 sees only itself.

    Does not hide what comes after the query; combine it with `Causal()`.

    Raises:
        ValueError: if `size` is below 1.
    """

    size: int

    def __post_init__(self) -> None:
        positive("SlidingWindow", "it counts the query's own key", self.size)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx > q_idx - self.size

    def within(self, span: Span) -> Mask:
        if span.kv_start > span.last_query - self.size:
            return EVERYTHING
        return NOTHING if span.kv_stop - 1 <= span.first_query - self.size else self

    def reach(self, span: Span) -> Reach:
        return max(0, span.first_query - self.size + 1), None


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """This call's rectangle, cell by cell.

    Args:
        keep: `[L, S]`, `[B, L, S]` or `[B, H, L, S]` booleans, True where a query may look; axes of
            size 1 broadcast.

    Raises:
        TypeError: if `keep` is not boolean, and so has no agreed polarity.
        ValueError: if it has fewer than two dimensions or more than four, or, once placed, if it is
            not the size of the call.
    """

    keep: Tensor
    place: Span | None = field(default=None)

    def __post_init__(self) -> None:
        keep = self.keep
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
            raise TypeError(
                f"Dense takes booleans, True where a query may look, got {kind(keep)}; for 0 and "
                "-inf there is Dense.from_additive(t), for a 2-D 0/1 mask of tokens Padding(valid)"
            )
        if not 2 <= keep.dim() <= 4:
            raise ValueError(
                "Dense takes [L, S], [B, L, S] or [B, H, L, S], "
                f"got shape {tuple(keep.shape)}; a mask of tokens is Padding(valid)"
            )
        if keep.dim() == 3:
            object.__setattr__(self, "keep", keep.unsqueeze(1))

    @classmethod
    def from_additive(cls, t: Tensor) -> "Dense":
        """From a mask that is added to scores: 0 shows, -1e4 and below hides.

        Raises:
            ValueError: if it holds other values; `split_additive(t)` gives `(mask, score_bias)`.
        """
        hidden = t <= torch.tensor(HIDDEN_BELOW, dtype=t.dtype)  # bfloat16 holds -9984 for it
        if not bool((hidden | (t == 0)).all()):
            raise ValueError(
                "an additive mask holds 0 (visible) or -1e4 and below (hidden), got other values "
                "too: it also changes scores; use mask, score_bias = split_additive(t)"
            )
        return cls(~hidden)

    @property
    def batch(self) -> int | None:
        return self.keep.shape[0] if self.keep.dim() == 4 else None

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        keep = self.keep.to(kv_idx.device)
        rows = q_idx - self._first(b, q_idx.device)
        columns = kv_idx - (0 if self.place is None else self.place.kv_start)
        index = [clip(rows, keep.shape[-2]), clip(columns, keep.shape[-1])]
        if keep.dim() == 4:
            index = [clip(b, keep.shape[0]), clip(h, keep.shape[1]), *index]
        return keep[tuple(index)]

    def _first(self, b: Tensor, device: torch.device) -> int | Tensor:
        start = 0 if self.place is None else self.place.q_start
        return row(start, b).to(device) if isinstance(start, Tensor) else start

    def within(self, span: Span) -> Mask:
        if self.place is not None:
            return self
        want, got = (span.num_queries, span.num_keys), tuple(self.keep.shape[-2:])
        if any(have not in (1, size) for have, size in zip(got, want, strict=True)):
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
        place = self.place
        same = (place is not None and place.q_start is span.q_start) or (
            place is not None
            and not isinstance(place.q_start, Tensor)
            and not isinstance(span.q_start, Tensor)
            and place.q_start == span.q_start
        )
        if place is None or not same or place.num_queries != span.num_queries:
            return super()._dense(span, batch, heads, device)
        keep = self.keep if device is None else self.keep.to(device)
        if keep.shape[-1] != 1:
            keep = keep.narrow(-1, span.kv_start - place.kv_start, span.num_keys)
        return keep.expand(*keep.shape[:-2], span.num_queries, span.num_keys)

    def __repr__(self) -> str:
        return code("Dense", keep=self.keep)


@dataclass(frozen=True)
class Where(Mask):
    """Any function `(b, h, q_idx, kv_idx) -> bool`: a FlexAttention `mask_mod`.

    Raises:
        TypeError: if it is not a function.
    """

    mask_mod: MaskMod

    def __post_init__(self) -> None:
        if not callable(self.mask_mod):
            raise TypeError(
                "Where takes a function (b, h, q_idx, kv_idx) -> bool, "
                f"got {kind(self.mask_mod)}; a tensor goes in Dense(keep)"
            )

    @property
    def opaque(self) -> bool:
        return True

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.mask_mod(b, h, q_idx, kv_idx)

    def __repr__(self) -> str:
        return f"Where({getattr(self.mask_mod, '__name__', repr(self.mask_mod))})"
