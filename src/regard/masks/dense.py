"""A mask that is a tensor: a boolean for each query and key of one call."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from regard.constants import Device
from regard.masks.mask import Mask, Reach
from regard.masks.row_data import TOKEN_MASKS, DataMask, at_row, clamped, described, on_cpu
from regard.masks.runs import (
    ALL,
    NONE,
    Finder,
    Runs,
    Shown,
    intersection,
    true_runs,
    union,
    unknown,
)
from regard.span import Span

HIDDEN_BELOW = -1e4  # additive masks hide with -inf, their dtype's lowest number, or this one
STRIP = 64  # queries whose keys are found together
Strip = tuple[Runs, Runs]  # of so many rows: columns that are True in some, and in all of them
_JOINED = 1.1  # times the cells of two strips that they may have together to be one block


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
    strips: list[Strip] = field(init=False)  # found once, for all the places of the mask
    lasting = False

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
        self._set(keep=keep, strips=[])

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
        return self._at(span)

    def reach(self, span: Span) -> Reach:
        place = self.place or span  # `within` will place it there
        return place.kv_start, place.kv_stop - 1

    def finder(self) -> Finder:
        """Queries see the keys of the strips that their rows lie in; without a row, none."""
        place = self.place
        if place is None or isinstance(place.q_start, Tensor) or not on_cpu(self.keep):
            return unknown
        start, strips = place.q_start, self._strips()
        repeated = self.keep.shape[-2] == 1

        def find(first: int, last: int) -> Shown:
            inside = start <= first and last <= place.last_query
            low, high = (0, 0) if repeated else (first - start, last - start)
            here = strips[max(0, low // STRIP) : max(0, high // STRIP + 1)]
            some = union(*(some for some, _ in here))
            every = reduce(intersection, (every for _, every in here), ALL)
            edges = (start + row for row in edges_of(strips))
            return Shown(self._slots(some), self._slots(every) if inside else NONE, edges)

        return find

    def _slots(self, columns: Runs) -> Runs:
        first, stop = self.extent.kv_start, self.extent.kv_stop
        if self.keep.shape[-1] == 1:  # broadcasts over the keys
            return [(first, stop)] if columns else NONE
        return [(low + first, high + first) for low, high in columns]

    def _strips(self) -> list[Strip]:
        if not self.strips:
            self.strips.extend(map(strip_of, self.keep.view(torch.uint8).split(STRIP, -2)))
        return self.strips

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
        return hash((Dense, id(vars(self).get("keep"))))  # compilers ask before `keep` is set


def _is_ragged(span: Span | None) -> bool:
    return span is not None and isinstance(span.q_start, Tensor)


def _first_row(place: Span, span: Span) -> int | None:
    """The row of the dense mask for the first query of `span`; None if a query has no row."""
    if _is_ragged(place) or _is_ragged(span):
        same = place.q_start is span.q_start and place.num_queries == span.num_queries
        return 0 if same else None
    first = span.first_query - place.first_query
    return first if first >= 0 and span.last_query <= place.last_query else None


def strip_of(rows: Tensor) -> Strip:
    """Columns that are True in some and in all rows, over all batch rows and heads."""
    axes = tuple(range(rows.dim() - 1))
    return true_runs(rows.amax(axes).bool()), true_runs(rows.amin(axes).bool())


def edges_of(strips: list[Strip]) -> Iterator[int]:
    """The rows whose visible keys differ from the row before: edges for blocks of queries.

    Examples:
        >>> keep = torch.zeros(256, 256, dtype=torch.bool)
        >>> keep[:128, :128] = keep[128:, 128:] = True
        >>> list(edges_of([strip_of(rows) for rows in keep.view(torch.uint8).split(STRIP)]))
        [128]
    """
    joined: Runs = []
    apart = rows = 0
    for index, (some, _) in enumerate(strips):
        both, apart = union(joined, some), apart + _length(some)
        rows += 1
        if rows * _length(both) > _JOINED * apart:
            yield index * STRIP
            both, apart, rows = some, _length(some), 1
        joined = both


def _length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)
