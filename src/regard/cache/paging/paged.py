"""A cache whose tokens lie in pages of a pool: one batch's tables over it."""

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.cache.paging import appending
from regard.cache.paging.files import arguments_of, cache_record, filled
from regard.cache.paging.memory import Kind, Memory
from regard.cache.paging.pages import PageTable, outlines_of
from regard.cache.paging.stepping import Stepping
from regard.cache.paging.tables import TableChange, Tables, cut, each_length, pages_of, select
from regard.cache.parts import Part
from regard.cache.saving import Record
from regard.cache.stored import Stored
from regard.cache.streams import (
    Lengths,
    check_rows,
    check_streams,
    check_whole,
    concatenated,
    lengths_of,
    needs_gradients,
)
from regard.span import Span
from regard.tracing import is_forward_mode


@runtime_checkable
class Pool(Protocol):
    """A `PagePool`, as its caches see it."""

    @property
    def memory(self) -> Memory:
        """The pages."""


class PagedCache(Stepping, Stored):
    """A cache whose tokens lie in pages of a pool, which other caches share.

    Rows have their own tables of pages, and may differ in length. Full pages are sealed and can be
    shared: `fork` and `reorder` share them, and copy the open page of each row. In a pool with a
    low-bit format sealed pages are codes; the first page of a row, its open page and the tokens
    of one `update`, whether or not rows differ in length, are returned in full precision by it.
    Other full pages are read as codes, so that results depend on the sizes of chunks, within the
    error of the codes. The design is PagedAttention's (Kwon et al. 2023, arXiv:2309.06180).

    Without gradients. The pages are released when the cache is garbage collected, or by `release`.

    Args:
        pool: where the pages lie.
        window: the `size` of the layer's `SlidingWindow`; pages before it are released.
        rollback: tokens that `truncate` may remove besides, where there is a window.

    Raises:
        TypeError: if `pool` is no `PagePool`.
        ValueError: if `window` is below 1 or `rollback` negative; by `update`, if the pool has too
            few pages left.

    Examples:
        >>> import torch
        >>> from regard import PagedCache, PagePool
        >>> pool = PagePool(num_pages=8, page_size=4)
        >>> cache, k = PagedCache(pool), torch.randn(1, 2, 6, 8)
        >>> (part,) = cache.update(k, k)
        >>> torch.equal(part.streams[0], k), cache.length, pool.pages_in_use
        (True, 6, 2)
        >>> beams = cache.fork()
        >>> beams.reorder(torch.tensor([0, 0, 0]))  # three rows: one sealed page, three open ones
        >>> pool.pages_in_use
        5
    """

    def __init__(self, pool: Pool, *, window: int | None = None, rollback: int = 0) -> None:
        if not isinstance(pool, Pool):
            raise TypeError(f"pool is a PagePool, got {pool!r}; PagedCache(PagePool(4096)), say")
        check_whole("rollback", rollback, least=0)
        if window is not None:
            check_whole("window", window, least=1)
        self.pool, self.memory, self.window, self.rollback = pool, pool.memory, window, rollback
        self.pieces: tuple[int, ...] | None = None  # of a joined stream, announced by a layer
        self._kind: Kind | None = None
        self._lengths = Lengths()
        self._rows = Tables(self, self.memory)
        self._like: tuple[Tensor, ...] = ()  # empty tensors of the streams' shapes and dtypes

    @classmethod
    def of_pages(
        cls, pool: Pool, tables: list[PageTable], length: int, window: int | None = None
    ) -> "PagedCache":
        """A cache of rows with these pages, which it retains."""
        cache = cls(pool, window=window)
        cache._lengths = Lengths(length, length)
        page = next(pages_of(tables), None)
        if page is not None:  # a window of 1 needs none: the next update decides about rows
            cache._rows.replace(tables)
            cache._kind = kind = cache.memory.kind_with(page.slab)
            cache._like = tuple(each.empty(len(tables)) for each in kind.open.outlines)
        return cache

    @property
    def rows(self) -> list[PageTable]:
        """The pages of each row."""
        return self._rows.tables

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens held; those of a page that rows share are counted once."""
        return self._rows.token_bytes(self.row_lengths())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the pages, the last of which have room for more tokens."""
        return self._rows.page_bytes()

    def span(self, new: int) -> Span:
        """The slots of a call with `new` more tokens; with a window, keys begin with it."""
        return self._lengths.span(new, self._needed(self._lengths.shortest))

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; return the keys that new tokens may attend to, in parts.

        Raises:
            ValueError: if the streams do not fit each other or those held, require gradients, or
                the pool has too few pages left; nothing changes then, or if it is interrupted.
        """
        self._check(new)
        memory, rows = self.memory, self._rows
        with memory.change:
            kind = self._kind or memory.kind_of(
                outlines_of(new, memory.format, memory.page_size, self.pieces)
            )
            tables = rows.tables or [PageTable() for _ in new[0]]
            lengths = self.row_lengths(len(tables))
            append = appending.plan(kind, tables, lengths, new)
            rows.settle()
            if append.needed or memory.offloading is not None:
                memory.reserve(append.needed)
            as_given = append.stores_codes or (append.added > 1 and self._lengths.rows is None)
            parts = self._past_and(new) if as_given else None
            grown = appending.with_new_pages(memory, tables, append)
            appending.write(grown, append, new)
            after = self._lengths.grown(append.added)
            like = self._like or tuple(each.empty(len(tables)) for each in kind.open.outlines)
            if parts is None:
                parts = rows.parts(self._needed(self._lengths.shortest), after.longest, like, grown)
            last = appending.with_codes(memory, grown, append)
            appending.seal(last, append)
            self._kind, self._like, self._lengths = kind, like, after
            last = self._without_pages_before_window(last)
            if not (as_given or last is grown or grown is rows.tables):
                rows.replace(grown)  # the parts read pages that are before a row's window already
            if last is not rows.tables:
                rows.replace(last, retires=True)
            return parts

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        """The result of `update`, in new tensors, without changing the cache."""
        self._check(new)
        with self.memory.lock:
            return self._past_and([each.clone() for each in new])

    def truncate(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens, or `[B]` lengths; pages after them are released.

        Raises:
            ValueError: if it is negative, more than is held, the pages of a window before it were
                released, or a shared page must be copied and the pool is full.
        """
        self._check_usable()
        with self.memory.change:
            lengths = self._lengths.truncated(length, self._like)
            self._check_window(length, lengths)
            self._rows.settle()
            rows = each_length(lengths, len(self.rows))
            if self._kind is not None:
                change = cut(self._kind, self.rows, rows)
                if not self.memory.fits(change.copies, change.freed):
                    size = self.memory.page_size  # whole pages make room for the copies
                    whole = [-(-each // size) * size for each in rows]
                    self._cut(self._kind, [*map(min, whole, self.row_lengths())])
                self._cut(self._kind, rows)
            self._lengths = lengths

    def can_truncate(self, length: int | Tensor) -> bool:
        """Whether `truncate(length)` is possible, but for room in the pool."""
        try:
            self._check_usable()
            self._check_window(length, self._lengths.truncated(length, self._like))
        except ValueError:
            return False
        return True

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows, `[N]` integers, in this order; repeated rows share full pages.

        Raises:
            ValueError: if they are not rows that are held, or the pool has too few pages left.
        """
        self._check_usable()
        with self.memory.change:
            check_rows(rows, self._like)
            self._rows.settle()
            if not self._like:
                self._lengths = self._lengths.reordered(rows)
                return
            numbers: list[int] = rows.tolist()
            change = select(self.rows, numbers)
            if not self.memory.fits(change.copies, change.freed):
                first = list(dict.fromkeys(numbers))  # rows that are dropped make room for copies
                self._select(first)
                numbers = [first.index(each) for each in numbers]
            self._select(numbers)

    def fork(self) -> "PagedCache":
        """A copy that goes on by itself: sealed pages are shared, open ones copied.

        Raises:
            ValueError: if the pool has too few pages left.
        """
        self._check_usable()
        with self.memory.change:
            every = select(self.rows, range(len(self.rows)), copies_all=True)
            tables = every.carry_out(self.memory)
            new = PagedCache(self.pool, window=self.window, rollback=self.rollback)
            new._rows.replace(tables)
            new.pieces, new._kind = self.pieces, self._kind
            new._lengths, new._like = self._lengths, self._like
            return new

    def release(self) -> None:
        """Release the pages; the cache cannot be used after it.

        Raises:
            ValueError: if it was released before.
        """
        self._check_usable()
        with self.memory.lock:
            self._rows.release()
            self._lengths, self._like = Lengths(), ()

    @property
    def empty_streams(self) -> tuple[Tensor, ...]:
        return self._like

    @property
    def arguments(self) -> dict[str, Any]:
        return {**arguments_of(self.memory), "window": self.window, "rollback": self.rollback}

    def record(self) -> Record:
        """The tables and each page once, as it is stored, for a file of the cache."""
        self._check_usable()
        with self.memory.lock:
            return cache_record(self.memory, self.rows, self._kind, self._lengths, self.pieces)

    def fill(self, record: Record) -> None:
        """Take the content of a file into this new cache, and into new pages of its pool.

        Raises:
            ValueError: if it is no record of such a cache, or the pool has too few pages left.
        """
        self._check_usable()
        with self.memory.change:
            self._kind, tables, self._lengths, self.pieces = filled(
                self.memory, self.window, record
            )
            if self._kind is not None:
                outlines = self._kind.open.outlines
                self._like = tuple(each.empty(len(tables)) for each in outlines)
            self._rows.replace(tables)

    def snapshot(self) -> object:
        """The present state."""
        tables = [table.copied() for table in self.rows]
        return tables, self.pieces, self._kind, self._lengths, self._like

    def restore(self, snapshot: object) -> None:
        """Undo the updates since `snapshot` was called; nothing else may have happened."""
        assert isinstance(snapshot, tuple)
        tables, self.pieces, self._kind, self._lengths, self._like = snapshot
        with self.memory.lock:
            self._rows.replace(tables)
            for table, length in zip(tables, self.row_lengths(), strict=True):
                if length % self.memory.page_size and table.pages:
                    table.pages[-1].sealed = False

    def __copy__(self) -> "PagedCache":
        return self.fork()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a PagedCache cannot be pickled, because its memory is its pool's; give "
            "cache.save(path, weights=...), and load it into PagedCache(pool)"
        )

    def _past_and(self, new: Sequence[Tensor]) -> tuple[Part, ...]:
        """The tokens held, and the new ones as they were given. If rows differ in length, the slots
        from the end of the shortest row on are one part in new tensors."""
        lengths, stop = self._lengths, self.length + new[0].shape[2]
        start, own = self._needed(lengths.shortest), tuple(each.detach() for each in new)
        if lengths.rows is not None:
            own = self._joined_with(own)  # copies: only the parts read last hold their pages
        if start == lengths.shortest:
            return (Part(start, stop, own),)
        past = self._rows.parts(start, lengths.shortest, self._like)
        return past if lengths.shortest == stop else (*past, Part(lengths.shortest, stop, own))

    def _joined_with(self, new: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tokens after the end of the shortest row, and the new tokens of each row."""
        lengths, start = self._lengths, self._lengths.shortest
        assert lengths.rows is not None
        parts = (part.streams[:] for part in self._rows.parts(start, self.length, self._like))
        held = [torch.cat(each, 2) for each in zip(*parts, strict=True)]
        missing = self.length - start - held[0].shape[2]  # slots before a window of 1 token
        held = [torch.nn.functional.pad(each, (0, 0, 0, missing)) for each in held]
        return concatenated(held, new, Lengths(self.length - start, 0, lengths.rows - start))

    def cost_of_cut(self, length: int) -> TableChange:
        """The pages that `truncate(length)` takes and releases."""
        return cut(self._kind, self.rows, [min(length, each) for each in self.row_lengths()])

    def _cut(self, kind: Kind, lengths: list[int]) -> None:
        self._rows.replace(cut(kind, self.rows, lengths).carry_out(self.memory))
        self._lengths = lengths_of(torch.tensor(lengths, dtype=torch.int64, device="cpu"))

    def _select(self, rows: list[int]) -> None:
        self._rows.replace(select(self.rows, rows).carry_out(self.memory))
        self._like = tuple([each.new_empty(len(rows), *each.shape[1:]) for each in self._like])
        self._lengths = self._lengths.reordered(torch.tensor(rows, dtype=torch.int64, device="cpu"))

    def _check(self, new: Sequence[Tensor]) -> None:
        self._check_usable()
        check_streams(new, self._like)
        if needs_gradients(new, ()) or is_forward_mode():
            raise ValueError(
                "PagedCache writes in place, so that gradients do not flow; use KVCache(), or "
                "torch.no_grad()"
            )

    def _check_usable(self) -> None:
        if self._rows.are_released:
            raise ValueError("this PagedCache was released; make a new one over its pool")

    def _check_window(self, length: object, lengths: Lengths) -> None:
        """Raise unless the tables hold the windows of the next tokens."""
        if self.window is None:
            return
        stops, size = each_length(lengths, len(self.rows)), self.memory.page_size
        if len(stops) != len(self.rows):
            raise ValueError(
                f"length={length} is of rows, and this cache of a prefix has none before its first "
                "update; truncate to a whole number"
            )
        for table, stop in zip(self.rows, stops, strict=True):
            oldest = self._needed(stop)
            if oldest < min(stop, table.first * size):
                raise ValueError(
                    f"length={length} needs keys from slot {oldest} on, those before "
                    f"{table.first * size} were released; give PagedCache(pool, "
                    f"window={self.window}, rollback={self.length - stop}) or more"
                )

    def _without_pages_before_window(self, tables: list[PageTable]) -> list[PageTable]:
        if self.window is None:
            return tables
        behind, size = self.window - 1 + self.rollback, self.memory.page_size
        lengths = self.row_lengths(len(tables))
        found = [
            table.since(max(0, length - behind) // size)
            for table, length in zip(tables, lengths, strict=True)
        ]
        return tables if all(map(lambda a, b: a is b, found, tables)) else found

    def _needed(self, length: int) -> int:
        """The oldest slot that the token after `length` tokens may attend to."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def row_lengths(self, count: int | None = None) -> list[int]:
        """The number of tokens of each row; `count` rows of a cache that has none yet."""
        return each_length(self._lengths, len(self.rows) if count is None else count)

    def __repr__(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        rollback = f", rollback={self.rollback}" if self.rollback else ""
        return f"PagedCache({self.pool!r}{window}{rollback})"
