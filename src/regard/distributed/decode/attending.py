"""Attention to the tokens that one rank stores, which are some of the slots of the sequence.

Keys that every query may attend to need no mask, so that pages which lie side by side in the
storage are one call of a backend. The others are one call with a mask made for their slots.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.cache import Part
from regard.cache.parts import storage_of
from regard.constants import accumulating_dtype
from regard.distributed.decode.slots import Segment, Slots
from regard.masks import EVERYTHING, Dense, Mask, Span
from regard.masks.runs import Runs, complement, intersection
from regard.ops.backends import BACKENDS
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
    """Attention of all queries to the rank's tokens.

    Args:
        prepared: the call over all slots. Its backend runs the pieces that it can run; the cheapest
            runs the others.
        q: `[B, H, L, D]`.
        part: the rank's streams, at the slots 0 and on of its storage.
        slots: which slots these are.
        rank: this rank.
    """
    with without_autocast(prepared.call.device):
        prepared = prepared.stored_as(storage_of([part]))
        call = prepared.call.but(joined=len(part.streams) == 1)
        if _shows_all(call):
            return _attended(prepared.name, _unmasked(call, part.kv_stop), q, part)
        size = _block_size(call)
        found = []
        for first in range(0, call.num_queries, size):
            block = _rows(call, first, min(first + size, call.num_queries))
            rows = q.narrow(2, first, block.num_queries)
            found.append(_block(prepared.name, block, rows, part, slots, rank))
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


def _rows(call: Call, first: int, stop: int) -> Call:
    """The call of some of the queries."""
    if (first, stop) == (0, call.num_queries):
        return call
    assert isinstance(call.span.q_start, int)
    start, bias = call.span.q_start, call.score_bias
    span = Span(start + first, start + stop, call.span.kv_start, call.span.kv_stop)
    whole = Span(start + first, start + stop, call.given_span.kv_start, call.given_span.kv_stop)
    if isinstance(bias, Tensor) and bias.dim() >= 2 and bias.shape[-2] != 1:
        bias = bias.narrow(-2, first, stop - first)
    return call.but(span=span, given_span=whole, score_bias=bias)


def _block(name: str, call: Call, q: Tensor, part: Part, slots: Slots, rank: int) -> Partial:
    """Attention of a block of queries to the segments of the storage that they may attend to."""
    found = [
        _attended(name, piece, q, part.narrow(segment.start, segment.stop))
        for segment, piece in _pieces(call, slots, rank)
    ]
    if len(found) == 1:
        return found[0]
    return merge(*found) if found else nothing(call)


def _pieces(call: Call, slots: Slots, rank: int) -> Iterator[tuple[Segment, Call]]:
    """Segments of a rank's storage, each with the call over it."""
    for runs, mask in _visible(call):
        for segment in slots.segments(rank, runs):
            yield segment, _over(call, segment, mask)


def _visible(call: Call) -> list[tuple[Runs, Mask]]:
    """Slots visible to all queries, which need no mask, and the other slots visible to some."""
    span = call.span
    some, every, _ = call.mask.finder()(span.first_query, span.last_query)
    some = intersection(some, [(span.kv_start, span.kv_stop)])
    every = intersection(some, every)
    return [(every, EVERYTHING), (intersection(some, complement(every)), call.mask)]


def _over(call: Call, segment: Segment, mask: Mask) -> Call:
    """The call over one segment, whose slots may have gaps."""
    runs, count = segment.runs, segment.stop - segment.start
    hull = Span(call.span.q_start, call.span.q_stop, runs[0][0], runs[-1][1])
    placed = call.but(span=hull, mask=mask.within(hull))
    if len(runs) == 1:
        return placed
    if is_everything(placed.mask) and not _has_columns(call):
        return _unmasked(call, count)
    columns = torch.cat([torch.arange(start, stop) for start, stop in runs]) - hull.kv_start
    span = Span(0, call.num_queries, 0, count)
    keep: Mask = EVERYTHING
    if not is_everything(placed.mask):
        keep = Dense(_at(placed.keep(), columns)).within(span)
    bias = placed.bias()
    bias = None if bias is None else _at(bias, columns)
    return call.but(span=span, given_span=span, mask=keep, score_bias=bias)


def _unmasked(call: Call, keys: int) -> Call:
    """The call over so many keys, all of which are visible, at any slots."""
    span = Span(0, call.num_queries, 0, keys)
    return call.but(span=span, given_span=span, mask=EVERYTHING)


def _at(x: Tensor, columns: Tensor) -> Tensor:
    return x if x.dim() == 0 or x.shape[-1] == 1 else x.index_select(-1, columns.to(x.device))


def _attended(name: str, call: Call, q: Tensor, part: Part) -> Partial:
    """Attention to one part, by the backend of that name if it can run it."""
    if not call.num_keys:
        return nothing(call)
    if objection_of(call, name) is not None:
        name = choose(call)
    return Partial(*attend_part(BACKENDS[name], call, q, part, partial=True))


def nothing(call: Call) -> Partial:
    """Attention to no key, of full shape."""
    shape, dtype = (call.batch, call.num_heads, call.num_queries), accumulating_dtype(call.dtype)
    out = torch.zeros(*shape, call.v_head_dim, dtype=dtype, device=call.device)
    return Partial(out, torch.full(shape, -torch.inf, dtype=dtype, device=call.device))
