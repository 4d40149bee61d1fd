"""Keys in several parts, read one at a time: what a call sees of them, and parts that lie in pages.

A part in pages is read in pieces: runs of consecutive pages as views, which copy nothing, and other
pages gathered, so many tokens at a time that the copy stays in the processor's caches. So memory is
bounded, however long the past is.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from regard.cache import Part
from regard.cache.codes import QuantizedStream, QuantizedStreams
from regard.cache.paging.reading import PagedStream, PagedStreams, pages_apart
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
    streams = tuple(
        torch.cat(pieces, 2) for pieces in zip(*(p.streams for p in parts), strict=True)
    )
    return Part(parts[0].kv_start, parts[-1].kv_stop, streams)


def pieces(part: Part, most: int = GATHERED) -> Iterator[Part]:
    """A part in pages as parts that every backend can read; another part as it is.

    Args:
        part: keys and values.
        most: tokens that are copied at a time. Runs of consecutive pages that are at least as long
            are views.
    """
    stored = part.paged
    if stored is None:
        yield part
        return
    for start, stop in _cuts(stored[0], most):
        yield in_one(part.narrow(part.kv_start + start, part.kv_start + stop))


def in_one(part: Part) -> Part:
    """The same keys in one piece: a view if the pages are consecutive, else a copy."""
    if part.paged is None:
        return part
    streams: list[QuantizedStream | Tensor] = []
    for each in part.paged:
        view = each.viewed()
        streams.append(each.copied() if view is None else view)
    if all(isinstance(each, Tensor) for each in streams):
        return Part(part.kv_start, part.kv_stop, tuple(streams))  # type: ignore[arg-type]
    return Part(part.kv_start, part.kv_stop, QuantizedStreams(streams))


def _cuts(stored: PagedStream, most: int) -> Iterator[tuple[int, int]]:
    """Where a part in pages is cut, in tokens from its first."""
    at = 0
    for first, last in [*_long_runs(stored, most), (stored.length, stored.length)]:
        while at < first:
            stop = min(at + most, first)
            yield at, stop
            at = stop
        if first < last:
            yield first, last
        at = last
    if not stored.length:
        yield 0, 0


def _long_runs(stored: PagedStream, most: int) -> Iterator[tuple[int, int]]:
    """Runs of at least `most` tokens, in tokens, that are views: the pages of every row are
    consecutive, and rows equally far apart."""
    table = stored.table[:1] if stored.is_shared else stored.table
    breaks = (table.diff(dim=1) != 1).any(0)
    ends = [*(breaks.nonzero().flatten() + 1).tolist(), table.shape[1]]
    size, begin = stored.page_size, 0
    for end in ends:
        first = max(begin * size - stored.start, 0)
        last = min(end * size - stored.start, stored.length)
        if last - first >= most and pages_apart(table[:, begin]) is not None:
            yield first, last
        begin = end


def readable(part: Part, backend: Backend) -> Iterator[Part]:
    """A part as a backend reads it: in pages, where it can read these, else in pieces."""
    if part.paged is not None and backend.reads_pages and backend.reads_pages(part.paged):
        yield part
    else:
        yield from pieces(part)


def reading_of(call: Call, backend: Backend) -> str:
    """How a backend reads keys in several parts, in words."""
    if not reads_in_parts(call, backend):
        reason = "dropout needs all of them" if call.dropout else no_log_sum_exp(call, backend)
        return f"copied side by side before they are read: {reason}"
    if backend.reads_pages is not None:
        return "read one at a time and merged; pages are read as they lie"
    return f"read one at a time and merged; pages are copied, {GATHERED:,} tokens at a time"


def reads_in_parts(call: Call, backend: Backend) -> bool:
    """Whether a backend reads several parts one at a time: it needs the log-sum-exp of each to
    merge them, and dropout is of weights that are whole."""
    return not call.dropout and no_log_sum_exp(call, backend) is None


def no_log_sum_exp(call: Call, backend: Backend) -> str | None:
    """Why a backend has no log-sum-exp for a call, in a sentence; None if it has one."""
    return None if backend.partial_objection is None else backend.partial_objection(call)


def shares_rows(part: Part) -> bool:
    """Whether all rows of a batch of several read the same memory."""
    stored: Sequence[object] = part.paged or part.quantized or part.streams
    return all(_is_shared(each) for each in stored)


def _is_shared(stream: object) -> bool:
    if isinstance(stream, PagedStream):
        return stream.is_shared
    held = stream.codes if isinstance(stream, QuantizedStream) else stream
    assert isinstance(held, Tensor)
    return held.shape[0] > 1 and held.stride(0) == 0


def are_several(parts: tuple[Part, ...]) -> bool:
    """Whether parts are read one at a time, or in pieces."""
    return len(parts) > 1 or parts[0].paged is not None


def first_row(part: Part) -> Part:
    """The part of the first row of the batch."""
    if part.paged is not None:
        streams: Sequence[Tensor] = PagedStreams([each.rows(0, 1) for each in part.paged])
    elif part.quantized is not None:
        streams = QuantizedStreams([_first(each) for each in part.quantized])
    else:
        streams = tuple(each[:1] for each in part.streams)
    return Part(part.kv_start, part.kv_stop, streams)


def _first(stream: QuantizedStream | Tensor) -> QuantizedStream | Tensor:
    if isinstance(stream, Tensor):
        return stream[:1]
    return stream._replace(codes=stream.codes[:1], scales=stream.scales[:1])


def rebuilt(span: Span, parts: tuple[Part, ...], make: Make) -> Iterable[Part]:
    """Keys and values that are made of what a cache holds, when they are read.

    Of parts in pages, a piece at a time, so that memory is bounded; what rows share, once for all
    of them. The only piece, or the first of several, is made at once.

    Args:
        span: of the call that reads them: only what it may see is made.
        parts: as the cache returned them.
        make: keys and values of some parts.
    """
    if len(parts) == 1 and parts[0].paged is None and not shares_rows(parts[0]):
        return make(parts)
    read = (piece for part in visible_parts(span, parts) for piece in pieces(part))
    autocast = same_autocast(parts[0].outlines[0].device)

    def made() -> Iterator[Part]:
        for piece in read:
            with autocast():
                found = _made(piece, make)
            yield found

    later = made()
    return chain([next(later)], later)


def _made(piece: Part, make: Make) -> Part:
    """Keys and values of one piece."""
    if not shares_rows(piece):
        (found,) = make((piece,))
        return found
    batch = piece.outlines[0].shape[0]
    (found,) = make((first_row(piece),))
    streams = tuple(each.expand(batch, -1, -1, -1) for each in found.streams)
    return Part(found.kv_start, found.kv_stop, streams)
