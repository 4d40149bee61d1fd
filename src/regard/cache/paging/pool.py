"""A pool of pages that many sequences share, and the prefixes that are stored in it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from regard.cache.files import open_tensors
from regard.cache.paging import sharing
from regard.cache.paging.bookkeeping import Pages
from regard.cache.paging.contexts import Context
from regard.cache.paging.files import arguments_of
from regard.cache.paging.paged import PagedCache
from regard.cache.paging.sharing import Prefix
from regard.cache.saving import read_entries, write_entries
from regard.words import counted


class PagePool(Pages):
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

    def describe(self) -> str:
        """The pages in use and their bytes, in a few lines."""
        with self.lock:
            size, pages = self.nbytes, self._pages
            held = [page for page in pages if page.references]
            sealed = sum(page.sealed for page in held)
            shared = sum(page.references > 1 for page in held)
            lines = [
                f"{self!r}: {counted(len(pages), 'page')} in use of {self.num_pages:,}",
                f"held      {size.held:>14,} bytes: {sealed:,} sealed pages, of which {shared:,} "
                f"shared; {len(held) - sealed:,} open",
                f"reusable  {size.reusable:>14,} bytes: {counted(len(pages) - len(held), 'page')}",
                f"free      {size.free:>14,} bytes",
            ]
            if self.offloading is not None:
                cold = sum(each.in_use * each.page_bytes for each in self.offloading.slabs)
                lines.append(
                    f"offloaded {cold:>14,} bytes: {self.cold_pages:,} pages in host memory"
                )
            if len(self.prefixes):
                lines.append(f"stored    {self.prefixes.describe()}")
            return "\n".join(lines)

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
        return sharing.prefix_of(self, tokens, context)

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
        return sharing.store(self, tokens, caches, context, row)

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
        with self.lock:
            self.settle()
            if self.weights is None:
                raise ValueError(
                    "the pool belongs to no model yet; store a prefix before it is saved"
                )
            record, pages = sharing.pool_record(self)
            write_entries(path, [("PagePool", arguments_of(self), record)], self.weights)
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
        with open_tensors(path) as file, self.lock:
            self.settle()
            (entry,) = read_entries(file, [("PagePool", arguments_of(self))], expected)
            try:
                return sharing.stored_from(self, file, entry, torch.device(device))
            except ValueError as error:
                raise ValueError(f"{file.path}: {error}") from error

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a PagePool cannot be pickled or copied, because caches refer to its pages; give "
            "pool.save(path), or make another PagePool"
        )

    def __repr__(self) -> str:
        form = "" if self.format.name == "plain" else f", format={self.format.name!r}"
        return f"PagePool({self.num_pages}, {self.page_size}{form})"
