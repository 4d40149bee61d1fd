"""Keys in several parts, read one at a time: what a call sees of them, and parts that lie in pages.

A part in pages is read in pieces: runs of consecutive pages as views, which copy nothing, and other
pages gathered, so many tokens at a time that the copy stays in the processor's caches. So memory is
bounded, however long the past is.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor

from regard.cache import Part
from regard.masks import Span
from regard.ops.call import Backend, Call
from regard.tracing import same_autocast

GATHERED = 1024  # tokens of pages that are copied at a time: as many as of codes, see `codes.py`
Make = Callable[[tuple[Part, ...]], tuple[Part, ...]]


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
    """A part as a backend reads it: as it lies, where it can, else in pieces."""
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


def rebuilt(span: Span, parts: tuple[Part, ...], make: Make) -> Iterable[Part]:
    """Keys and values that are made of what a cache holds, when they are read.

    Of parts in pages, a piece at a time, so that memory is bounded; what rows share, once for all
    of them. The only piece, or the first of several, is made at once.

    Args:
        span: of the call that reads them: only what it may see is made.
        parts: as the cache returned them.
        make: keys and values of some parts.
    """
    if len(parts) == 1 and not parts[0].is_scattered and not parts[0].is_shared:
        return make(parts)
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
    """Keys and values of one piece."""
    if not piece.is_shared:
        (found,) = make((piece,))
        return found
    batch = piece.outlines[0].shape[0]
    (found,) = make((piece.rows(0, 1),))
    streams = tuple(each.expand(batch, -1, -1, -1) for each in found.streams)
    return Part(found.kv_start, found.kv_stop, streams)
