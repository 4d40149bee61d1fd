"""Caches in pages for `generate`, which find and store the prefixes of prompts by themselves.

No method of a cache gets tokens. The hooks around the calls of its model see them.
"""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.cache.paging.contexts import Context
from regard.cache.paging.paged import PagedCache
from regard.cache.paging.pool import PagePool
from regard.cache.paging.tables import TableChange, select
from regard.hf.generating.caches import CacheLayer
from regard.hf.generating.generation_cache import GenerationCache
from regard.hf.generating.texts import Text, text_of, tokens_wanted, without_first

WHOLE = 1 << 62  # tokens: more than any text has


class PagedGenerationCache(GenerationCache):
    """A cache in pages of a pool for every layer of a model, made by `regard.hf.cache`.

    The first call of the model with this cache skips the tokens of the longest prefix that the pool
    stores, if it returns nothing of them: if it has `logits_to_keep`, as the calls of `generate`
    have. Every page that is full is stored, so that later caches over the pool find it.

    Attributes:
        pool: where the pages lie.
        found: the number of tokens of the present text that were found in the pool.
    """

    def __init__(
        self,
        layers: list[CacheLayer],
        model: nn.Module,
        pool: PagePool,
        described: Callable[[], Context] | None,
    ) -> None:
        self.pool, self.found = pool, 0
        self._described = described  # the context, as it is now; None: no prefixes
        self._context: Context | None = None  # of the present text
        self._text: Text | None = Text()
        self._next: Text | None = None  # the text once the call that is running has returned
        self._stored = 0  # pages
        self._rollbacks: list[int] = []  # of the caches, while windows are recorded
        if described is not None:
            pool.bind(described())
        super().__init__(layers, model)

    @property
    def _pages(self) -> list[Any]:
        """The caches in pages: of the layers with keys."""
        return [layer.cache for layer in self._attending]

    # ---- calls of the model ----

    def begin(self, given: dict[str, Any]) -> dict[str, Any]:
        """A call of the model begins; returns its arguments, without the tokens that are found.
        Raises as `GenerationCache.begin`, and if the weights are not those that the pool is of."""
        given = super().begin(given)
        past, model = self.get_seq_length(), self.model
        if self._described is None or self._text is None or model is None:
            return given
        new = text_of(model, given, past) if self._text.length == past else None
        if new is None:
            return given
        self._next = self._text.followed_by(new)
        if past:
            return given
        self._context, self.found = self._described(), 0
        # layers with a window hold all pages of a prompt, until they are stored
        self._rollbacks = [cache.rollback for cache in self.caches]
        for cache in self.caches:
            cache.rollback = WHOLE
        wanted = tokens_wanted(model, given)
        count = 0 if wanted is None else self._find(new, wanted)
        return without_first(given, count) if count else given

    def done(self) -> None:
        """The call of the model has returned: its pages that are full are stored."""
        super().done()
        first = self._text is not None and not self._text.length
        self._text, self._next = self._next, None
        if self._text is None:
            return
        if first:
            self._share_rows()
        pages = self.get_seq_length() // self.pool.page_size
        if pages > self._stored:
            self._store(checked=first)  # `begin` read the weights
            self._stored = pages
        self._release_windows()

    def undo(self) -> bool:
        """As `GenerationCache.undo`."""
        changed = super().undo()
        self._next = None
        self._release_windows()
        return changed

    # ---- prefixes ----

    def _find(self, text: Text, wanted: int) -> int:
        """Hold the longest prefix that is stored for all rows; returns its length."""
        rows, whole = text.numbers()
        if not rows or not all(whole):
            return 0
        found = self._prefixes(rows, len(rows[0]) - wanted + 1)
        length = found[0].length
        if length:
            self._hold([prefix.caches() for prefix in found], length)
            self._stored = length // self.pool.page_size
        self.found = length
        return length

    def _prefixes(self, rows: list[list[int]], limit: int) -> list[Any]:
        """The prefix of each row, of one length, within the first `limit` tokens but one."""
        assert self._context is not None
        texts = {tuple(row) for row in rows}
        while True:
            found = {row: self.pool.prefix(row[:limit], context=self._context) for row in texts}
            shortest = min(each.length for each in found.values())
            if all(each.length == shortest for each in found.values()):
                return [found[tuple(row)] for row in rows]
            limit = shortest + 1

    def _hold(self, rows: list[list[PagedCache]], length: int) -> None:
        """Let each layer hold a prefix of each row: rows with the same one share its pages."""
        with self.pool.memory.lock:
            for layer, *caches in zip(self.layers, *rows, strict=True):
                tables = [table for cache in caches for table in cache.rows]
                cache = PagedCache.of_pages(self.pool, tables, length, caches[0].window)
                cache.rollback = layer.cache.rollback
                layer.cache, layer.is_initialized, layer.batch_size = cache, True, len(rows)

    def _store(self, *, checked: bool) -> None:
        """Store the pages that are full, of rows whose tokens are known, unless the weights have
        changed since the first call."""
        assert self._text is not None and self._described is not None and self._context is not None
        self._text = self._text.joined()
        if not checked and self._described() != self._context:
            self._text = None
            return
        rows, whole = self._text.numbers()
        for row, tokens in enumerate(rows):
            if whole[row]:
                self.pool.store(tokens, self.caches, context=self._context, row=row)

    def _share_rows(self) -> None:
        """Let rows with the same prompt share its pages: beams, several samples."""
        assert self._text is not None
        rows, whole = self._text.numbers()
        if len(rows) < 2 or not all(whole):
            return
        first: dict[tuple[int, ...], int] = {}
        same = [first.setdefault(tuple(tokens), row) for row, tokens in enumerate(rows)]
        if len(first) < len(rows):
            self._reorder(torch.tensor(same, device="cpu"))

    def _release_windows(self) -> None:
        for cache, rollback in zip(self.caches, self._rollbacks, strict=False):
            cache.rollback = rollback
        self._rollbacks = []

    # ---- operations on all layers or none ----

    def truncate(self, length: int) -> None:
        """As `GenerationCache.truncate`; raises too if a shared page must be copied and the pool
        is full."""
        self._settle()
        start = self._start_of(length)
        with self.pool.memory.lock:
            self._check_room(cache.cost_of_cut(start) for cache in self._pages)
            super().truncate(length)
        self._text = None if self._text is None else self._text.cut(length)
        self._stored = min(self._stored, length // self.pool.page_size)

    def reorder(self, rows: Tensor) -> None:
        """As `GenerationCache.reorder`; raises too if the pool has too few pages."""
        self._settle()
        self._reorder(rows)
        self._text = None if self._text is None else self._text.rows(rows)

    reorder_cache = reorder

    def _reorder(self, rows: Tensor) -> None:
        with self.pool.memory.lock:
            self._check_rows(rows)
            numbers = rows.tolist()
            self._check_room(select(cache.rows, numbers) for cache in self._pages)
            super().reorder(rows)

    def _check_room(self, changes: Iterable[TableChange]) -> None:
        """Raise unless the pool has room for changes of all layers, one after another."""
        taken = freed = 0
        for change in changes:
            taken += change.copies
            self.pool.memory.check_room(taken, freed=freed + change.freed)
            freed += change.unreferenced  # the stored ones can be evicted from now on

    def reset(self) -> None:
        """As `GenerationCache.reset`."""
        super().reset()
        self._text, self._stored, self.found = Text(), 0, 0

    def load(self, path: str | Path) -> None:
        """As `GenerationCache.load`. A file does not have the text's tokens, so that its pages are
        not stored as a prefix."""
        super().load(path)
        self._text = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "PagedGenerationCache":
        new = copy.copy(self)
        new.layers = copy.deepcopy(self.layers, memo)
        return new
