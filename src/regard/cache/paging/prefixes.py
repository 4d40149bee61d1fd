"""Stored prefixes: which pages hold the tokens that a new text begins with.

Prefixes form a tree. A node holds the tokens of one page, and that page of every layer; its key is
SHA-256 of the context, the parent's key and the tokens, as in the prefix caching of vLLM and the
radix tree of SGLang (Zheng et al. 2024, arXiv:2312.07104). On a hit the tokens are compared, too.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count as counter
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from regard.cache.paging.contexts import Context
from regard.cache.paging.nodes import Kinds, Layer, Node, Storable
from regard.cache.paging.tree import Tree
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

    Examples:
        >>> from types import SimpleNamespace
        >>> from regard.cache.paging.contexts import Context
        >>> from regard.cache.paging.prefixes import Prefixes
        >>> prefixes, context = Prefixes(page_size=2), Context("5e1f", "float32", "plain", "")
        >>> page = lambda: SimpleNamespace(sealed=True, references=0, used=0, node=None)
        >>> taken = prefixes.insert([5, 6, 7, 8], context, [(None, 0, [page(), page()])])
        >>> len(taken), prefixes.find([5, 6, 7, 9, 9], context).length
        (2, 2)
        >>> print(prefixes.describe())
        1 prefix of 1 context, 0 branch points: 4 tokens in 2 pages
    """

    def __init__(self, page_size: int, *, clock: Callable[[], int] | None = None) -> None:
        self.page_size = page_size
        self._clock = clock or counter(1).__next__
        self._tree = Tree()
        self._kinds: dict[bytes, Kinds] = {}  # by the digest of a context without its tenant

    def __len__(self) -> int:
        """The number of stored prefixes of whole pages."""
        return len(self._tree)

    # ---- finding ----

    def find(self, tokens: Sequence[int] | Tensor, context: Context) -> Match:
        """The longest stored prefix, without the last token, which is left to forward.

        The pages found become the ones used last, and so do those before them.

        Args:
            tokens: `[L]` of a text.
            context: under which they are looked for; of the empty tenant too if it is `shared`.

        Raises:
            TypeError: if tokens are not whole numbers.
        """
        chunks = self._chunks(_as_bytes(tokens)[:-_TOKEN])
        ends = _ends(self._tree.levels(chunks, context))
        if not ends:
            return Match()
        path, length, lengths = max(map(self._usable, ends), key=lambda each: each[1])
        path = path[:length]
        layers = self._layers(path)
        self._touch(path, (page for layer in layers for page in layer.pages))
        lengths = {window: count * self.page_size for window, count in lengths.items()}
        return Match(length * self.page_size, layers, lengths)

    def _touch(self, path: Sequence[Node], pages: Iterable[Storable | None]) -> None:
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

    def _usable(self, end: Node) -> tuple[list[Node], int, dict[int | None, int]]:
        """A path, how many of its pages every layer can resume after, and each kind of layer."""
        path, kinds = end.path(), end.kinds
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
        return path, max(agreed, default=0), most

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
        layers: Sequence[tuple[int | None, int, Sequence[Storable | None]]],
    ) -> list[Storable]:
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
            TypeError: if tokens are not whole numbers.
            ValueError: if other layers are stored for this model, a layer without a window lacks
                its first pages, or a page is given twice or holds another stored prefix.
        """
        given = [Layer(*each) for each in layers]
        kinds = self._kinds_of(context, given)
        chunks = self._chunks(_as_bytes(tokens))
        count = min([len(chunks), *map(_sealed, given)]) if given else 0
        chunks = chunks[:count]
        levels = self._tree.levels(chunks, context)
        _check_pages(given, count, levels)
        path = max((end.path() for end in _ends(levels)), key=len, default=[])
        path = self._tree.extended(path, chunks, context, kinds)
        if not path:
            return []
        taken = _placed(path, given)
        self._touch(path, [*taken, *(node.pages[i] for node in path for i in kinds.full)])
        self._tree.add_resume_points(path)
        return taken

    def _kinds_of(self, context: Context, layers: list[Layer]) -> Kinds:
        windows, model = tuple(layer.window for layer in layers), context.public.digest
        kinds = self._kinds.get(model)
        if kinds is None or not any(node.kinds is kinds for node in self._tree):
            kinds = Kinds(windows, self.page_size)
        if kinds.windows != windows:
            raise ValueError(
                f"a prefix has the pages of every layer: this model's have the windows "
                f"{list(kinds.windows)}, got {list(windows)}; give one cache for each layer, in "
                "order"
            )
        self._kinds[model] = kinds
        return kinds

    # ---- evicting ----

    def evict(self) -> list[Storable]:
        """Remove the pages to free next from the index; none if sequences hold all that is stored.

        First go pages of window layers that no branch point and no end of a stored sequence needs,
        then the least recently used: the last page of a prefix before those it follows, and branch
        points, which grow old half as fast, later than others. Pages that sequences hold stay
        stored, as long as that leaves any to free.

        Returns:
            Pages without references, at least one of them if there are any; they are free now.
        """
        return self._evict_spare() or self._evict_coldest() or self._evict_forced()

    def _evict_spare(self) -> list[Storable]:
        for node in list(self._tree.spare):
            layers = node.unneeded()
            if not layers:
                del self._tree.spare[node]
            free = [i for i in layers if (page := node.pages[i]) and not page.references]
            if free:
                return self._tree.removed(node, free)
        return []

    def _evict_coldest(self) -> list[Storable]:
        now = self._clock()
        ends = [node for node in self._tree if node.is_resume_point or not node.children]
        for node in sorted(ends, key=lambda node: _recency(node, now)):
            if not node.children and not any(page.references for page in node.held()):
                return self._tree.dropped(node)
            if node.is_resume_point and _has_windows_of_its_own(node):
                self._tree.release(node)
                return self._evict_spare()
        return []

    def _evict_forced(self) -> list[Storable]:
        """Where sequences hold a part of every stored prefix: the rest of one."""
        for node in sorted(self._tree, key=lambda node: (_used(node), -node.depth)):
            if not all(page.references for page in node.held()):
                return self._tree.dropped(node)
        return []

    def forget(self, page: Storable) -> list[Storable]:
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

    def clear(self) -> list[Storable]:
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
                mixed = any(each.context.digest != node.context.digest for each in path)
                context = replace(node.context, shared=True) if mixed else node.context
                yield Entry(context, tokens, tuple(layers))

    def describe(self) -> str:
        """The numbers of prefixes, branch points and tokens, of each context."""
        groups: dict[bytes, list[Node]] = {}
        for node in self._tree:
            groups.setdefault(node.context.digest, []).append(node)
        total = _numbers([*self._tree], f" of {counted(len(groups), 'context')}")
        each = (f"  {_name(nodes[0].context)}: {_numbers(nodes)}" for nodes in groups.values())
        return "\n".join([total, *(each if len(groups) > 1 else ())])


def _as_bytes(tokens: Sequence[int] | Tensor) -> bytes:
    """Tokens as 64-bit integers, one after another."""
    got = type(tokens).__name__
    if isinstance(tokens, Tensor):
        got = f"{tokens.dtype} of shape {list(tokens.shape)}"
        tokens = (tokens.float() if tokens.dtype is torch.bool else tokens).tolist()
    try:
        return array("q", tokens).tobytes()
    except (TypeError, OverflowError) as error:
        raise TypeError(f"tokens are whole numbers of 64 bits, [L], got {got}") from error


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


def _column(layers: Sequence[Layer], number: int) -> list[Storable | None]:
    """Page `number` of each layer."""
    return [
        pages[number - first] if 0 <= number - first < len(pages) else None
        for _, first, pages in layers
    ]


def _check_pages(layers: Sequence[Layer], count: int, levels: Sequence[Sequence[Node]]) -> None:
    """Refuse pages that are given twice, or that hold other tokens or another context's."""
    seen: set[int] = set()
    for number in range(count):
        nodes = levels[number] if number < len(levels) else ()
        for layer, page in enumerate(_column(layers, number)):
            if page is None:
                continue
            if id(page) in seen or (page.node is not None and page.node not in nodes):
                how = "is given twice" if id(page) in seen else "is stored for another prefix"
                raise ValueError(
                    f"page {number} of layer {layer} {how}; give the tokens of these caches from "
                    "the first one on, one cache for each layer, and the context under which the "
                    "prefix was found"
                )
            seen.add(id(page))


def _ends(levels: Sequence[Sequence[Node]]) -> list[Node]:
    """The last nodes of each path."""
    parents = {id(node.parent) for level in levels for node in level}
    return [node for level in levels for node in level if id(node) not in parents]


def _placed(path: Sequence[Node], layers: Sequence[Layer]) -> list[Storable]:
    """Put the pages of a sequence in the nodes that lack them; those that were."""
    taken: list[Storable] = []
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


def _name(context: Context) -> str:
    tenant = f"tenant {context.tenant!r}" if context.tenant else "shared"
    adapter = f", adapter {context.adapter!r}" if context.adapter else ""
    return f"{tenant}{adapter}, weights {context.weights[:8]}, {context.dtype}, {context.format}"
