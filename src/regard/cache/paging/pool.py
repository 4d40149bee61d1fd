"""A pool of pages that many sequences share, and the prefixes that are stored in it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from regard.cache.files import open_tensors
from regard.cache.paging.contexts import Context
from regard.cache.paging.files import arguments_of, load_prefixes, pool_record
from regard.cache.paging.formats import PageFormat
from regard.cache.paging.memory import Memory, PoolBytes
from regard.cache.paging.offloading import Offload
from regard.cache.paging.paged import PagedCache
from regard.cache.paging.pages import PageTable
from regard.cache.paging.prefixes import Layer, numbers_of
from regard.cache.saving import read_entries, write_entries
from regard.cache.streams import check_whole
from regard.words import counted


class Prefix:
    """The longest stored prefix of a text, whose pages stay in the pool while this exists.

    `PagePool.prefix` returns it.

    Attributes:
        length: the tokens of the prefix; 0 if nothing is stored.

    Examples:
        >>> from regard.cache import Context, PagePool
        >>> PagePool(num_pages=8).prefix(range(100), context=Context("5e1f"))
        Prefix(length=0, layers=0)
    """

    length: int

    def __init__(self, length: int, caches: Sequence[PagedCache]) -> None:
        self.length, self._caches = length, tuple(caches)

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


class PagePool:
    """Memory in pages of `page_size` tokens, which many sequences and layers share.

    A page holds tokens of one row of one layer. A full page is sealed: it does not change any more,
    may be shared between sequences, and is stored in the pool's format. The page that a row is
    writing is open, belongs to it alone, and is in full precision; so is the first page of a
    sequence, whose tokens get much attention (StreamingLLM, arXiv:2309.17453). Where the tokens of
    a page share scales, a page with a number that is not finite or is 1e38 or more in size stays in
    full precision; elsewhere such a number makes the channels that share its scale NaN. Buffers are
    allocated when they are needed and double when they are full. All methods may be called by
    several threads.

    Args:
        num_pages: the most pages in use, of all sequences, rows and layers.
        page_size: tokens of a page.
        format: of sealed pages: `"plain"`, or the bits of keys and of values, such as `"K8V4"`.
        offload: how many pages stay in the memory of the layers' device, `Offload(...)`; None if
            all do.

    Attributes:
        weights: the fingerprint of the model that the pages are of; None before a prefix is stored
            or looked for.

    Raises:
        ValueError: if a number is below 1 or the format unknown.

    Examples:
        >>> import torch
        >>> from regard import PagedCache, PagePool
        >>> pool = PagePool(num_pages=8, page_size=4)
        >>> cache, k = PagedCache(pool), torch.zeros(1, 2, 10, 8)
        >>> _ = cache.update(k, k)
        >>> other = cache.fork()  # shares two sealed pages, copies the open one
        >>> pool.pages_in_use, pool.nbytes.held == 4 * 4 * 2 * 2 * 8 * 4
        (4, True)
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 64,
        *,
        format: str | PageFormat = "plain",
        offload: Offload | None = None,
    ) -> None:
        self.memory = Memory(num_pages, page_size, format, offload)
        self.weights: str | None = None

    @property
    def num_pages(self) -> int:
        """The most pages in use."""
        return self.memory.num_pages

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.memory.page_size

    @property
    def format(self) -> PageFormat:
        """The format of sealed pages."""
        return self.memory.format

    @property
    def pages_in_use(self) -> int:
        """Pages that sequences hold, or that may be reused."""
        with self.memory.lock:
            self.memory.settle()
            return len(self.memory.pages)

    @property
    def nbytes(self) -> PoolBytes:
        """Bytes of pages held, reusable and free."""
        with self.memory.lock:
            return self.memory.nbytes()

    @property
    def cold_pages(self) -> int:
        """Pages in use that are offloaded."""
        with self.memory.lock:
            self.memory.settle()
            offloading = self.memory.offloading
            return 0 if offloading is None else offloading.cold_pages

    def evict(self, keep: int = 0) -> int:
        """Free reusable pages, least recently used first, until so many are left.

        Args:
            keep: reusable pages that stay, at most: a whole number from 0; others are a ValueError.

        Returns:
            The number of pages that were freed.
        """
        check_whole("keep", keep, least=0)
        with self.memory.lock:
            self.memory.settle()
            before = len(self.memory.pages)
            self.memory.evict(sum(not page.references for page in self.memory.pages) - keep)
            return before - len(self.memory.pages)

    def bind(self, context: Context) -> None:
        """Let the pool belong to the model with these weights.

        Raises:
            TypeError: if `context` is no `Context`.
            ValueError: if it holds pages of another one.
        """
        if not isinstance(context, Context):
            raise TypeError(f"context is a Context, as context_of(model) makes it, got {context!r}")
        with self.memory.lock:
            self.memory.settle()
            if self.memory.pages and self.weights not in (None, context.weights):
                raise ValueError(
                    f"the pool holds pages of the model with weights {self.weights:.12}, this one "
                    f"has {context.weights:.12}; give each model a pool of its own, and a new one "
                    "after training or another dtype"
                )
            self.weights = context.weights

    def prefix(self, tokens: Sequence[int] | Tensor, *, context: Context) -> Prefix:
        """The longest stored prefix of a text, in whole pages, without its last token.

        Full layers need all pages of it, layers with a window only those of the last window: of the
        lengths that each kind of layer has, the smallest counts. The last token is left out because
        its logits are wanted.

        Args:
            tokens: `[L]`, of one text.
            context: everything else that keys and values depend on, as `context_of` describes it.

        Raises:
            ValueError: if the context is of other weights than the pool's pages.

        Examples:
            >>> import torch
            >>> from regard import Attention, Causal, PagedCache, PagePool
            >>> from regard.cache import context_of
            >>> pool, layer = PagePool(num_pages=8, page_size=4), Attention(8, 2, mask=Causal())
            >>> context, tokens, x = context_of(layer), list(range(10)), torch.randn(1, 10, 8)
            >>> cache = PagedCache(pool)
            >>> with torch.no_grad():
            ...     full = layer(x, cache=cache)
            ...     pool.store(tokens, [cache], context=context)
            ...     prefix = pool.prefix(tokens, context=context)
            ...     (found,) = prefix.caches()
            ...     rest = layer(x[:, 8:], cache=found)
            8
            >>> prefix.length, torch.allclose(rest, full[:, 8:], atol=1e-6)
            (8, True)
        """
        with self.memory.lock:
            self.bind(context)
            length, layers = self.memory.prefixes.find(tokens, context)
            return Prefix(length, [self._cache_of(length, layer) for layer in layers])

    def _cache_of(self, length: int, layer: Layer) -> PagedCache:
        pages = [page for page in layer.pages if page is not None]
        return PagedCache.of_pages(self, [PageTable(pages, layer.first)], length, layer.window)

    def store(
        self,
        tokens: Sequence[int] | Tensor,
        caches: Sequence[PagedCache],
        *,
        context: Context,
        row: int = 0,
    ) -> int:
        """Let other texts find the sealed pages of these caches; returns how many tokens they hold.

        The pages stay in the pool until their room is needed, or `evict` is called.

        Args:
            tokens: `[L]`, the tokens of that row, from the first one on.
            caches: one for each layer.
            context: as for `prefix`.
            row: of the caches.

        Raises:
            ValueError: if a cache is of another pool, there is no such row, or as `prefix`.
        """
        if isinstance(caches, PagedCache):
            raise TypeError("caches is a list with one cache for each layer; give [cache]")
        numbers = numbers_of(tokens)
        for index, cache in enumerate(caches):
            if not isinstance(cache, PagedCache) or cache.memory is not self.memory:
                raise ValueError(
                    f"caches[{index}] is {cache!r}, whose pages are not in this pool; give caches "
                    "that were made with PagedCache(pool)"
                )
            if not 0 <= row < len(cache.rows):
                raise ValueError(
                    f"caches[{index}] has {counted(len(cache.rows), 'row')}, counted from 0, got "
                    f"row={row}; give one held"
                )
        with self.memory.lock:
            self.bind(context)
            lengths = [len(numbers), *(cache.row_lengths()[row] for cache in caches)]
            whole = min(lengths) // self.page_size * self.page_size
            tables = [cache.rows[row].cut(whole, self.page_size) for cache in caches]
            layers = [
                Layer(cache.window, table.first, table.pages)
                for cache, table in zip(caches, tables, strict=True)
            ]
            self.memory.prefixes.insert(numbers[:whole], context, layers)
            return whole

    def save(self, path: str | Path) -> int:
        """Write the stored prefixes to a file, in the safetensors format, each page once.

        Args:
            path: of the file, which appears there when it is complete; one that is there is
                replaced. Only its owner can read it: it holds the tokens and the contexts' keys.

        Returns:
            The number of pages written.

        Raises:
            OSError: if the disk is full or read-only; a file of that name is as before.
            ValueError: if nothing was ever stored or looked for, so that there is no model.
        """
        with self.memory.lock:
            self.memory.settle()
            if self.weights is None:
                raise ValueError(
                    "the pool belongs to no model yet; store a prefix before it is saved"
                )
            record, pages = pool_record(self.memory)
            write_entries(path, [("PagePool", arguments_of(self.memory), record)], self.weights)
            return pages

    def load(
        self,
        path: str | Path,
        *,
        weights: Context | str | nn.Module,
        device: torch.device | str = "cpu",
    ) -> int:
        """Store the prefixes of a file that `save` wrote: all of them, or none.

        Args:
            path: of the file. It is checked before anything is allocated, and may come from
                elsewhere.
            weights: the model that will read them, its fingerprint, or a context of it.
            device: of the pages.

        Returns:
            The number of pages that were not stored before. No sequence holds them, so that they
            are evicted where room is needed.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if the file is of other weights, another page size or format, an unknown
                version, or damaged, or the pool has too few pages left. The pool is as before.

        Examples:
            >>> import tempfile
            >>> from pathlib import Path
            >>> import torch
            >>> from regard import Attention, Causal, PagedCache, PagePool
            >>> from regard.cache import context_of
            >>> pool, layer = PagePool(num_pages=8, page_size=4), Attention(8, 2, mask=Causal())
            >>> context, cache = context_of(layer), PagedCache(pool)
            >>> with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            ...     _ = layer(torch.randn(1, 10, 8), cache=cache)
            ...     stored = pool.store(range(10), [cache], context=context)
            ...     pages = pool.save(Path(folder, "pool.safetensors"))
            ...     again = PagePool(num_pages=8, page_size=4)
            ...     loaded = again.load(Path(folder, "pool.safetensors"), weights=layer)
            >>> again.prefix(range(10), context=context).length, pages, loaded
            (8, 2, 2)
        """
        expected = weights.weights if isinstance(weights, Context) else weights
        memory = self.memory
        with open_tensors(path) as file, memory.change:
            memory.settle()
            (entry,) = read_entries(file, [("PagePool", arguments_of(memory))], expected)
            found = file.metadata["weights"]
            if self.weights not in (None, found):
                raise ValueError(
                    f"the pool holds pages of the model with weights {self.weights!r:.14}, the "
                    f"file {found!r:.14}; give each model a pool of its own"
                )
            try:
                count = load_prefixes(memory, file, entry, torch.device(device))
            except ValueError as error:
                raise ValueError(f"{file.path}: {error}") from error
            self.weights = found
            return count

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a PagePool cannot be pickled or copied, because caches refer to its pages; give "
            "pool.save(path), or make another PagePool"
        )

    def __repr__(self) -> str:
        form = "" if self.format.name == "plain" else f", format={self.format.name!r}"
        return f"PagePool({self.num_pages}, {self.page_size}{form})"
