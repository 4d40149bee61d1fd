"""Keys in parts: which parts a call sees, how a backend reads them, and attention to one of them.

Pages that a backend does not read as they lie are read in pieces: runs of consecutive pages as
views, other pages copied, so many tokens at a time that the copy stays in the processor's caches.

The queries of rotated codes are rotated alike, and the outputs back, which costs less than rotating
every key: products of two vectors do not change where both are rotated (QuaRot, Ashkboos et al.
2024, arXiv:2404.00456).

Keys that the rows of a batch share, such as a system prompt's, are read once for all of them. Under
a mask that hides nothing, the queries of all rows attend to one row's keys as the queries of one
row (Hydragen, Juravsky et al. 2024, arXiv:2402.05099).
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor

from regard.cache import Part
from regard.cache.rotation import hadamard
from regard.constants import accumulating_dtype
from regard.masks import Span
from regard.ops.call import Backend, Call, hides_nothing
from regard.ops.observed import BACKEND_RUNS, report_backend
from regard.tracing import same_autocast

GATHERED = 1024  # tokens of pages that are copied at a time: as many as of codes, see `codes.py`
Make = Callable[[tuple[Part, ...]], tuple[Part, ...]]
Results = tuple[Tensor, ...]  # the output, and the log-sum-exp where it is wanted


def visible_parts(span: Span, parts: Iterable[Part]) -> Iterator[Part]:
    """The parts without keys outside of the span; an empty one if none remains."""
    some, empty = False, None
    first, end = span.kv_start, span.kv_stop
    for part in parts:
        start, stop = max(part.kv_start, first), min(part.kv_stop, end)
        if start >= stop:
            empty = part
            continue
        if (start, stop) != (part.kv_start, part.kv_stop):
            part = part.narrow(start, stop)
        some = True
        yield part
    if empty is not None and not some:
        nothing = empty.narrow(empty.kv_start, empty.kv_start)
        yield Part(first, first, nothing.streams)


def concatenated(parts: Iterable[Part]) -> Part:
    """One part out of several whose keys follow one another."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    pieces = zip(*(part.streams for part in parts), strict=True)
    streams = tuple(torch.cat(each, 2) for each in pieces)
    return Part(parts[0].kv_start, parts[-1].kv_stop, streams)


def readable(part: Part, backend: Backend) -> Iterator[Part]:
    """The pieces in which a backend reads a part; one, if it reads streams as stored."""
    if part.is_scattered and not reads_stored(backend, part):
        yield from part.pieces(GATHERED)
    else:
        yield part


def reads_stored(backend: Backend, part: Part) -> bool:
    """Whether a backend reads the streams of a part as they are stored."""
    kinds = {type(each) for each in part.stored if not isinstance(each, Tensor)}
    return all(kind in backend.reads and backend.reads[kind](part.stored) for kind in kinds)


def reading_of(call: Call, backend: Backend) -> str:
    """How a backend reads keys in several parts, in words."""
    if not reads_in_parts(call, backend):
        objection = backend.objection(call.but(partial=True))
        reason = "dropout needs all of them" if call.dropout else objection
        return f"copied side by side before they are read: {reason}"
    if all(kind in backend.reads for kind in call.storage.kinds):
        return "read one at a time and merged; pages are read as they lie"
    return f"read one at a time and merged; pages are copied, {GATHERED:,} tokens at a time"


def reads_in_parts(call: Call, backend: Backend) -> bool:
    """Whether a backend reads several parts one at a time: it needs the log-sum-exp of each to
    merge them, and dropout is of weights that are whole."""
    return not call.dropout and backend.objection(call.but(partial=True)) is None


def attend_part(
    backend: Backend, call: Call, q: Tensor, part: Part, *, partial: bool = False
) -> Results:
    """Attention to one part, as the call over it says: the output, with `partial` in the dtype of
    sums and with the log-sum-exp."""
    if BACKEND_RUNS:
        report_backend(backend.run)
    k, v = call.keys_and_values(part if reads_stored(backend, part) else part.as_tensors())
    of_keys, of_values = (() if isinstance(x, Tensor) else x.rotation for x in (k, v))
    if not (of_keys or of_values):
        return backend.partial(call, q, k, v) if partial else (backend.run(call, q, k, v),)
    assert sum(of_values) <= call.v_head_dim, "of one stream, at most the values are rotated"
    dtype = accumulating_dtype(call.dtype)  # so that rotated queries are not rounded
    here, q = call.but(dtype=dtype), hadamard(q.to(dtype), of_keys)
    if partial:
        out, lse = backend.partial(here, q, k, v)
        return hadamard(out, of_values), lse
    return (hadamard(backend.run(here, q, k, v), of_values).to(call.dtype),)


def attend_rows(
    backend: Backend, call: Call, q: Tensor, part: Part, *, partial: bool = False
) -> Results:
    """Attention to one part; batch rows that share its keys become rows of one product."""
    rows = rows_at_once(call, part, backend)
    if rows == 1:
        return attend_part(backend, call, q, part, partial=partial)
    one, pieces = part.rows(0, 1), []
    for some in q.split(rows):
        together = some.transpose(0, 1).flatten(1, 2).unsqueeze(0)  # [1, H, rows * L, D]
        results = attend_part(backend, _of_rows(call, len(some)), together, one, partial=partial)
        pieces.append([x[0].unflatten(1, (len(some), -1)).transpose(0, 1) for x in results])
    return tuple(x[0] if len(x) == 1 else torch.cat(x) for x in zip(*pieces, strict=True))


def rows_at_once(call: Call, part: Part, backend: Backend) -> int:
    """How many rows of the call attend to the part together; 1 if each reads its own keys, or the
    backend objects to the queries of two rows in one call."""
    if call.batch == 1 or not part.is_shared:
        return 1
    if not call.immediate or call.needs_grad or call.dropout or not hides_nothing(call):
        return 1
    rows = call.batch
    while rows > 1 and backend.objection(_of_rows(call, rows)) is not None:
        rows = -(-rows // 2)
    return rows


def _of_rows(call: Call, rows: int) -> Call:
    """The call of one row with the queries of so many rows, over the keys that these share."""
    span = Span(0, rows * call.num_queries, call.span.kv_start, call.span.kv_stop)
    return call.but(batch=1, given_span=span, span=span)


def rebuilt(span: Span, parts: tuple[Part, ...], make: Make) -> Iterable[Part]:
    """Compute keys and values from streams as they are read, as from latents.

    Of parts in pages, a piece at a time, so that memory is bounded; what rows share, once for all
    of them. The only piece, or the first of several, is made at once.

    Args:
        span: of the call that reads them: only what it may see is made.
        parts: as the cache returned them.
        make: keys and values of some parts.
    """
    autocast = same_autocast(parts[0].outlines[0].device)

    def made() -> Iterator[Part]:
        for part in visible_parts(span, parts):
            for piece in part.pieces(GATHERED):
                with autocast():
                    found = _made(piece, make)
                yield found

    later = made()
    return chain([next(later)], later)


def _made(piece: Part, make: Make) -> Part:
    """Compute the keys and values of one piece; if all rows share it, those of the first row."""
    shared = piece.is_shared
    (found,) = make((piece.rows(0, 1) if shared else piece,))
    if not shared:
        return found
    batch = piece.outlines[0].shape[0]
    return found._replace(streams=tuple(x.expand(batch, -1, -1, -1) for x in found.streams))
