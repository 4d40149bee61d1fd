"""Stored prefixes: which pages hold the tokens that a new text begins with.

Prefixes form a tree (SGLang, Zheng et al. 2024, arXiv:2312.07104), one for each context. A node has
the tokens of one page, and that page of each layer.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count as counter
from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache.paging.contexts import Context
from regard.cache.paging.pages import Page

_TOKEN = 8  # bytes of a token in a key


class Layer(NamedTuple):
    """The pages of one layer, with the page numbers `first..first + len(pages)`."""

    window: int | None  # tokens that a query attends to, its own counted; None: all
    first: int
    pages: Sequence[Page | None]  # None where a page is not there


class Match(NamedTuple):
    """The longest stored prefix of a text."""

    # in tokens, a multiple of the page size, at which every layer has what it needs
    length: int = 0
    # without a window all pages, otherwise those that the next token attends to
    layers: tuple[Layer, ...] = ()


class Node:
    """A stored prefix: the pages of its parent, and one more; a first page has no parent.

    `tokens` are those of the page, as 64-bit integers; `windows` those of the layers, None for a
    layer that attends to all tokens.
    """

    def __init__(
        self,
        parent: "Node | None",
        context: Context,
        tokens: bytes,
        windows: tuple[int | None, ...],
    ) -> None:
        self.parent, self.context, self.tokens, self.windows = parent, context, tokens, windows
        self.depth: int = 1 if parent is None else parent.depth + 1  # pages
        self.children: dict[bytes, Node] = {}  # by their tokens
        self.pages: list[Page | None] = [None] * len(windows)

    def path(self) -> "list[Node]":
        """The nodes of the prefix, the first page's first."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def place(self, layer: int, page: Page | None) -> None:
        """Put a page of a layer here, or remove it."""
        old = self.pages[layer]
        if old is not None:
            old.node = None
        if page is not None:
            page.node = self
        self.pages[layer] = page

    def stored(self) -> list[Page]:
        """The pages that are here."""
        return [page for page in self.pages if page is not None]


