"""Stored prefixes: which pages hold the tokens that a new text begins with.

Prefixes form a tree (SGLang, Zheng et al. 2024, arXiv:2312.07104), one for each context.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count as counter
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache.paging.contexts import Context
from regard.cache.paging.pages import Page
from regard.cache.paging.tree import Kinds, Layer, Node, Tree
from regard.words import counted

_TOKEN = 8  # bytes of a token in a key


class Match(NamedTuple):
    """The longest stored prefix of a text.

    Attributes:
        length: in tokens, a multiple of the page size, at which every layer has what it needs.
        layers: of each layer its window, the number of the first page and the pages; without a
            window all pages, otherwise those that the next token attends to.
        lengths: the longest prefix of each kind of layer alone, by window (None: without one); all
            kinds can resume at `length`, which is at most the smallest.
    """

    length: int = 0
    layers: tuple[Layer, ...] = ()
    lengths: Mapping[int | None, int] = MappingProxyType({})


class Entry(NamedTuple):
    """A stored prefix as it can be inserted again."""

    context: Context
    tokens: list[int]
    layers: tuple[Layer, ...]


class Prefixes:
    """An index of stored prefixes in pages.

    A page belongs to at most one stored prefix. The index reads of a page `sealed` and
    `references`, and writes `node` and `used`. It has no lock: the pool's is held.

    Args:
        page_size: tokens of a page.
        clock: a function that returns a greater number at each call, for `used`.
    """

    def __init__(self, page_size: int, *, clock: Callable[[], int] | None = None) -> None:
        self.page_size = page_size
        self._clock = clock or counter(1).__next__
        self._tree = Tree()

    def __len__(self) -> int:
        """The number of stored prefixes of whole pages."""
        return len(self._tree)

    # ---- finding ----

    def find(self, tokens: Sequence[int] | Tensor, context: Context) -> Match:
        """The longest stored prefix, without the last token, which is left to forward.

        The pages found become the ones used last, and so do those before them.

        Args:
            tokens: `[L]` of a text.
            context: under which they are looked for.

        Raises:
            ValueError: if tokens are not whole numbers.
        """
        chunks = self._chunks(numbers_of(tokens).tobytes()[:-_TOKEN])
        path = self._tree.path(chunks, context)
        if not path:
            return Match()
        length, lengths = _usable(path)
        path = path[:length]
        layers = self._layers(path)
        self._touch(path, (page for layer in layers for page in layer.pages))
        lengths = {window: count * self.page_size for window, count in lengths.items()}
        return Match(length * self.page_size, layers, lengths)

    def _touch(self, path: Sequence[Node], pages: Iterable[Page | None]) -> None:
        """Let these pages be those used last, and the end of the path the last one found."""
        now = self._clock()
        for page in pages:
            assert page is not None and page.sealed, "stored pages are sealed, and a match has them"
            page.used = now
        if path:
            path[-1].resumed = now

    def _chunks(self, tokens: bytes) -> list[bytes]:
        """The whole pages of tokens."""
        size = self.page_size * _TOKEN
        return [tokens[stop - size : stop] for stop in range(size, len(tokens) + 1, size)]

    def _layers(self, path: list[Node]) -> tuple[Layer, ...]:
        """The pages of each layer that the token after a path attends to."""
        if not path:
            return ()
        kinds, columns = path[0].kinds, zip(*(node.pages for node in path), strict=True)
        firsts = [kinds.first(window, len(path)) for window in kinds.windows]
        return tuple(
            Layer(window, first, list(pages[first:]))
            for window, first, pages in zip(kinds.windows, firsts, columns, strict=True)
        )

    # ---- storing ----

    def insert(
        self,
        tokens: Sequence[int] | Tensor,
        context: Context,
        layers: Sequence[tuple[int | None, int, Sequence[Page | None]]],
    ) -> list[Page]:
        """Store the sealed pages of a sequence, all of them or, on an error, none.

        Where the tokens are stored already, their pages stay, and the given ones are not taken.

        Args:
            tokens: `[L]`, from the first one of the sequence on.
            context: under which they are found.
            layers: of each layer its window, the number of its first page and its pages. A layer
                without a window has all of them.

        Returns:
            The pages that were taken: the index holds them until it evicts or forgets them.

        Raises:
            ValueError: if tokens are not whole numbers, other layers are stored under this context,
                a layer without a window lacks its first pages, or a page is given twice or holds
                another stored prefix.
        """
        given = [Layer(*each) for each in layers]
        kinds = self._kinds_of(context, given)
        chunks = self._chunks(numbers_of(tokens).tobytes())
        count = min([len(chunks), *map(_sealed, given)]) if given else 0
        chunks = chunks[:count]
        path = self._tree.path(chunks, context)
        _check_pages(given, count, path)
        path = self._tree.extended(path, chunks, context, kinds)
        if not path:
            return []
        taken = _placed(path, given)
        self._touch(path, [*taken, *(node.pages[i] for node in path for i in kinds.full)])
        self._tree.add_resume_points(path)
        return taken

    def _kinds_of(self, context: Context, layers: list[Layer]) -> Kinds:
        windows = tuple(layer.window for layer in layers)
        for node in self._tree.roots(context).values():
            if node.kinds.windows != windows:
                raise ValueError(
                    f"a prefix has the pages of every layer: this model's have the windows "
                    f"{list(node.kinds.windows)}, got {list(windows)}; give one cache for each "
                    "layer, in order"
                )
            return node.kinds
        return Kinds(windows, self.page_size)

    # ---- evicting ----

    def evict(self) -> list[Page]:
        """Remove the pages to free next from the index; none if sequences hold all that is stored.

        First go pages of window layers that no branch point and no end of a stored sequence needs,
        then the least recently used: the last page of a prefix before those it follows, and branch
        points, which grow old half as fast, later than others. Pages that sequences hold stay
        stored, as long as that leaves any to free.

        Returns:
            Pages without references, at least one of them if there are any; they are free now.
        """
        return self._evict_spare() or self._evict_coldest() or self._evict_forced()

    def _evict_spare(self) -> list[Page]:
        for node in list(self._tree.spare):
            layers = node.unneeded()
            if not layers:
                del self._tree.spare[node]
            free = [i for i in layers if (page := node.pages[i]) and not page.references]
            if free:
                return self._tree.removed(node, free)
        return []

    def _evict_coldest(self) -> list[Page]:
        now = self._clock()
        ends = [node for node in self._tree if node.is_resume_point or not node.children]
        for node in sorted(ends, key=lambda node: _recency(node, now)):
            if not node.children and not any(page.references for page in node.held()):
                return self._tree.dropped(node)
            if node.is_resume_point and _has_windows_of_its_own(node):
                self._tree.release(node)
                return self._evict_spare()
        return []

    def _evict_forced(self) -> list[Page]:
        """Where sequences hold a part of every stored prefix: the rest of one."""
        for node in sorted(self._tree, key=lambda node: (_used(node), -node.depth)):
            if not all(page.references for page in node.held()):
                return self._tree.dropped(node)
        return []

    def forget(self, page: Page) -> list[Page]:
        """Remove a page from the index, which is freed or changed for another reason.

        Args:
            page: in the index or not.

        Returns:
            Other pages without references that can no longer be found, such as those after it in a
            layer without a window; they are free now.
        """
        node = page.node
        if node is None:
            return []
        layer = next(i for i, each in enumerate(node.pages) if each is page)
        if layer in node.kinds.full:
            return [each for each in self._tree.dropped(node) if each is not page]
        self._tree.removed(node, [layer])
        return []

    def clear(self) -> list[Page]:
        """Remove all prefixes; returns their pages without references, which are free now."""
        roots = [node for node in self._tree if node.parent is None]
        return [page for node in roots for page in self._tree.dropped(node)]

    # ---- describing ----

    def entries(self) -> Iterator[Entry]:
        """The stored prefixes, each before those that begin with it: inserted again in this order,
        they make the same index."""
        for node in self._tree:
            if node.is_resume_point or not node.children:
                path = node.path()
                tokens = array("q", b"".join(each.tokens for each in path)).tolist()
                columns = zip(*(each.pages for each in path), strict=True)
                layers = map(Layer, node.kinds.windows, repeat(0), columns)
                yield Entry(node.context, tokens, tuple(layers))

    def describe(self) -> str:
        """The numbers of prefixes, branch points and tokens, of each context."""
        groups: dict[Context, list[Node]] = {}
        for node in self._tree:
            groups.setdefault(node.context, []).append(node)
        total = _numbers([*self._tree], f" of {counted(len(groups), 'context')}")
        each = (f"  {context}: {_numbers(nodes)}" for context, nodes in groups.items())
        return "\n".join([total, *(each if len(groups) > 1 else ())])


def numbers_of(tokens: Sequence[int] | Tensor) -> "array[int]":
    """Tokens `[L]` as 64-bit integers. Raises a ValueError if they are not one row of them."""
    got = type(tokens).__name__
    if isinstance(tokens, Tensor):
        got = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        tokens = (tokens.float() if tokens.dtype is torch.bool else tokens).tolist()
    try:
        return array("q", tokens)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"tokens are whole numbers of 64 bits, [L], got {got}") from error


def _sealed(layer: Layer) -> int:
    """The number of pages up to the first one that is open or, without a window, not there."""
    if layer.window is None and layer.first:
        raise ValueError(
            f"a layer without a window has all pages of a prefix, got those from page "
            f"{layer.first} on; store it before pages are released"
        )
    for number, page in enumerate(layer.pages, layer.first):
        if (layer.window is None) if page is None else not page.sealed:
            return number
    return layer.first + len(layer.pages)


def _column(layers: Sequence[Layer], number: int) -> list[Page | None]:
    """Page `number` of each layer."""
    return [
        pages[number - first] if 0 <= number - first < len(pages) else None
        for _, first, pages in layers
    ]


def _check_pages(layers: Sequence[Layer], count: int, path: Sequence[Node]) -> None:
    """Refuse pages that are given twice, or that hold other tokens or another context's."""
    seen: set[int] = set()
    for number in range(count):
        node = path[number] if number < len(path) else None
        for layer, page in enumerate(_column(layers, number)):
            if page is None:
                continue
            if id(page) in seen or (page.node is not None and page.node is not node):
                how = "is given twice" if id(page) in seen else "is stored for another prefix"
                raise ValueError(
                    f"page {number} of layer {layer} {how}; give the tokens of these caches from "
                    "the first one on, one cache for each layer, and the context under which the "
                    "prefix was found"
                )
            seen.add(id(page))


