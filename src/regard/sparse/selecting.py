"""A cache in pages that reads only the pages whose keys may matter for a query.

Every token stays. From the mean and the variance of each channel of its keys, a page has a bound
that the products of a query with its keys hardly exceed. A decoding step reads the pages of the
highest bounds, as Quest does (Tang et al. 2024, arXiv:2406.10774) with bounds from extremes.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.cache import PagedCache, Part
from regard.cache.codes import QuantizedStream
from regard.cache.paging.pages import Slab
from regard.cache.paging.reading import PagedStream
from regard.cache.parts import Streams
from regard.cache.saving import Record
from regard.cache.stored import Stored
from regard.cache.streams import Lengths, check_whole
from regard.masks import EVERYTHING, Dense, Mask, Span
from regard.masks.runs import true_runs
from regard.ops.partial import Partial, merge
from regard.ops.parts import visible_parts
from regard.ops.prepared import Prepared
from regard.sparse.attention import Sparse, prepare_rows
from regard.sparse.bounds import Bounds
from regard.sparse.slots import AtSlots

LAST = 2  # pages at the end that are always read: the open one, and one full page
FIRST = 1  # pages at the start that are always read: most heads look at the first tokens


class Read(NamedTuple):
    """Chosen pages that one slab stores, of key heads that are rows of a folded batch.

    Attributes:
        pages: `[B, G, n]`, their numbers.
        streams: with a row for each key head of each row.
        length: the tokens of the pages.
        here: `[B x G, n]`, whether a page is in this slab; None if all are.
    """

    pages: Int[Tensor, "B G n"]
    streams: list[PagedStream]
    length: int
    here: Bool[Tensor, "BG n"] | None


class Places(NamedTuple):
    """Where the pages of a cache lie: each in a slab, of a format or of the host's memory.

    Attributes:
        moves: how often the pool had moved pages.
        slabs: all of them.
        slab_of: `[B, pages]`, the index of each page's slab.
        number: `[B, pages]`, of each page in its slab.
    """

    moves: int
    slabs: list[Slab]
    slab_of: Int[Tensor, "B pages"]
    number: Int[Tensor, "B pages"]


class SelectingCache(Stored, Sparse):
    """A `PagedCache` of which a decoding step reads some pages: speed on long contexts.

    Memory is that of the paged cache, and the bounds: 2 numbers of 2 bytes a channel of the keys
    and page, of keys in bfloat16 3 % at 64 tokens a page, 12 % at 16, which change the outputs
    less; of keys in float32 half of that. Nothing is lost:
    `truncate`, `fork` and files work as before, and with all `pages` the outputs are those of full
    attention. Each key head selects its own pages. The first page and the last two are always read.
    Calls of several tokens read all pages.

    A layer attends through `attend`, and a model of transformers needs `regard.hf.install`.

    Args:
        cache: holds the tokens; this cache fills it alone.
        pages: how many a step reads, a whole number of at least 4; or a share of all, in (0, 1].

    Raises:
        TypeError: if `cache` is no `PagedCache`.
        ValueError: if `cache` has a window or holds tokens, or `pages` is out of its range.

    Examples:
        >>> import torch
        >>> from regard import Attention, Causal, PagedCache, PagePool, Rotary
        >>> from regard.sparse import SelectingCache
        >>> layer = Attention(64, 4, num_kv_heads=2, rope=Rotary(16), mask=Causal()).eval()
        >>> cache = SelectingCache(PagedCache(PagePool(num_pages=99, page_size=16)), pages=4)
        >>> with torch.no_grad():
        ...     _ = layer(torch.randn(1, 1000, 64), cache=cache)
        ...     _ = layer(torch.randn(1, 1, 64), cache=cache)
        >>> cache.length, cache.selected.shape  # the numbers of the pages that the step has read
        (1001, torch.Size([1, 2, 4]))
    """

    def __init__(self, cache: PagedCache, pages: int | float = 0.125) -> None:
        if not isinstance(cache, PagedCache):
            raise TypeError(f"cache is a PagedCache, got {type(cache).__name__}")
        if cache.window is not None or cache.length:
            raise ValueError(
                f"cache is empty and without a window, got {cache.length} tokens and "
                f"window={cache.window}; a window is short enough to be read"
            )
        if not isinstance(pages, float):
            check_whole("pages", pages, least=FIRST + LAST + 1)
        elif not 0.0 < pages <= 1.0:
            raise ValueError(f"pages is a share in (0, 1] or a whole number, got {pages}")
        self.cache, self.pages = cache, pages
        self.selected: Int[Tensor, "B G n"] | None = None  # by the last step; None: all were read
        self._bounds: Bounds | None = None
        self._parts: tuple[Part, ...] = ()  # that `update` returned last
        self._places: Places | None = None  # of the pages; None: to be read again

    @property
    def length(self) -> int:
        """The number of tokens so far."""
        return self.cache.length

    @property
    def lengths(self) -> Lengths:
        return self.cache.lengths

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens, and for the bounds of their pages."""
        return self.cache.nbytes + self.bounds_nbytes

    @property
    def bounds_nbytes(self) -> int:
        """Bytes of the bounds."""
        return 0 if self._bounds is None else sum(each.nbytes for each in self._bounds)

    @property
    def allocated_bytes(self) -> int:
        return self.cache.allocated_bytes + self.bounds_nbytes

    @property
    def empty_streams(self) -> tuple[Tensor, ...]:
        return self.cache.empty_streams

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.cache.arguments, "pages": self.pages}

    def span(self, new: int) -> Span:
        """The slots of the queries and keys of a call with `new` more tokens."""
        return self.cache.span(new)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; return all tokens, in parts.

        Raises:
            ValueError: as `PagedCache.update`.
        """
        if self.cache.pieces is None and self.pieces is not None:
            self.cache.pieces = tuple(self.pieces)
        self._parts = self.cache.update(*new)
        self._bound(self._parts)
        return self._parts

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        """The result of `update`, in new tensors, without changing the cache."""
        return self.cache.peek(*new)

    def attend(
        self, prepared: Prepared, q: Tensor, parts: Iterable[Part], sinks: Tensor | None
    ) -> Tensor:
        """Attention of `q` to all tokens, or of a single query to the pages that it selects.

        Args:
            prepared: the call over all tokens, without sinks.
            q: queries of the new tokens, `[B, H, L, D]`.
            parts: what `update` returned.
            sinks: a score for each head.

        Raises:
            ValueError: if keys were rebuilt from what `update` returned, or the call has dropout or
                a score bias.
        """
        call, parts = prepared.call, tuple(parts)
        count, self.selected = self._count(), None
        if q.shape[2] != 1 or not len(q) or count >= self._all_pages:
            mask, span, bias = call.given_mask, call.given_span, call.score_bias
            whole = prepare_rows(prepared, q, parts[0], mask, span, score_bias=bias, sinks=sinks)
            return whole.run(q, parts)
        if parts[0] is not self._parts[0] or call.dropout or call.score_bias is not None:
            raise ValueError(
                "SelectingCache reads keys as they are stored, without dropout or a score bias; "
                "this layer rebuilds keys, or has one of these: use PagedCache(pool)"
            )
        self.selected = chosen = self._select(q * call.scale, count)
        return self._attend_pages(prepared, q, chosen, sinks)

    def truncate(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens.

        Raises:
            ValueError: if `length` is a tensor, negative or above the tokens so far.
        """
        if isinstance(length, Tensor):
            raise ValueError(
                "SelectingCache has rows of one length, got a tensor; truncate to a whole number, "
                "or use PagedCache(pool)"
            )
        self.cache.truncate(length)
        if self._bounds is not None:
            self._bounds = self._bounds.between(0, length // self.cache.memory.page_size)
        self._places = None

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows, `[N]` integers, in this order; repeated rows share full pages."""
        self.cache.reorder(rows)
        if self._bounds is not None:
            some = rows.to(self._bounds.mean.device)
            self._bounds = type(self._bounds)(*(x.index_select(0, some) for x in self._bounds))
        self._places = None

    def fork(self) -> "SelectingCache":
        """A copy that goes on by itself: sealed pages and bounds are shared."""
        new = object.__new__(SelectingCache)
        vars(new).update(vars(self), cache=self.cache.fork(), _places=None, _parts=())
        return new

    __copy__ = fork

    def snapshot(self) -> object:
        return self.cache.snapshot(), self._bounds, self.selected

    def restore(self, snapshot: object) -> None:
        assert isinstance(snapshot, tuple)
        before, self._bounds, self.selected = snapshot
        self.cache.restore(before)
        self._places = None

    def can_truncate(self, length: int | Tensor) -> bool:
        return not isinstance(length, Tensor) and self.cache.can_truncate(length)

    def record(self) -> Record:
        return self.cache.record()

    def fill(self, record: Record) -> None:
        self.cache.fill(record)
        if self.cache.rows and self.length:
            self._bound(self.cache.peek(*(each[:, :, :0] for each in self.cache.empty_streams)))

    def _count(self) -> int:
        """How many pages a step reads, the open one included."""
        if isinstance(self.pages, int):
            return self.pages
        return max(FIRST + LAST + 1, round(self.pages * self._all_pages))

    @property
    def _all_pages(self) -> int:
        """The number of pages, the open one included."""
        return -(-self.length // self.cache.memory.page_size)

    def _bound(self, parts: tuple[Part, ...]) -> None:
        """Store the bounds of pages that are full now."""
        size, known = self.cache.memory.page_size, self._bounds
        first = 0 if known is None else known.mean.shape[2] * size
        stop = self.length // size * size
        if first >= stop:
            return
        full = visible_parts(Span(first, stop, first, stop), parts)
        new = Bounds.of(torch.cat([part.streams[0] for part in full], 2), size)
        self._bounds = new if known is None else known.followed_by(new)
        self._places = None

    def _select(self, q: Tensor, count: int) -> Int[Tensor, "B G n"]:
        """The numbers of the pages that each key head reads, in ascending order: the first, the
        last ones, and of those between them the highest."""
        assert self._bounds is not None
        stop = self._all_pages
        shares = self._bounds.between(FIRST, stop - LAST).highest(q)
        always = torch.nn.functional.pad(shares, (FIRST, LAST), value=math.inf)
        return always.topk(count, -1, sorted=False).indices.sort(-1).values

    def _attend_pages(
        self, prepared: Prepared, q: Tensor, chosen: Int[Tensor, "B G n"], sinks: Tensor | None
    ) -> Tensor:
        """Attention of a query to some pages of each key head, which are rows of a folded batch."""
        call, size = prepared.call, self.cache.memory.page_size
        batch, heads = chosen.shape[:2]
        rule = call.given_mask.within(call.given_span)
        folded = q.reshape(batch * heads, -1, *q.shape[2:])
        if sinks is not None:
            sinks = sinks.unflatten(0, (heads, -1))
        found = []
        for pages, streams, length, here in self._read(chosen):
            part = Part(0, length, Streams(streams))
            mask = self._mask_of(rule, pages, length, call.num_heads // heads)
            if here is not None:
                mask = mask & Dense(here.repeat_interleave(size, -1)[:, None, None, :length])
            span = Span(self.length - 1, self.length, 0, length)
            its = prepare_rows(prepared, folded, part, mask, span, partial=True)
            found.append(its.partial(folded, (part,)))
        if sinks is not None:
            lse = sinks.float()[None, :, :, None].expand(batch, -1, -1, -1).flatten(0, 1)
            found.append(Partial(torch.zeros_like(lse).unsqueeze(-1), lse))
        out = merge(*found).out if len(found) > 1 else found[0].out
        return out.to(call.dtype).reshape(*q.shape[:3], -1)

    def _mask_of(self, rule: Mask, pages: Tensor, length: int, group: int) -> Mask:
        """The mask of the tokens of some pages."""
        if rule is EVERYTHING:
            return EVERYTHING
        size = self.cache.memory.page_size
        tokens = torch.arange(size, device=pages.device)
        slots = (pages[..., None] * size + tokens).flatten(2)[..., :length]
        return AtSlots(rule, slots.flatten(0, 1)[:, None], group, folded=pages.shape[1])

    def _read(self, chosen: Int[Tensor, "B G n"]) -> Iterator[Read]:
        """The chosen pages, by the slabs in which they lie."""
        places, on_host = self._places_of_pages(), chosen.cpu()
        slabs, number = places.slabs, _of_chosen(places.number, on_host)
        if len(slabs) == 1:
            yield self._read_in(slabs[0], chosen, number, None, True)
            return
        slab_of = _of_chosen(places.slab_of, on_host)
        for index, slab in enumerate(slabs):
            is_here = slab_of == index
            for start, stop in true_runs(is_here.flatten(0, 1).any(0)):
                pages, here, own = (x[:, :, start:stop] for x in (chosen, is_here, number))
                own = torch.where(here, own, own[here][0])
                hidden = None if here.all() else here.flatten(0, 1).to(pages.device)
                yield self._read_in(slab, pages, own, hidden, stop == chosen.shape[2])

    def _read_in(
        self, slab: Slab, pages: Tensor, number: Tensor, here: Tensor | None, ends: bool
    ) -> Read:
        """Pages of these numbers in a slab; `ends` says whether the last is the open one."""
        size, head = self.cache.memory.page_size, torch.arange(pages.shape[1], device="cpu")
        tail = self.length - (self._all_pages - 1) * size if ends else size
        length = (pages.shape[2] - 1) * size + tail
        # the heads of a slab lie one after the other
        table = (number + head[:, None] * slab.capacity).flatten(0, 1).contiguous()
        streams = [
            PagedStream(_one_head(each), table, size, 0, length, slab.read_on)
            for each in slab.streams
        ]
        return Read(pages, streams, length, here)

    def _places_of_pages(self) -> Places:
        """Where the pages lie; read again if there are more, or if the pool has moved some."""
        offloading = self.cache.memory.offloading
        moves = 0 if offloading is None else offloading.moves
        known = self._places
        tables = [table.pages for table in self.cache.rows]
        if known is None or known.moves != moves or known.number.shape[1] != len(tables[0]):
            slabs = {page.slab: None for pages in tables for page in pages}
            of = {slab: index for index, slab in enumerate(slabs)}
            found = [[(of[page.slab], page.index) for page in pages] for pages in tables]
            slab_of, number = torch.tensor(found, device="cpu").unbind(-1)
            self._places = known = Places(moves, [*slabs], slab_of, number)
        return known

    def __repr__(self) -> str:
        return f"SelectingCache({self.cache!r}, pages={self.pages})"


def _of_chosen(x: Int[Tensor, "B pages"], chosen: Int[Tensor, "B G n"]) -> Int[Tensor, "B G n"]:
    """The values of the chosen pages."""
    return x[:, None].expand(*chosen.shape[:2], -1).gather(2, chosen)


def _one_head(stream: Tensor | QuantizedStream) -> Any:
    """A slab's stream whose heads follow one another, as one head."""

    def joined(x: Tensor) -> Tensor:
        return x.view(1, 1, -1, x.shape[3])

    if isinstance(stream, Tensor):
        return joined(stream)
    return stream._replace(codes=joined(stream.codes), scales=joined(stream.scales))