class Prefixes:
    """An index of stored prefixes in pages.

    A page belongs to at most one stored prefix. The index reads of a page `sealed` and
    `references`, and writes `node` and `used`, by a clock that returns a greater number at each
    call. It has no lock: the pool's is held.
    """

    def __init__(self, page_size: int, *, clock: Callable[[], int] | None = None) -> None:
        self.page_size = page_size
        self._clock = clock or counter(1).__next__
        self.nodes: dict[Node, None] = {}  # a set, parents before their children
        self._roots: dict[Context, dict[bytes, Node]] = {}  # first pages by their tokens

    def __len__(self) -> int:
        """The number of stored prefixes of whole pages."""
        return len(self.nodes)

    # ---- finding ----

    def find(self, tokens: Sequence[int] | Tensor, context: Context) -> Match:
        """The longest stored prefix of a text `[L]`, without the last token, which is left to
        forward.

        The pages found become the ones used last. A ValueError is raised if tokens are not whole
        numbers.
        """
        path = self._path(self._chunks(numbers_of(tokens).tobytes()[:-_TOKEN]), context)
        path = path[: self._usable(path)]
        if not path:
            return Match()
        layers = []
        columns = zip(*(node.pages for node in path), strict=True)
        for window, pages in zip(path[0].windows, columns, strict=True):
            first = first_page(window, len(path), self.page_size)
            layers.append(Layer(window, first, list(pages[first:])))
        self._touch(page for layer in layers for page in layer.pages)
        return Match(len(path) * self.page_size, tuple(layers))

    def _path(self, chunks: Sequence[bytes], context: Context) -> list[Node]:
        """The nodes of these pages of tokens, as far as they are stored."""
        found: list[Node] = []
        children = self._roots.get(context, {})
        for chunk in chunks:
            if chunk not in children:
                break
            found.append(children[chunk])
            children = found[-1].children
        return found

    def _usable(self, path: Sequence[Node]) -> int:
        """The number of pages of a path after which every layer can resume."""
        usable, missing = 0, [0] * len(path[0].windows) if path else []
        for count, node in enumerate(path, 1):
            for layer, page in enumerate(node.pages):
                if page is None:
                    missing[layer] = count
            if all(
                last <= first_page(window, count, self.page_size)
                for last, window in zip(missing, node.windows, strict=True)
            ):
                usable = count
        return usable

    def _touch(self, pages: Iterable[Page | None]) -> None:
        """Give these pages the present time of use."""
        now = self._clock()
        for page in pages:
            assert page is not None and page.sealed, "stored pages are sealed, and a match has them"
            page.used = now

    def _chunks(self, tokens: bytes) -> list[bytes]:
        """The whole pages of tokens."""
        size = self.page_size * _TOKEN
        return [tokens[stop - size : stop] for stop in range(size, len(tokens) + 1, size)]

    # ---- storing ----

    def insert(
        self,
        tokens: Sequence[int] | Tensor,
        context: Context,
        layers: Sequence[tuple[int | None, int, Sequence[Page | None]]],
    ) -> list[Page]:
        """Store the sealed pages of a sequence, all of them or, on an error, none; returns the
        pages that were taken: the index holds them until it evicts them.

        Where the tokens are stored already, their pages stay, and the given ones are not taken. The
        pages that the next token attends to become the ones used last. `layers` are of each layer
        its window, the number of its first page and its pages; a layer without a window has all of
        them. A ValueError is raised if tokens are not whole numbers, other layers are stored under
        this context, a layer without a window lacks its first pages, or a page is given twice or
        holds another stored prefix.
        """
        given = [Layer(*each) for each in layers]
        windows = tuple(layer.window for layer in given)
        self.check_windows(windows, context)
        chunks = self._chunks(numbers_of(tokens).tobytes())
        chunks = chunks[: min(map(_sealed, given), default=0)]
        columns = [[_page(layer, number) for layer in given] for number in range(len(chunks))]
        _check_pages(columns, self._path(chunks, context))
        nodes, taken = list[Node](), list[Page]()
        for chunk, column in zip(chunks, columns, strict=True):
            node, new = self.add(nodes[-1] if nodes else None, context, chunk, windows, column)
            nodes.append(node)
            taken += new
        firsts = [first_page(window, len(nodes), self.page_size) for window in windows]
        self._touch(
            page
            for number, node in enumerate(nodes)
            for first, page in zip(firsts, node.pages, strict=True)
            if number >= first and page is not None
        )
        if nodes:
            self._prune(nodes[-1])
        return taken

    def add(
        self,
        parent: Node | None,
        context: Context,
        tokens: bytes,
        windows: tuple[int | None, ...],
        pages: Sequence[Page | None],
    ) -> tuple[Node, list[Page]]:
        """Store a page of tokens after a prefix; returns the node, and the pages that it lacked."""
        siblings = self._roots.setdefault(context, {}) if parent is None else parent.children
        node = siblings.get(tokens)
        if node is None:
            node = siblings[tokens] = Node(parent, context, tokens, windows)
            self.nodes[node] = None
        taken = []
        for layer, page in enumerate(pages):
            if page is not None and page.node is None and node.pages[layer] is None:
                node.place(layer, page)
                taken.append(page)
        return node, taken

    def check_windows(self, windows: tuple[int | None, ...], context: Context) -> None:
        """Raise a ValueError if a model of layers with other windows is stored there."""
        for node in self._roots.get(context, {}).values():
            if node.windows != windows:
                raise ValueError(
                    f"a prefix has the pages of every layer: this model's have the windows "
                    f"{list(node.windows)}, got {list(windows)}; give one cache for each layer, in "
                    "order"
                )

    # ---- removing ----

    def evict(self, count: int = 1) -> list[Page]:
        """Remove the pages used longest ago that can be freed, `count` at least as far as there are
        any; none if sequences hold all. Returns pages without references, which are free now.

        Of pages used together the last ones of a prefix go first, in layers with a window before
        others. Pages that sequences hold stay stored, as long as that leaves any to free.
        """
        freed: list[Page] = []
        units = sorted(self._units(), key=lambda unit: unit[:3])
        for *_, node, layers in units:
            if len(freed) >= count:
                return freed
            if node not in self.nodes:
                continue
            if layers:
                freed += self._remove(node, layers)
            elif not node.children and not any(page.references for page in node.stored()):
                freed += self._drop(node)
        for *_, node, _ in [] if freed else units:  # sequences hold a part of every prefix
            if not all(page.references for page in node.stored()):
                return self._drop(node)
        return freed

    def _units(self) -> Iterator[tuple[int, int, bool, Node, list[int]]]:
        """The pages of a node that are evicted together: those of a window, or the whole node.

        Each with the time of last use, the negative depth, whether it is the whole node, the node,
        and the layers of a window whose pages nothing refers to.
        """
        for node in self.nodes:
            for window in dict.fromkeys(node.windows):
                pages = {
                    layer: page
                    for layer, page in enumerate(node.pages)
                    if page is not None and window in (None, node.windows[layer])
                }
                used = max((page.used for page in pages.values()), default=0)
                free = [layer for layer, page in pages.items() if not page.references]
                if window is None or free:
                    yield used, -node.depth, window is None, node, [] if window is None else free

    def _remove(self, node: Node, layers: Sequence[int]) -> list[Page]:
        """Remove the pages of layers with a window from a node."""
        pages = [page for i in layers if (page := node.pages[i]) is not None]
        for i in layers:
            node.place(i, None)
        self._prune(node)
        return pages

    def _drop(self, node: Node) -> list[Page]:
        """Remove a node and those below it; returns the pages without references."""
        below = [node]
        for each in below:  # which grows
            below += each.children.values()
        free = [page for each in below for page in each.stored() if not page.references]
        for each in below:
            for layer in range(len(each.pages)):
                each.place(layer, None)
            del self.nodes[each]
        if node.parent is not None:
            del node.parent.children[node.tokens]
            self._prune(node.parent)
            return free
        roots = self._roots[node.context]
        del roots[node.tokens]
        if not roots:
            del self._roots[node.context]
        return free

    def _prune(self, node: Node) -> None:
        """Remove a node that holds no page and leads to none, and parents that are left so."""
        if not node.children and not node.stored():
            self._drop(node)