def _usable(path: Sequence[Node]) -> tuple[int, dict[int | None, int]]:
    """How many pages of a path every layer can resume after, and each kind of layer."""
    kinds = path[-1].kinds
    most: dict[int | None, int] = {None: len(path)} if kinds.full else {}
    agreed = set(range(1, len(path) + 1))
    for i, (window, _) in enumerate(kinds.windowed):
        run, usable = 0, []
        for length, node in enumerate(path, 1):
            run = run + 1 if node.whole[i] else 0
            if run >= length - kinds.first(window, length):
                usable.append(length)
        most[window] = max(usable, default=0)
        agreed.intersection_update(usable)
    return max(agreed, default=0), most


def _placed(path: Sequence[Node], layers: Sequence[Layer]) -> list[Page]:
    """Put the pages of a sequence in the nodes that lack them; those that were."""
    taken: list[Page] = []
    for number, node in enumerate(path):
        for layer, page in enumerate(_column(layers, number)):
            if page is not None and page.node is None and node.pages[layer] is None:
                node.place(layer, page)
                taken.append(page)
        node.refresh()
    return taken


def _used(node: Node) -> int:
    """When a page of a node was last used."""
    return max((page.used for page in node.held()), default=0)


def _recency(node: Node, now: int) -> tuple[int, int]:
    """Twice the time of last use; branch points age half as fast. Deeper nodes come first."""
    used = node.resumed if node.children else _used(node)
    return used + (now if node.branched else used), -node.depth


def _has_windows_of_its_own(node: Node) -> bool:
    """Whether there are pages to free that only the windows before this node need."""
    return any(
        page is not None and not page.references
        for i, each in node.resuming()
        if each.needed[i] == 1
        for page in (each.pages[layer] for layer in node.kinds.windowed[i][1])
    )


def _numbers(nodes: Sequence[Node], of: str = "") -> str:
    """Counts of prefixes and of what is in them."""
    prefixes = counted(sum(not node.children for node in nodes), "prefix", "prefixes")
    branches = counted(sum(len(node.children) > 1 for node in nodes), "branch point")
    tokens = counted(sum(len(node.tokens) // _TOKEN for node in nodes), "token")
    pages = counted(sum(len(node.held()) for node in nodes), "page")
    return f"{prefixes}{of}, {branches}: {tokens} in {pages}"
