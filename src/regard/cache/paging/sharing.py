"""Stored prefixes as caches: finding the longest one, and storing the pages of caches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.cache.paging.bookkeeping import Pages
from regard.cache.paging.contexts import Context
from regard.cache.paging.paged import PagedCache
from regard.cache.paging.pages import Page, PageTable
from regard.words import counted


class Prefix:
    """The longest stored prefix of a text, whose pages stay in the pool while this exists.

    `PagePool.prefix` returns it.

    Examples:
        >>> from regard.cache import Context, PagePool, Prefix
        >>> context = Context("5e1f")
        >>> prefix = PagePool(num_pages=8).prefix(range(100), context=context)
        >>> isinstance(prefix, Prefix), prefix.length
        (True, 0)
    """

    def __init__(self, length: int, caches: Sequence[PagedCache]) -> None:
        self._length, self._caches = length, tuple(caches)

    @property
    def length(self) -> int:
        """The tokens of the prefix; 0 if nothing is stored."""
        return self._length

    def caches(self, rows: int = 1, *, rollback: int = 0) -> list[PagedCache]:
        """New caches, one for each layer, that hold the prefix in so many rows.

        Args:
            rows: of the batch.
            rollback: of layers with a window, as for `PagedCache`.

        Raises:
            ValueError: if nothing is stored, so that the number of layers is not known.
        """
        if not self.length:
            raise ValueError("no prefix is stored; make PagedCache(pool) for each layer")
        found = [cache.fork() for cache in self._caches]
        for cache in found:
            cache.rollback = rollback
            if rows != 1:
                cache.reorder(torch.zeros(rows, dtype=torch.int64, device="cpu"))
        return found

    def __repr__(self) -> str:
        return f"Prefix(length={self.length}, layers={len(self._caches)})"


def prefix_of(pool: Pages, tokens: Sequence[int] | Tensor, context: Context) -> Prefix:
    """See `PagePool.prefix`."""
    with pool.lock:
        pool.settle()
        pool.bind(context)
        match = pool.prefixes.find(numbers_of(tokens), context)
        caches = [
            PagedCache.of_pages(pool, [_table(first, pages)], match.length, window)
            for window, first, pages in (match.layers if match.length else ())
        ]
        return Prefix(match.length, caches)


def store(
    pool: Pages,
    tokens: Sequence[int] | Tensor,
    caches: Sequence[PagedCache],
    context: Context,
    row: int = 0,
) -> int:
    """See `PagePool.store`."""
    numbers = numbers_of(tokens)
    for index, cache in enumerate(caches):
        _check_cache(pool, index, cache, row, len(numbers))
    with pool.lock:
        pool.settle()
        pool.bind(context)
        size = pool.page_size
        length = min([len(numbers), *(int(cache.row_lengths()[row]) for cache in caches)])
        count = length // size
        layers = [_layer(cache, row, count) for cache in caches]
        pool.prefixes.insert(numbers[: count * size], context, layers)
        return count * size


def numbers_of(tokens: Sequence[int] | Tensor) -> list[int]:
    """Tokens `[L]` as Python numbers.

    Raises:
        ValueError: if they are not one row of whole numbers.
    """
    if not isinstance(tokens, Tensor):
        return [int(each) for each in tokens]
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(
            f"tokens are whole numbers [L], got {tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    numbers: list[int] = tokens.tolist()
    return numbers


def _table(first: int, pages: Sequence[Any]) -> PageTable:
    """The pages of a match, none of which is missing."""
    assert all(isinstance(page, Page) for page in pages)
    return PageTable(list(pages), first)


def _layer(cache: PagedCache, row: int, count: int) -> Any:
    """The window of a layer, and its sealed pages among the first `count`."""
    table = cache.rows[row]
    return cache.window, table.first, table.pages[: max(0, count - table.first)]


def _check_cache(pool: Pages, index: int, cache: PagedCache, row: int, tokens: int) -> None:
    if not isinstance(cache, PagedCache) or cache.pool is not pool:
        raise ValueError(
            f"caches[{index}] is {cache!r}, whose pages are not in this pool; give caches that "
            "were made with PagedCache(pool)"
        )
    if not 0 <= row < len(cache.rows):
        rows = counted(len(cache.rows), "row")
        raise ValueError(
            f"caches[{index}] has {rows}, counted from 0, got row={row}; give one held"
        )