def first_page(window: int | None, count: int, page_size: int) -> int:
    """The first page that the token after `count` pages attends to.

    Examples:
        >>> first_page(4, 3, 2)  # 6 tokens: the next one attends to slots 3..6
        1
    """
    if window is None:
        return 0
    return max(0, count - -(-(window - 1) // page_size))


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
    """The number of pages up to the first one that is open."""
    if layer.window is None and layer.first:
        raise ValueError(
            f"a layer without a window has all pages of a prefix, got those from page "
            f"{layer.first} on; store it before pages are released"
        )
    count = (number for number, page in enumerate(layer.pages) if page and not page.sealed)
    return layer.first + next(count, len(layer.pages))


def _page(layer: Layer, number: int) -> Page | None:
    index = number - layer.first
    return layer.pages[index] if 0 <= index < len(layer.pages) else None


def _check_pages(columns: Sequence[Sequence[Page | None]], path: Sequence[Node]) -> None:
    """Refuse pages that are given twice, or that hold other tokens or another context's."""
    nodes = [*path, *[None] * (len(columns) - len(path))]
    given = [
        (page, node)
        for column, node in zip(columns, nodes, strict=True)
        for page in column
        if page is not None
    ]
    twice = len({id(page) for page, _ in given}) < len(given)
    if twice or any(page.node not in (None, node) for page, node in given):
        raise ValueError(
            f"a page is {'given twice' if twice else 'stored for another prefix'}; give the tokens "
            "of these caches from the first one on, one cache for each layer, and the context "
            "under which the prefix was found"
        )
