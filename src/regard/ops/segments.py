"""Bands of keys, and segments of tokens: the masks that FlashAttention takes without a tensor."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.masks import EVERYTHING, AllOf, Documents, Mask, Padding, Span
from regard.masks.row_data import may_read
from regard.masks.runs import FAR, NEAR
from regard.ops.call import Call
from regard.ops.mask_tensors import make_once

UNLIMITED = -1  # FlashAttention's number of keys on one side of a query, if these are all


class Band(NamedTuple):
    """The keys around a query that it may attend to, where the last query is beside the last key.

    Attributes:
        left: keys before its own; -1 for all.
        right: keys after its own; -1 for all.
    """

    left: int
    right: int


class Segments(NamedTuple):
    """Tokens of a batch, row after row, in pieces that attend to themselves alone.

    Attributes:
        ends: `[n + 1]`, int32: 0, and the number of tokens up to the end of each segment.
        longest: tokens of the longest one.
        tokens: `[T]`, the place of each token among the `B * L` of the batch; None if these are
            all. A token in no segment is padding.
    """

    ends: Int[Tensor, " n_and_1"]
    longest: int
    tokens: Int[Tensor, " T"] | None


class Region(NamedTuple):
    """A mask as FlashAttention takes it.

    Attributes:
        band: the keys of a query, within its segment.
        segments: of the tokens; None if each row of the batch is one, from its first key on.
    """

    band: Band
    segments: Segments | None


def region_of(call: Call) -> Region | None:
    """The mask of a call as a band of keys, or a band in segments; None if it is neither.

    Reads the ids of documents and the padding once for all layers of a pass.

    Examples:
        >>> import torch
        >>> from regard import Causal, SlidingWindow, Span, prepare
        >>> q, k = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 9, 8)
        >>> window = Causal() & SlidingWindow(4)
        >>> region_of(prepare(q, k, k, mask=window, span=Span(6, 9, 0, 9)).call).band
        Band(left=3, right=0)
    """
    span = call.span
    if isinstance(span.q_start, Tensor) or isinstance(span.q_stop, Tensor):
        return None
    parts = call.mask.parts if isinstance(call.mask, AllOf) else (call.mask,)
    data = [part for part in parts if isinstance(part, Documents | Padding)]
    shift = 0 if data else span.kv_stop - span.q_stop
    band = _band([part for part in parts if part not in data], shift)
    if band is None or not data:
        return None if band is None else Region(band, None)
    square = (span.q_start, span.q_stop) == (span.kv_start, span.kv_stop)
    if not square or not all(_is_readable(part) for part in data):
        return None
    others = call.batch, call.device, "segments"
    segments = make_once(call.mask, span, lambda: _segments(data, span, *others[:2]), *others)
    padded = any(isinstance(part, Padding) for part in data)
    return None if segments is None or (padded and band.right != 0) else Region(band, segments)


def _band(rules: list[Mask], shift: int) -> Band | None:
    """The keys that all rules show, if each shows one run of keys that depends on the distance
    alone; `shift` is the slot of the last key after that of the last query."""
    low, high = NEAR, FAR
    for rule in rules:
        if rule == EVERYTHING:
            continue
        shown = rule.runs(0, 0) if rule.relative else None
        if shown is None or len(shown.some) != 1 or shown.some != shown.every:
            return None
        low, high = max(low, shown.some[0][0]), min(high, shown.some[0][1])
    left = UNLIMITED if low == NEAR else shift - low
    right = UNLIMITED if high == FAR else high - 1 - shift
    limits = [(left, low != NEAR), (right, high != FAR)]
    return None if any(limited and keys < 0 for keys, limited in limits) else Band(left, right)


def _is_readable(part: Documents | Padding) -> bool:
    data = part.ids if isinstance(part, Documents) else part.valid
    return part.place is None and 0 not in data.shape and may_read(data)


def _segments(
    parts: list[Documents | Padding], span: Span, batch: int, device: torch.device
) -> Segments | None:
    """The segments of square calls; None if a document lies in several pieces, or a row has
    padding after a real token."""
    slots = torch.arange(span.kv_start, span.kv_stop, device=device)
    begins = torch.zeros(batch, len(slots), dtype=torch.bool, device=device)
    begins[:, :1] = True
    real, fits = torch.ones_like(begins), torch.ones((), dtype=torch.bool, device=device)
    for part in parts:
        if isinstance(part, Documents):
            ids = part.ids.to(device)[:, slots.clamp(max=part.ids.shape[1] - 1)]
            changed = ids[:, 1:] != ids[:, :-1]
            begins[:, 1:] |= changed
            fits &= (changed.sum(1) == (ids.sort(1).values.diff(dim=1) != 0).sum(1)).all()
        else:
            known = part.valid.shape[1]
            valid = part.valid.to(device)[:, slots.clamp(max=known - 1)] | (slots >= known)
            fits &= (valid[:, 1:] >= valid[:, :-1]).all()
            begins[:, 1:] |= valid[:, 1:] != valid[:, :-1]
            real &= valid
    return _packed(begins, real) if bool(fits) else None


def _packed(begins: Bool[Tensor, "B L"], real: Bool[Tensor, "B L"]) -> Segments:
    """Segments from where they begin, and from which tokens are real."""
    tokens = real.flatten().nonzero().squeeze(1)
    starts = (begins & real).flatten()[tokens].nonzero().squeeze(1)
    ends = torch.cat([starts, starts.new_tensor([len(tokens)])])
    longest = int(ends.diff().max()) if len(starts) else 0
    return Segments(ends.to(torch.int32), longest, None if len(tokens) == real.numel() else tokens)
