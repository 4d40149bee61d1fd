"""Which queries of a call are computed together, and which keys each such block needs.

Blocks begin where a rule begins to show other keys: at documents, chunks, the ends of padding. A
block in which nothing is hidden, or whose mask is causal, is one call of torch's kernel without a
mask, of any length; others have at most `BLOCK` queries.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import reduce
from itertools import groupby, pairwise
from operator import and_
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.masks import EVERYTHING, AllOf, Causal, Dense, Mask, Shown, Span
from regard.masks.row_data import row_masks
from regard.masks.runs import Runs, contains, intersection, without_gaps
from regard.ops.bias import ScoreBias
from regard.ops.call import Call, is_everything

BLOCK = 256  # queries: smaller blocks compute fewer hidden scores, larger start fewer operators
SHORT = 64  # queries: shorter pieces between edges are joined up to this many
GAP = 128  # hidden keys between visible ones that cost less to compute than to leave out
DIAGONAL = 512  # keys in a block of torch's CPU kernel: those on the diagonal are computed whole


ShownBy = tuple[Mask, Shown]  # a part of a mask, and the keys that it shows to a run of queries
ShownAt = Callable[[int, int], list[ShownBy]]  # from the first and the last slot of these queries


class Block(NamedTuple):
    """Some of the queries, the runs of keys that any of them may attend to, and the mask of these.

    Attributes:
        rows: first and last batch row, exclusive.
        first: the first query, counted from the call's first.
        queries: their number.
        runs: slots of keys.
        kv_start: the slot of the call's first key.
        mask: the parts of the rule that hide some of these keys from some of these queries.
        aligned: whether the first key has the slot of the first query.
    """

    rows: tuple[int, int]
    first: int
    queries: int
    runs: Runs
    kv_start: int
    mask: Mask
    aligned: bool

    @property
    def plain(self) -> bool:
        """Whether torch's kernel needs no mask: all keys are visible, or those up to the query."""
        causal = self.aligned and len(self.runs) == 1 and isinstance(self.mask, Causal)
        return causal or is_everything(self.mask)

    @property
    def num_keys(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    @property
    def cells(self) -> int:
        """The number of scores computed for a head, in all rows."""
        keys = self.num_keys
        if self.plain and not is_everything(self.mask):
            keys = min(keys, (keys + DIAGONAL) // 2)
        return (self.rows[1] - self.rows[0]) * self.queries * keys

    def of_queries(self, x: Tensor) -> Tensor:
        """A view of the block's queries in `x`, whose axis 2 has all queries of the call."""
        return self._rows_of(x).narrow(2, self.first, self.queries)

    def add_to_keys(self, x: Tensor, added: Tensor) -> None:
        """Add in place to the block's keys in `x`, whose axis 2 has all keys of the call."""
        for view, piece in zip(
            self.key_views(x), added.split([b - a for a, b in self.runs], 2), strict=True
        ):
            view.add_(piece)

    def key_views(self, x: Tensor) -> list[Tensor]:
        """Views of the block's keys in `x`, along axis 2: one for each run."""
        x = self._rows_of(x)
        return [x.narrow(2, start - self.kv_start, stop - start) for start, stop in self.runs]

    def _rows_of(self, x: Tensor) -> Tensor:
        first, stop = self.rows
        return x if (first, stop) == (0, x.shape[0]) else x.narrow(0, first, stop - first)


class Gathered:
    """Keys or values of one block after the other: a view, or runs copied side by side into memory
    that all blocks share. Each is valid until the next."""

    def __init__(self, x: Float[Tensor, "B G S D"], blocks: list[Block]) -> None:
        self.x = x
        most = max((block.num_keys for block in blocks if len(block.runs) > 1), default=0)
        self.memory = x.new_empty(x.shape[0], x.shape[1], most, x.shape[3])

    def of(self, block: Block) -> Float[Tensor, "b G R D"]:
        views = block.key_views(self.x)
        if len(views) == 1:
            return views[0]
        memory = self.memory[: len(views[0])].narrow(2, 0, block.num_keys)
        return torch.cat(views, 2, out=memory)


def plan(call: Call, size: int, *, whole: bool) -> list[Block]:
    """The blocks of a call, row by row and in order.

    Args:
        size: the most queries in a block.
        whole: whether plain blocks may be longer, and rows may have blocks of their own.
    """
    ragged = isinstance(call.span.q_start, Tensor)
    masks = row_masks(call.mask, call.batch) if whole and not ragged else [call.mask]
    if len(masks) == 1:
        return list(_blocks(call, masks[0], size, whole, (0, call.batch)))
    rows = [list(_blocks(call, mask, size, whole, (0, 1))) for mask in masks]
    blocks: list[Block] = []
    first = 0
    for equal, group in groupby(rows):
        stop = first + len(list(group))
        blocks += [block._replace(rows=(first, stop)) for block in equal]
        first = stop
    return blocks


def _blocks(
    call: Call, mask: Mask, size: int, whole: bool, rows: tuple[int, int]
) -> Iterator[Block]:
    shown = shown_by_parts(mask)
    for first, stop in pairwise(_cuts(call, shown)):
        block = _block(call, shown, first, stop, rows)
        if stop - first <= size or (whole and block.plain):
            yield block
            continue
        for start in range(first, stop, size):
            yield _block(call, shown, start, min(start + size, stop), rows)


def _cuts(call: Call, shown: ShownAt) -> list[int]:
    """The first queries of pieces between edges of the rule, and the number of queries."""
    span = call.span
    if isinstance(span.q_start, Tensor):
        return [0, call.num_queries]
    cuts, last = [0], 0
    first, stop = span.q_start, span.q_start + call.num_queries
    parts = [each.edges_between(first, stop) for _, each in shown(first, stop - 1)]
    edges = {slot - first for inside in parts for slot in inside}
    for edge in [*sorted(edges), call.num_queries]:
        if edge - cuts[-1] > SHORT and last > cuts[-1]:
            cuts.append(last)
        last = edge
    return [*cuts, call.num_queries]


def _block(call: Call, shown: ShownAt, first: int, stop: int, rows: tuple[int, int]) -> Block:
    span = call.span
    low, high = span.first_query + first, span.last_query - call.num_queries + stop
    parts = shown(low, high)
    some = reduce(intersection, [each.some for _, each in parts], [(span.kv_start, span.kv_stop)])
    runs = without_gaps(some, GAP)
    rest = hiding(parts, runs)
    aligned = not isinstance(span.q_start, Tensor) and bool(runs) and runs[0][0] == low
    return Block(rows, first, stop - first, runs, span.kv_start, rest, aligned)


def shown_by_parts(mask: Mask) -> ShownAt:
    """A function that finds what each part of an intersection shows to the queries `first..last`;
    for the blocks of one call, since data may change later."""
    parts = mask.parts if isinstance(mask, AllOf) else (mask,)
    finders = [(part, part.finder()) for part in parts]
    return lambda first, last: [(part, find(first, last)) for part, find in finders]


def hiding(shown: Iterable[ShownBy], runs: Runs) -> Mask:
    """The intersection of the parts that hide some of these keys from some of the queries.

    Examples:
        >>> from regard.masks import Causal, Chunked
        >>> hiding(shown_by_parts(Causal() & Chunked(4))(4, 7), [(4, 8)])
        Causal()
    """
    parts = [
        part
        for part, each in shown
        if not all(contains(each.every, start, stop) for start, stop in runs)
    ]
    return reduce(and_, parts) if parts else EVERYTHING


def part_of(call: Call, block: Block) -> Call:
    """The call of a block: the block's queries, and the keys of its runs concatenated."""
    rows = block.rows[1] - block.rows[0]
    bias = _bias(call, block)
    parts = []
    for start, stop in block.runs or [(call.span.kv_start,) * 2]:
        span = call.span.part(block.first, block.first + block.queries, start, stop)
        mask = block.mask.within(span)
        parts.append(call.but(batch=rows, span=span, mask=mask, score_bias=bias))
    return parts[0] if len(parts) == 1 else _concatenated(parts)


def _bias(call: Call, block: Block) -> Tensor | ScoreBias | None:
    bias = call.score_bias
    if not isinstance(bias, Tensor):
        return bias
    if bias.dim() >= 2 and bias.shape[-2] != 1:
        bias = bias.narrow(-2, block.first, block.queries)
    if bias.dim() == 4 and bias.shape[0] != 1:
        bias = bias[block.rows[0] : block.rows[1]]
    return bias


def _concatenated(parts: list[Call]) -> Call:
    """One call for several runs of keys, whose masks and biases are concatenated as tensors."""
    call = parts[0]
    span = Span(0, call.num_queries, 0, sum(part.num_keys for part in parts))
    widths = [part.num_keys for part in parts]
    mask: Mask = EVERYTHING
    if not all(is_everything(part.mask) for part in parts):
        mask = Dense(_side_by_side([part.keep() for part in parts], widths)).within(span)
    biases = [bias for part in parts if (bias := part.bias()) is not None]
    bias = _side_by_side(biases, widths) if biases else None
    return replace(call, span=span, given_span=span, mask=mask, score_bias=bias)


def _side_by_side(pieces: list[Tensor], widths: list[int]) -> Tensor:
    """Concatenate along the keys tensors that broadcast to `[B, H, L, S]`."""
    leading = torch.broadcast_shapes(*(piece.shape[:-1] for piece in pieces))
    wide = zip(pieces, widths, strict=True)
    return torch.cat([piece.expand(*leading, width) for piece, width in wide], dim=-1)
