"""Stored prefixes as caches: the longest one is found, pages of caches are stored; and as files."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from regard.cache.files import TensorFile, is_naturals
from regard.cache.paging.bookkeeping import Pages
from regard.cache.paging.contexts import Context
from regard.cache.paging.files import Numbered, check_shapes, groups_from, taken
from regard.cache.paging.paged import PagedCache
from regard.cache.paging.pages import Page, PageTable
from regard.cache.paging.prefixes import numbers_of
from regard.cache.paging.tree import Layer
from regard.cache.saving import Record
from regard.words import counted

_NONE = -1  # in a file, the number of a page that a window layer does not have


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


# ---- the stored prefixes of a pool ----


def pool_record(pool: Pages) -> tuple[Record, int]:
    """The stored prefixes of a pool, for its file, and the number of their pages; lock held."""
    entries = list(pool.prefixes.entries())
    every: list[Any] = [p for entry in entries for each in entry.layers for p in each.pages]
    numbered = Numbered(pool, (page for page in every if page is not None))
    numbers = [_NONE if page is None else numbered.numbers[page] for page in every]
    texts = [
        {
            "key": entry.context.key,
            "tokens": len(entry.tokens),
            "layers": [[each.window, each.first, len(each.pages)] for each in entry.layers],
        }
        for entry in entries
    ]
    tokens = [token for entry in entries for token in entry.tokens]
    rows = [torch.tensor(each, dtype=torch.int64, device="cpu") for each in (tokens, numbers)]
    state = {"entries": texts, "groups": numbered.text()}
    return Record(state, [*rows, *numbered.streams()]), len(numbered.numbers)


def stored_from(pool: Pages, file: TensorFile, entry: dict[str, Any], device: torch.device) -> int:
    """Store the prefixes of a file, all of them or none; returns the number of pages that were not
    stored before. The pool's lock is held.

    Args:
        pool: which has the arguments of the one that was saved.
        file: of its weights.
        entry: of the pool in the file.
        device: of the pages.

    Raises:
        ValueError: if they could not be the prefixes of such a pool, or it has too few pages.
    """
    state, names, weights = entry["state"], entry["streams"], file.metadata["weights"]
    if pool.weights not in (None, weights):
        raise ValueError(
            f"the pool holds pages of the model with weights {pool.weights!r:.14}, the file "
            f"{weights!r:.14}; give each model a pool of its own"
        )
    groups = groups_from(state.get("groups"), pool, device)
    if len(names) < 2:
        raise ValueError(f"a pool has tokens, pages and streams, got {len(names)} tensors")
    check_shapes(groups, pool.page_size, [file.entries[name] for name in names[2:]])
    tokens, numbers = (_integers(file, name) for name in names[:2])
    kinds = [group.outlines for group in groups for _ in range(group.size)]
    entries: list[Any] = []
    used: set[int] = set()
    for text in _checked_entries(state.get("entries"), pool.page_size):
        mine, layers = list(islice(tokens, text["tokens"])), []
        for window, first, count in text["layers"]:
            found = list(islice(numbers, count))
            own = {number for number in found if number != _NONE}
            _check_layer(window, found, count, kinds)
            used |= own
            layers.append((window, first, found))
        entries.append((Context(weights, text["key"]), mine, layers))
        if len(mine) != text["tokens"]:
            raise ValueError("there are fewer tokens than the entries have")
    if len(used) != len(kinds) or next(tokens, None) is not None or next(numbers, None) is not None:
        raise ValueError("tokens or pages belong to no entry")
    pages = taken(pool, groups, (file.pieces(name) for name in names[2:]), cold=True)
    try:
        return _inserted(pool, entries, pages)
    finally:
        for page in pages:
            pool.release(page)


def _inserted(pool: Pages, entries: Sequence[Any], pages: Sequence[Page]) -> int:
    before, count = pool.weights, 0
    for page in pages:
        page.sealed = True
    try:
        for context, tokens, layers in entries:
            pool.bind(context)
            given = [
                Layer(window, first, [None if n == _NONE else pages[n] for n in numbers])
                for window, first, numbers in layers
            ]
            count += len(pool.prefixes.insert(tokens, context, given))
    except ValueError:
        pool.weights = before
        for page in pages:
            pool.prefixes.forget(page)
        raise
    return count


def _checked_entries(texts: Any, page_size: int) -> list[dict[str, Any]]:
    """The entries, each with a key, a number of tokens, and window, first page and number of pages
    of each layer. Raises a ValueError if they have another form."""
    if not isinstance(texts, list):
        raise ValueError(f"entries are a list, got {texts!r:.200}")
    for text in texts:
        if not isinstance(text, dict) or set(text) != {"key", "tokens", "layers"}:
            raise ValueError(f"an entry has a key, tokens and layers, got {text!r:.200}")
        if not isinstance(text["key"], str):
            raise ValueError(f"the key of an entry is text, got {text['key']!r:.200}")
        if not is_naturals([text["tokens"]]) or not isinstance(text["layers"], list):
            raise ValueError(f"an entry has a number of tokens and layers, got {text!r:.200}")
        for layer in text["layers"] or [None]:
            if not _is_layer(layer, text["tokens"] // page_size):
                rule = "a layer has a window, a first page and pages"
                raise ValueError(f"{rule}, got {layer!r:.200}")
    return texts


def _is_layer(value: Any, pages: int) -> bool:
    if not isinstance(value, list) or len(value) != 3 or not is_naturals(value[1:]):
        return False
    windowed = is_naturals(value[:1]) and value[0] > 0
    return (value[0] is None or windowed) and value[1] + value[2] <= pages


def _check_layer(
    window: int | None, found: Sequence[int], count: int, kinds: Sequence[Any]
) -> None:
    """Raise unless a layer's pages are there, and of one kind."""
    own = [number for number in found if number != _NONE]
    if len(found) != count or any(not 0 <= number < len(kinds) for number in own):
        raise ValueError(f"{count} pages are numbers below {len(kinds)}, got {found!r:.200}")
    if len({kinds[number] for number in own}) > 1 or len(set(own)) != len(own):
        raise ValueError("the pages of a layer are different ones, of one kind")
    if window is None and len(own) != len(found):
        raise ValueError("a layer without a window has all pages of a prefix")


def _integers(file: TensorFile, name: str) -> Iterator[int]:
    """The numbers of a tensor of a file."""
    entry = file.entries[name]
    if entry.dtype != torch.int64 or len(entry.shape) != 1:
        raise ValueError(f"{name} is a row of 64-bit integers, got {entry.dtype} {entry.shape}")
    return iter(file.read(name).tolist())
