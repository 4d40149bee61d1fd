"""Nodes of the tree of stored prefixes: the tokens of one page, and that page of every layer."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from regard.cache.paging.contexts import Context

ROOT = bytes(32)  # in place of a parent's key, for the first page of a sequence


@runtime_checkable
class Storable(Protocol):
    """What the index reads and writes of a page."""

    references: int
    used: int
    node: "Node | None"

    @property
    def sealed(self) -> bool:
        """Whether the page is full and no longer written."""


class Layer(NamedTuple):
    """The pages of one layer: those of page numbers `first..first + len(pages)`."""

    window: int | None  # tokens that a query attends to, its own counted; None: all
    first: int
    pages: Sequence["Storable | None"]  # None where a page is not there


class Kinds:
    """The layers of a model by their windows.

    Examples:
        >>> kinds = Kinds((None, 4, None), page_size=2)
        >>> kinds.full, kinds.windowed
        ((0, 2), ((4, (1,)),))
        >>> kinds.first(4, 3)  # 6 tokens: the next one attends to slots 3..6
        1
    """

    def __init__(self, windows: tuple[int | None, ...], page_size: int) -> None:
        self.windows, self.page_size = windows, page_size
        self.full = tuple(i for i, window in enumerate(windows) if window is None)
        sizes = sorted({window for window in windows if window is not None})
        self.windowed = tuple(
            (size, tuple(i for i, window in enumerate(windows) if window == size)) for size in sizes
        )

    def first(self, window: int | None, count: int) -> int:
        """The first page that the token after `count` pages attends to."""
        if window is None:
            return 0
        pages = -(-(window - 1) // self.page_size)  # that the tokens before the next one are in
        return max(0, count - pages)


class Node:
    """A stored prefix: the pages of its parent, and one more.

    Args:
        parent: the prefix without the last page; None for a first page.
        context: under which it is stored.
        tokens: of the page, as 64-bit integers.
        kinds: the layers of the model.
    """

    __slots__ = (
        *("branched", "children", "context", "depth", "is_resume_point", "key", "kinds"),
        *("needed", "pages", "parent", "resumed", "tokens", "whole"),
    )

    def __init__(
        self, parent: "Node | None", context: Context, tokens: bytes, kinds: Kinds
    ) -> None:
        self.parent, self.context, self.tokens, self.kinds = parent, context, tokens, kinds
        self.key = key_of(parent, context, tokens)
        self.depth: int = 1 if parent is None else parent.depth + 1  # pages
        self.children: dict[bytes, Node] = {}
        self.pages: list[Storable | None] = [None] * len(kinds.windows)
        self.whole = [False] * len(
            kinds.windowed
        )  # for each window: whether all its pages are there
        # for each window: the number of resume points whose next token attends to this page
        self.needed = [0] * len(kinds.windowed)
        self.is_resume_point = False  # a branch point, or the end of a stored sequence
        self.branched = False  # whether it has, or had, two children
        self.resumed = 0  # clock: when it was last the end of a match, or of a stored sequence

    def path(self) -> "list[Node]":
        """The nodes of the prefix, the first page's first."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def place(self, layer: int, page: "Storable | None") -> None:
        """Put a page of a layer here, or remove it; `refresh` follows."""
        old = self.pages[layer]
        if old is not None:
            old.node = None
        if page is not None:
            page.node = self
        self.pages[layer] = page

    def refresh(self) -> None:
        """Find out which windows are whole, after pages were placed."""
        pages = self.pages
        self.whole = [
            all(pages[i] is not None for i in layers) for _, layers in self.kinds.windowed
        ]

    def held(self) -> "list[Storable]":
        """Its pages."""
        return [page for page in self.pages if page is not None]

    def unneeded(self) -> list[int]:
        """Window layers with a page here to which no token after a resume point attends."""
        return [
            layer
            for needed, (_, layers) in zip(self.needed, self.kinds.windowed, strict=True)
            if not needed
            for layer in layers
            if self.pages[layer] is not None
        ]

    def resuming(self) -> "Iterator[tuple[int, Node]]":
        """The nodes whose pages each kind of window layer needs to resume here."""
        for i, (window, _) in enumerate(self.kinds.windowed):
            first = self.kinds.first(window, self.depth)
            node: Node | None = self
            while node is not None and node.depth > first:
                yield i, node
                node = node.parent


def key_of(parent: Node | None, context: Context, tokens: bytes) -> bytes:
    """SHA-256 of the context's digest, the parent's key and the tokens of a page."""
    before = ROOT if parent is None else parent.key
    return hashlib.sha256(context.digest + before + tokens).digest()
