"""The tree of stored prefixes: which node is whose child, and which pages its windows need."""

from collections.abc import Iterator, Sequence

from regard.cache.paging.contexts import Context
from regard.cache.paging.nodes import Kinds, Node, Storable, key_of


class Tree:
    """Nodes by their keys, parents before their children.

    A *resume point* is a branch point or the end of a stored sequence: layers with a window need
    the pages before it, so that a text can go on there.

    Attributes:
        spare: nodes some of whose pages no resume point needs.
    """

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self.spare: dict[Node, None] = {}  # a set in the order of insertion

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    # ---- reading ----

    def levels(self, chunks: Sequence[bytes], context: Context) -> list[list[Node]]:
        """For each number of pages, the nodes that hold these tokens.

        They are several where both the tenant and the empty one stored them.
        """
        levels: list[list[Node]] = []
        before: Sequence[Node | None] = [None]
        for chunk in chunks:
            found = [node for parent in before for node in self._next(parent, chunk, context)]
            if not found:
                break
            levels.append(found)
            before = found
        return levels

    def _next(self, parent: Node | None, chunk: bytes, context: Context) -> Iterator[Node]:
        """The children of a node with these tokens that the context may read."""
        node = self._child(parent, chunk, context)
        if node is not None:
            yield node
        if context.shared and context.tenant:
            node = self._child(parent, chunk, context.public)
            if node is not None:
                yield node

    def _child(self, parent: Node | None, chunk: bytes, context: Context) -> Node | None:
        """The child of that key, if its tokens are these: digests alone are not trusted."""
        node = self._nodes.get(key_of(parent, context, chunk))
        if node is None or node.tokens != chunk or node.parent is not parent:
            return None
        return node if node.context.digest == context.digest else None

    # ---- growing ----

    def extended(
        self, path: Sequence[Node], chunks: Sequence[bytes], context: Context, kinds: Kinds
    ) -> list[Node]:
        """A path with new nodes for the chunks that it lacks."""
        path = list(path)
        for chunk in chunks[len(path) :]:
            parent = path[-1] if path else None
            node = Node(parent, context, chunk, kinds)
            if node.key in self._nodes:  # two prefixes of one digest: the first one stays
                break
            self._nodes[node.key] = node
            if parent is not None:
                parent.children[node.key] = node
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

    def removed(self, node: Node, layers: Sequence[int]) -> list[Storable]:
        """Remove the pages of some window layers from a node."""
        pages = [page for i in layers if (page := node.pages[i]) is not None]
        for i in layers:
            node.place(i, None)
        node.refresh()
        self._prune(node)
        return pages

    def dropped(self, node: Node) -> list[Storable]:
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
            del self._nodes[each.key]
            self.spare.pop(each, None)
        if node.parent is not None:
            del node.parent.children[node.key]
            self._prune(node.parent)
        return free

    def _prune(self, node: Node) -> None:
        """Remove a node that holds no page and leads to none, and parents that are left so."""
        if not node.children and not node.held():
            self.dropped(node)
