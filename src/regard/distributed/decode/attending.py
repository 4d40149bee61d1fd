"""Attention to the tokens that one rank stores, which are some of the slots of the sequence.

Keys that every query may attend to need no mask, so that pages which lie side by side in the
storage are one call of a backend. The others are one call with a mask made for their slots.
"""

import torch
from torch import Tensor

from regard.cache import Part
from regard.cache.parts import storage_of
from regard.constants import accumulating_dtype
from regard.distributed.decode.slots import Segment, Slots
from regard.masks import EVERYTHING, Dense, Mask, Span
from regard.masks.runs import Runs, complement, intersection
from regard.ops.backends import BACKENDS
from regard.ops.blocks import Block, part_of
from regard.ops.call import Call, is_everything
from regard.ops.choose import choose, objection_of
from regard.ops.partial import Partial, merge
from regard.ops.parts import attend_part
from regard.ops.prepared import Prepared
from regard.tracing import without_autocast

_ROWS = 256  # query rows of a key head in a block: `grouped` takes so many, by torch's flash kernel
_QUERIES = 32  # in a block at least: fewer are not worth starting the operators
_CELLS = 1 << 22  # of a bias: 16 MB in float32


def attend_locally(prepared: Prepared, q: Tensor, part: Part, slots: Slots, rank: int) -> Partial:
    """Attention of all queries `[B, H, L, D]` to this rank's tokens, stored at 0 and on as `slots`
    says.

    The backend of the call over all slots runs the pieces that it can run; the cheapest runs the
    others.
    """
    with without_autocast(prepared.call.device):
        prepared = prepared.stored_as(storage_of([part]))
        call = prepared.call.but(joined=len(part.streams) == 1)
        if _shows_all(call):
            whole = call.at(Span(0, call.num_queries, 0, part.kv_stop))
            return _attended(prepared.name, whole, q, part)
        size, found = _block_size(call), []
        for first in range(0, call.num_queries, size):
            queries = range(first, min(first + size, call.num_queries))
            parts = _parts(call, queries, part, slots, rank)
            rows = q.narrow(2, first, len(queries))
            every = [_attended(prepared.name, over, rows, keys) for over, keys in parts]
            every = every or [nothing(call, len(queries))]
            found.append(merge(*every) if len(every) > 1 else every[0])
    if len(found) == 1:
        return found[0]
    return Partial(torch.cat([out for out, _ in found], 2), torch.cat([lse for _, lse in found], 2))


def _shows_all(call: Call) -> bool:
    """Whether every query may attend to every key, and scores do not depend on slots."""
    return (
        is_everything(call.mask)
        and call.num_keys == call.given_span.num_keys
        and not _has_columns(call)
    )


def _has_columns(call: Call) -> bool:
    """Whether the score bias differs between keys."""
    bias = call.score_bias
    if isinstance(bias, Tensor):
        return bias.dim() > 0 and bias.shape[-1] != 1
    return bias is not None


def _block_size(call: Call) -> int:
    """The number of queries in a block: keys that are hidden from the whole block are skipped."""
    size = max(_QUERIES, _ROWS // call.group)
    if _has_columns(call):
        size = min(size, max(1, _CELLS // (call.batch * call.num_heads * max(1, call.num_keys))))
    return size


def _parts(
    call: Call, queries: range, part: Part, slots: Slots, rank: int
) -> list[tuple[Call, Part]]:
    """The segments of a rank's storage that some queries may attend to, and the calls over them."""
    return [
        (_over(call, queries, segment, mask), part.narrow(segment.start, segment.stop))
        for runs, mask in _visible(call, queries)
        for segment in slots.segments(rank, runs)
    ]


def _visible(call: Call, queries: range) -> list[tuple[Runs, Mask]]:
    """Slots visible to all of the queries, which need no mask, and the others visible to some."""
    keys = call.span.kv_start, call.span.kv_stop
    span = call.span.part(queries.start, queries.stop, *keys)
    some, every, _ = call.mask.finder()(span.first_query, span.last_query)
    some = intersection(some, [keys])
    every = intersection(some, every)
    return [(every, EVERYTHING), (intersection(some, complement(every)), call.mask)]


def _over(call: Call, queries: range, segment: Segment, mask: Mask) -> Call:
    """Describe attention of some queries to one segment's keys, whose slots may have gaps."""
    span = Span(0, len(queries), 0, segment.stop - segment.start)
    if mask is EVERYTHING and call.score_bias is None:
        return call.but(span=span, given_span=span, mask=mask)
    rows, runs, first = (0, call.batch), segment.runs, call.span.kv_start
    hull = [(runs[0][0], runs[-1][1])]
    placed = part_of(
        call, Block(rows, queries.start, len(queries), hull, first, mask, aligned=False)
    )
    if len(runs) == 1:
        return placed
    columns = torch.cat([torch.arange(*run) for run in runs]) - runs[0][0]
    keep: Mask = EVERYTHING
    if not is_everything(placed.mask):
        keep = Dense(_at(placed.keep(), columns)).within(span)
    bias = placed.bias()
    bias = None if bias is None else _at(bias, columns)
    return placed.but(span=span, given_span=span, mask=keep, score_bias=bias)


def _at(x: Tensor, columns: Tensor) -> Tensor:
    return x if x.dim() == 0 or x.shape[-1] == 1 else x.index_select(-1, columns.to(x.device))


def _attended(name: str, call: Call, q: Tensor, part: Part) -> Partial:
    """Attention to one part, by the backend of that name if it can run it."""
    if not call.num_keys:
        return nothing(call, call.num_queries)
    if objection_of(call, name) is not None:
        name = choose(call)
    return Partial(*attend_part(BACKENDS[name], call, q, part, partial=True))


def nothing(call: Call, queries: int) -> Partial:
    """Attention of so many queries to no key, of full shape."""
    shape, dtype = (call.batch, call.num_heads, queries), accumulating_dtype(call.dtype)
    out = torch.zeros(*shape, call.v_head_dim, dtype=dtype, device=call.device)
    return Partial(out, torch.full(shape, -torch.inf, dtype=dtype, device=call.device))
