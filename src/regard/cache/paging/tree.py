"""The tree of stored prefixes: a node has the tokens of one page, and that page of all layers."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from regard.cache.paging.contexts import Context
from regard.cache.paging.pages import Page


class Layer(NamedTuple):
    """The pages of one layer: those of page numbers `first..first + len(pages)`."""

    window: int | None  # tokens that a query attends to, its own counted; None: all
    first: int
    pages: Sequence[Page | None]  # None where a page is not there


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

    def __init__(
        self, parent: "Node | None", context: Context, tokens: bytes, kinds: Kinds
    ) -> None:
        self.parent, self.context, self.tokens, self.kinds = parent, context, tokens, kinds
        self.depth: int = 1 if parent is None else parent.depth + 1  # pages
        self.children: dict[bytes, Node] = {}  # by their tokens
        self.pages: list[Page | None] = [None] * len(kinds.windows)
        self.whole = [False] * len(kinds.windowed)  # whether all pages of a window are there
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

    def place(self, layer: int, page: Page | None) -> None:
        """Put a page of a layer here, or remove it; `refresh` follows."""
        old = self.pages[layer]
        if old is not None:
            old.node = None
        if page is not None:
            page.node = self
        self.pages[layer] = page

    def refresh(self) -> None:
        """Find out of which windows all pages are there, after pages were placed."""
        pages = self.pages
        self.whole = [all(pages[i] for i in layers) for _, layers in self.kinds.windowed]

    def held(self) -> list[Page]:
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


class Tree:
    """The nodes of all contexts, parents before their children.

    A *resume point* is a branch point or the end of a stored sequence: layers with a window need
    the pages before it, so that a text can go on there.

    Attributes:
        spare: nodes some of whose pages no resume point needs.
    """

    def __init__(self) -> None:
        self._nodes: dict[Node, None] = {}  # sets in the order of insertion
        self.spare: dict[Node, None] = {}
        self._roots: dict[Context, dict[bytes, Node]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def roots(self, context: Context) -> dict[bytes, Node]:
        """The nodes of first pages, by their tokens."""
        return self._roots.get(context, {})

    def path(self, chunks: Sequence[bytes], context: Context) -> list[Node]:
        """The nodes of these pages of tokens, as far as they are stored."""
        found: list[Node] = []
        children = self.roots(context)
        for chunk in chunks:
            if chunk not in children:
                break
            found.append(children[chunk])
            children = found[-1].children
        return found

    # ---- growing ----

    def extended(
        self, path: Sequence[Node], chunks: Sequence[bytes], context: Context, kinds: Kinds
    ) -> list[Node]:
        """A path with new nodes for the chunks that it lacks."""
        path = list(path)
        for chunk in chunks[len(path) :]:
            parent = path[-1] if path else None
            node = Node(parent, context, chunk, kinds)
            self._nodes[node] = None
            if parent is None:
                self._roots.setdefault(context, {})[chunk] = node
            else:
                parent.children[chunk] = node
                parent.branched |= len(parent.children) > 1
            path.append(node)
        return path

    def add_resume_points(self, path: Sequence[Node]) -> None:
        """Count what windows need at the end of a new path, and at its branch points."""
        for node in path:
            if not node.is_resume_point and (node.branched or node is path[-1]):
                self._need(node, 1)
        self.spare.update(dict.fromkeys(node for node in path if node.unneeded()))
        self._prune(path[-1])

    # ---- removing ----

    def release(self, node: Node) -> None:
        """Let a node be no resume point any more: the pages of its windows may be evicted."""
        self._need(node, -1)

    def _need(self, node: Node, change: int) -> None:
        node.is_resume_point = change > 0
        for i, each in node.resuming():
            each.needed[i] += change
            if not each.needed[i]:
                self.spare[each] = None

    def removed(self, node: Node, layers: Sequence[int]) -> list[Page]:
        """Remove the pages of some window layers from a node."""
        pages = [page for i in layers if (page := node.pages[i]) is not None]
        for i in layers:
            node.place(i, None)
        node.refresh()
        self._prune(node)
        return pages

    def dropped(self, node: Node) -> list[Page]:
        """Remove a node and those below it; their pages that nothing refers to."""
        below = [node]
        for each in below:  # which grows
            below += each.children.values()
        for each in below:
            if each.is_resume_point:
                self._need(each, -1)
        free = []
        for each in below:
            free += [page for page in each.held() if not page.references]
            for layer in range(len(each.pages)):
                each.place(layer, None)
            del self._nodes[each]
            self.spare.pop(each, None)
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
        if not node.children and not node.held():
            self.dropped(node)
