"""Sequences over one pool of pages: shared prefixes, eviction, exhaustion, and exact counts."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_world import World
from listed import STREAMS, Coding
from regard import PagedCache, PagePool
from regard.cache.paging.contexts import Context
from sequences import Kind, Row, Sequence

PAGE = 4  # tokens: pages are full, sealed, shared and evicted all the time
PAGES = 72  # of a pool: some updates find no room
NEVER = {torch.int64: -1, torch.int32: -1, torch.uint8: 255}  # else NaN


def kinds_over(pool: PagePool) -> dict[str, Kind]:
    """Caches over a pool: of all tokens, of windows, and of two layers, one with a window."""
    keys, values = pool.format.key_bits, pool.format.value_bits
    group = pool.format.group
    codings: dict[str, Any] = {}
    if keys is not None:
        by_channel = keys < 8 and (pool.format.by_channel_from or PAGE + 1) <= PAGE
        rotated = (8,) if keys < 8 and not by_channel else ()  # keys of 8, the latent's piece of 8
        of_keys = Coding(keys, group, rotated, by_channel)
        of_values = Coding(values, group, (4, 2) if values < 8 else ())
        codings = {"codings": (of_keys, of_values, None), "joined": of_keys}
    whole = lambda: PagedCache(pool)  # noqa: E731
    narrow = lambda: PagedCache(pool, window=6)  # noqa: E731
    rolling = lambda: PagedCache(pool, window=9, rollback=3)  # noqa: E731
    return {
        "pages": Kind((whole,), page=PAGE, **codings),
        "pages, window": Kind((narrow,), window=(6,), page=PAGE, rollback=0, **codings),
        "pages, rollback": Kind((rolling,), window=(9,), page=PAGE, rollback=3, **codings),
        "pages, layers": Kind(
            (whole, rolling), window=(None, 9), page=PAGE, rollback=3, **codings
        ),
    }  # fmt: skip


class PoolWorld(World):
    """Sequences over one pool, and the prefixes that were stored."""

    def __init__(self, pool: PagePool, folder: Path) -> None:
        super().__init__(kinds_over(pool), folder)
        self.pool = pool
        self.stored: list[tuple[str, str, list[int]]] = []  # kind, streams and tokens
        self.rounded: dict[int, int] = {}  # how often a stored token may have been rounded
        self.names_of = {id(streams): name for name, streams in STREAMS.items()}

    # Operations that may find no room

    def roomy(self, rows: int, call: Callable[[], Any]) -> Any:
        """What a call returns, or None if it was refused because sequences hold all pages."""
        try:
            return call()
        except ValueError as error:
            if "num_pages" not in str(error):
                raise
            self.count("exhausted")
            held = sum(page.references > 0 for page in self.pool.memory.in_order())
            assert held + rows > PAGES, f"{held} pages of {PAGES} are held, and none is free"
            return None

    def updated(self, held: Sequence, drawn: list) -> list | None:
        parts, before = [], [cache.snapshot() for cache in held.caches]
        need = len(held.rows) * (2 + drawn[0][0].shape[2] // PAGE)
        for at, (cache, each) in enumerate(zip(held.caches, drawn, strict=True)):
            returned = self.roomy(need, lambda cache=cache, each=each: cache.update(*each))
            if returned is None:
                for done in range(at):
                    held.caches[done].restore(before[done])
                held.read = None  # valid until the next call, also until one that is refused
                return None
            parts.append(returned)
        return parts

    def fork(self, at: int) -> None:
        held = self.chosen(at)
        if held is not None:
            self.roomy(len(held.rows) * len(held.caches), lambda: World.fork(self, at))

    def copy(self, at: int) -> None:
        held = self.chosen(at)
        if held is not None:
            self.roomy(len(held.rows) * len(held.caches), lambda: World.copy(self, at))

    def save(self, at: int) -> None:
        held = self.chosen(at)
        if held is not None:
            need = sum(-(-n // PAGE) for n in held.lengths) * len(held.caches)
            self.roomy(need, lambda: World.save(self, at))

    def reorder(self, at: int, rows: list[int]) -> None:
        held = self.chosen(at)
        if held is not None and held.caches[1:]:
            rows = [0]  # fewer pages than before: no layer is refused alone
        self.roomy(2 * len(rows), lambda: World.reorder(self, at, rows))

    # Operations on the pool

    def context(self, kind: str, streams: str) -> Context:
        """A model of one layer or two, told apart by its name; all in one pool."""
        return Context("a model", f"{kind}, {streams}")

    def store(self, at: int, row: int) -> None:
        """The sealed pages of a row become a prefix that others find."""
        held = self.chosen(at)
        if held is None or not held.length:
            return
        self.count("store")
        number = row % len(held.rows)
        row = held.rows[number]
        streams = self.names_of[id(held.streams)]
        for token, rounds in zip(row.tokens, row.rounds, strict=True):
            self.rounded[token] = max(rounds, self.rounded.get(token, 0))
        context = self.context(held.name, streams)
        self.pool.store(row.tokens, held.caches, context=context, row=number)
        self.stored.append((held.name, streams, list(row.tokens)))
        found = self.pool.prefix([*row.tokens, -7], context=context)
        if held.kind.window == (None,):
            whole = len(row.tokens) // PAGE * PAGE
            assert found.length == whole, (found.length, whole)
        assert self.pool.prefix(row.tokens, context=self.context("another", streams)).length == 0

    def share(self, at: int, more: int) -> None:
        """A sequence that begins with a stored prefix, as far as it is found."""
        if not self.stored:
            return
        self.count("share")
        name, streams, tokens = self.stored[at % len(self.stored)]
        text = [*tokens[: len(tokens) - more % 5], -3, -5]
        found = self.pool.prefix(text, context=self.context(name, streams))
        assert found.length % PAGE == 0
        assert found.length <= len(text) - 2
        sequence = Sequence(name, self.found(self.kinds[name]), STREAMS[streams], 1)
        if found.length:
            sequence.caches = found.caches()
            sequence.announce()
            shared = text[: found.length]
            rounds = [self.rounded[token] for token in shared]
            sequence.rows = [Row(shared, rounds, found.length // PAGE, found.length)]
        self.sequences.append(sequence)

    def found(self, kind: Kind) -> Kind:
        """Caches of a stored prefix: they begin with its last window, and take nothing back."""
        make = tuple(partial(PagedCache, self.pool, window=each) for each in kind.window)
        return kind._replace(make=make, rollback=-1)

    def evict(self) -> None:
        self.count("evict")
        self.pool.evict()
        assert self.pool.nbytes.reusable == 0

    def release(self, at: int) -> None:
        """A cache releases its pages at once, and only once."""
        held = self.chosen(at)
        if held is None:
            return
        self.count("release")
        self.sequences.remove(held)
        for cache, streams in zip(held.caches, held.drawn([[0]] * len(held.rows)), strict=True):
            cache.release()
            assert cache.length == 0
            with pytest.raises(ValueError, match="released"):
                cache.release()
            with pytest.raises(ValueError, match="released"):
                cache.update(*streams)

    def foreign(self, at: int) -> None:
        """A pool takes no pages of another pool, and none of another model."""
        held = self.chosen(at)
        if held is None or not held.length:
            return
        self.count("foreign")
        other = PagePool(PAGES, PAGE, format=self.pool.format)
        streams = self.names_of[id(held.streams)]
        context = self.context(held.name, streams)
        with pytest.raises(ValueError, match="pool"):
            other.store(held.rows[0].tokens, held.caches, context=context)
        self.pool.prefix([1, 2], context=context)  # binds the pool
        stranger = Context("another model")
        with pytest.raises(ValueError, match="weights"):
            self.pool.prefix([1, 2], context=stranger)
        assert other.pages_in_use == 0

    # What holds after every operation

    def check(self) -> None:
        self.recount()
        super().check()
        self.poison()

    def recount(self) -> None:
        """References are those of all live tables; pages are in use, reusable or free."""
        counts: Counter[int] = Counter()
        bytes_of = {id(slab): slab.page_bytes for slab in self.pool.memory.slabs()}
        for held in self.sequences:
            for cache in held.caches:
                pages = [page for table in cache.rows for page in table.pages]
                counts.update(id(page) for page in [*pages, *retired(cache)])
                different = {id(page): page for page in pages}.values()
                assert cache.allocated_bytes == sum(bytes_of[id(each.slab)] for each in different)
        pages = {id(page): page for page in self.pool.memory.in_order()}
        assert counts.keys() <= pages.keys(), "a table has a page that is free"
        for number, page in pages.items():
            assert page.references == counts[number], (page, counts[number])
            assert counts[number] or page.node is not None, f"{page} is in no use"
        places = {(id(page.slab), page.index) for page in pages.values()}
        assert len(places) == len(pages) <= PAGES, "two pages in one place"
        size = self.pool.nbytes
        held = sum(bytes_of[id(page.slab)] for page in pages.values() if page.references)
        used = sum(bytes_of[id(page.slab)] for page in pages.values())
        assert (size.held, size.reusable) == (held, used - held)
        allocated = sum(memory(each) for slab in self.pool.memory.slabs() for each in slab.streams)
        assert size.held + size.reusable + size.free == allocated

    def poison(self) -> None:
        """Free pages become NaN, and so do the slots after a row's last token."""
        poison(self.pool)
        for held in self.sequences:
            for cache in held.caches:
                for table, row in zip(cache.rows, held.rows, strict=False):
                    tail = table.at(len(row.tokens) // PAGE)
                    if tail is not None and not tail.sealed and tail.is_private:
                        first = tail.index * PAGE + len(row.tokens) % PAGE
                        fill(tail.slab, list(range(first, (tail.index + 1) * PAGE)))

    def end(self) -> None:
        """The pool is as new after every sequence was dropped and every prefix evicted."""
        super().end()
        self.recount()
        assert self.pool.nbytes.held == 0
        self.pool.evict()
        assert self.pool.pages_in_use == 0
        assert tuple(self.pool.nbytes) == (0, 0, 0)


def retired(cache: Any) -> list[Any]:
    """Pages that a cache has left, and that parts it returned may still read."""
    return list(cache._rows.retired)


def poison(pool: PagePool) -> None:
    """Fill the free pages of a pool with what no read may return."""
    used: dict[int, set[int]] = {}
    for page in pool.memory.in_order():
        used.setdefault(id(page.slab), set()).add(page.index)
    for slab in pool.memory.slabs():
        free = sorted(set(range(slab.capacity)) - used.get(id(slab), set()))
        assert slab.in_use == slab.capacity - len(free)
        size = pool.page_size
        fill(slab, [index * size + token for index in free for token in range(size)])


def buffers(stream: Any) -> tuple[torch.Tensor, ...]:
    return (stream,) if isinstance(stream, torch.Tensor) else (stream.codes, stream.scales)


def memory(stream: Any) -> int:
    return sum(each.numel() * each.element_size() for each in buffers(stream))


def fill(slab: Any, tokens: list[int]) -> None:
    """Write what no read may return to tokens of a slab."""
    if tokens:
        for buffer in (each for stream in slab.streams for each in buffers(stream)):
            run = slab.capacity * slab.page_size // buffer.shape[2]  # tokens that share scales
            at = torch.tensor(tokens[::run]) // run
            buffer.index_fill_(2, at, NEVER.get(buffer.dtype, torch.nan))
