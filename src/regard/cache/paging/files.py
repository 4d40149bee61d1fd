"""Pages in files: tables that name pages by their number, and the stored prefixes of a pool.

Pages are written as they are stored, codes with their scales, and each of them once, however many
rows share it.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache.files import Stacked, TensorFile, is_naturals
from regard.cache.paging.contexts import Context
from regard.cache.paging.memory import Kind, Memory
from regard.cache.paging.pages import Outline, Page, PageTable, outlines_of
from regard.cache.paging.prefixes import Node
from regard.cache.paging.tables import each_length
from regard.cache.saving import (
    Record,
    lengths_from,
    lengths_state,
    outlines_from,
    outlines_text,
    pieces_from,
)
from regard.cache.streams import Lengths

# ---- pages ----


class Group(NamedTuple):
    """Pages of one kind, in a row of numbers."""

    outlines: tuple[Outline, ...]  # of its kind
    codes: bool  # whether they are stored as codes
    size: int  # pages

    def shapes(self, page_size: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shapes and dtypes of the tensors of a file that hold these pages."""
        stored = self.outlines if self.codes else [each.plain for each in self.outlines]
        buffers = (buffer for each in stored for buffer in each.buffers(page_size))
        return [((self.size, *shape), dtype) for shape, dtype in buffers]


class Numbered:
    """Pages of a memory with a number each, for a file; one may be given several times.

    `empty` is the kind of a cache that has rows, and may have no page: it is stored as a group of 0
    pages then, which has the shapes and dtypes of the streams.
    """

    def __init__(self, memory: Memory, pages: Iterable[Page], empty: Kind | None = None) -> None:
        found: dict[tuple[tuple[Outline, ...], bool], dict[Page, None]] = {}
        for page in pages:
            kind = memory.kind_with(page.slab)
            codes = kind.open is not kind.sealed and page.slab is not kind.open
            found.setdefault((kind.sealed.outlines, codes), {})[page] = None
        if empty is not None and not found:
            found[empty.sealed.outlines, False] = {}
        self._page_size = memory.page_size
        self.groups = [Group(*key, len(each)) for key, each in found.items()]
        self._pages = [list(each) for each in found.values()]
        every = (page for each in self._pages for page in each)
        self.numbers = {page: number for number, page in enumerate(every)}

    def text(self) -> list[dict[str, Any]]:
        """The groups, for JSON."""
        return [
            {
                "outlines": outlines_text([each.empty(1) for each in group.outlines]),
                "rotated": sum(group.outlines[0].rotation),
                "codes": group.codes,
                "count": group.size,
            }
            for group in self.groups
        ]

    def streams(self) -> list[Stacked | Tensor]:
        """The tensors of the file, group by group."""
        found: list[Stacked | Tensor] = []
        for group, pages in zip(self.groups, self._pages, strict=True):
            stored = (page.slab.stored(page.index) for page in pages)
            found += map(Stacked, zip(*stored, strict=True))
            if not pages:
                shapes = group.shapes(self._page_size)
                found += [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in shapes]
        return found


def arguments_of(memory: Memory) -> dict[str, Any]:
    """The arguments of a pool that its pages in a file depend on."""
    return {"page_size": memory.page_size, "format": memory.format.name}


def groups_from(value: Any, memory: Memory, device: torch.device) -> list[Group]:
    """The groups that JSON describes. Raises a ValueError if it describes none, or pages that the
    pool would store otherwise."""
    if not isinstance(value, list):
        raise ValueError(f"groups of pages are a list, got {value!r:.200}")
    groups = [_group(each, memory, device) for each in value]
    if len({group[:2] for group in groups}) != len(groups):
        raise ValueError("pages of one kind are one group")
    if len(groups) > 1 and not all(group.size for group in groups):
        raise ValueError("a group of 0 pages is the only one")
    return groups


def _group(value: Any, memory: Memory, device: torch.device) -> Group:
    names = {"outlines", "rotated", "codes", "count"}
    if not isinstance(value, dict) or set(value) != names:
        raise ValueError(f"a group of pages has {', '.join(sorted(names))}, got {value!r:.200}")
    likes, count, codes = outlines_from(value["outlines"], ()), value["count"], value["codes"]
    if not is_naturals([count]) or codes not in (0, 1) or (codes and not count) or not likes:
        raise ValueError(f"a group has streams, a count, and codes or not, got {value!r:.200}")
    rotated, width = value["rotated"], likes[0].shape[3]
    if not is_naturals([rotated]) or rotated > width:
        raise ValueError(f"up to {width} channels of keys are rotated, got {rotated!r:.99}")
    streams = [like.to(device) for like in likes]
    pieces = (rotated,) if rotated else None
    outlines = outlines_of(streams, memory.format, memory.page_size, pieces)
    if sum(outlines[0].rotation) != rotated:
        raise ValueError(f"{width} channels are not rotated in blocks, got {rotated} of them")
    if codes and all(each.bits is None for each in outlines):
        raise ValueError(f"pages of format {memory.format.name!r} have no codes")
    if count and not any(each.heads * each.width for each in outlines):
        raise ValueError(f"pages have numbers, so that a file bounds their count, got {count}")
    return Group(outlines, bool(codes), count)


def check_shapes(groups: Sequence[Group], page_size: int, found: Sequence[Any]) -> None:
    """Raise a ValueError unless tensors, or entries of a file, hold the pages of these groups."""
    expected = [each for group in groups for each in group.shapes(page_size)]
    got = [(tuple(each.shape), each.dtype) for each in found]
    if expected != got:
        raise ValueError(f"pages are stored as {expected!r:.200}, got {got!r:.200}")


def take_pages(
    memory: Memory,
    groups: Sequence[Group],
    streams: Iterator[Iterable[Tensor]],
    *,
    cold: bool = False,
) -> list[Page]:
    """New pages of a pool with the content of a file; inside of a change.

    The shapes of the groups have been checked; `streams` are of each tensor of the file the tensors
    of its pages. `cold` pages go to the memory of the host, if the pool offloads any. A ValueError
    is raised if the pool has too few pages left.
    """
    found: list[Page] = []
    kinds = [memory.kind_of(group.outlines) for group in groups]
    slabs = [
        kind.sealed if group.codes else kind.open for kind, group in zip(kinds, groups, strict=True)
    ]
    if cold and memory.offloading is not None:
        slabs = [memory.offloading.slabs.get(slab, slab) for slab in slabs]
    memory.reserve([s for s, group in zip(slabs, groups, strict=True) for _ in range(group.size)])
    for slab, group in zip(slabs, groups, strict=True):
        pages = [memory.take(slab) for _ in range(group.size)]
        found += pages
        for index in range(len(slab.stored(pages[0].index)) if pages else 0):
            for page, values in zip(pages, next(streams), strict=True):
                slab.stored(page.index)[index].copy_(values)
    return found


# ---- a cache ----


def cache_record(
    memory: Memory,
    tables: Sequence[PageTable],
    kind: Kind | None,
    lengths: Lengths,
    pieces: Sequence[int] | None,
) -> Record:
    """The content of a paged cache, for its file; the pool's lock is held."""
    numbered = Numbered(memory, (page for table in tables for page in table.pages), kind)
    state = {
        **lengths_state(lengths),
        "tables": [
            {"first": table.first, "pages": [numbered.numbers[page] for page in table.pages]}
            for table in tables
        ],
        "groups": numbered.text(),
        "pieces": None if pieces is None else list(pieces),
    }
    return Record(state, numbered.streams())


def filled(
    memory: Memory, window: int | None, record: Record
) -> tuple[Kind | None, list[PageTable], Lengths, tuple[int, ...] | None]:
    """The kind, tables, lengths and pieces of a cache in a file, in new pages; inside of a change.
    Raises a ValueError if it could not be the record of a cache with this window, or the pool has
    too few pages."""
    state = record.state
    device = record.streams[0].device if record.streams else torch.device("cpu")
    groups = groups_from(state.get("groups"), memory, device)
    check_shapes(groups, memory.page_size, record.streams)
    kinds = {group.outlines for group in groups}
    if len(kinds) > 1 or (state.get("tables") and not kinds):
        raise ValueError(f"the rows of a cache have pages of one kind, got {len(kinds)} kinds")
    outlines = groups[0].outlines if groups else ()
    pieces = pieces_from(state.get("pieces"), [each.empty(0) for each in outlines])
    lengths, numbers = _rows_of(state)
    _check_tables(memory.page_size, window, state["tables"], numbers, groups)
    pages = take_pages(memory, groups, iter(record.streams))
    tables = [
        PageTable([pages[n] for n in table["pages"]], table["first"]) for table in state["tables"]
    ]
    for table, length in zip(tables, numbers, strict=True):
        for number, page in enumerate(table.pages, table.first):
            page.sealed = (number + 1) * memory.page_size <= length
    return memory.kind_of(outlines) if groups else None, tables, lengths, pieces


def _rows_of(state: dict[str, Any]) -> tuple[Lengths, list[int]]:
    """The number of tokens of each row of a saved cache, as `Lengths` and as a list."""
    lengths, tables = lengths_from(state), state.get("tables")
    if not isinstance(tables, list) or not all(_is_table(each) for each in tables):
        raise ValueError(f"tables have a first page and pages, got {tables!r:.200}")
    numbers = each_length(lengths, len(tables))
    if len(numbers) != len(tables):
        raise ValueError(f"rows have a length each, got {numbers!r:.200} of {len(tables)} rows")
    return lengths, numbers


def _is_table(value: Any) -> bool:
    names = isinstance(value, dict) and set(value) == {"first", "pages"}
    return names and is_naturals([value["first"]]) and is_naturals(value["pages"])


def _check_tables(
    size: int,
    window: int | None,
    tables: list[dict[str, Any]],
    lengths: list[int],
    groups: list[Group],
) -> None:
    """Raise unless each row has the pages of its tokens, or of its window, and open ones alone."""
    codes = [group.codes for group in groups for _ in range(group.size)]
    count = len(codes)
    uses: dict[int, set[bool]] = {}
    for table, length in zip(tables, lengths, strict=True):
        first, stop = table["first"], -(-length // size)
        oldest = 0 if window is None else max(0, length - window + 1)
        if first + len(table["pages"]) != stop or first > oldest // size:
            raise ValueError(
                f"a row of {length} tokens has pages from {oldest // size} or before to {stop}, "
                f"got {len(table['pages'])} from {first} on"
            )
        for number, page in enumerate(table["pages"], first):
            full = (number + 1) * size <= length
            if page >= count or (page in uses and not (full and uses[page] == {True})):
                raise ValueError(f"page {page} of {count} is in several places, or is not there")
            if codes[page] and not full:
                raise ValueError(f"page {page} has codes, and only {length - number * size} tokens")
            uses.setdefault(page, set()).add(full)
    if len(uses) != count:
        raise ValueError(f"{count} pages are stored and {len(uses)} in use")


# ---- the stored prefixes of a pool ----

_NONE = -1  # the number of no page, or of no parent


def pool_record(memory: Memory) -> tuple[Record, int]:
    """The stored prefixes of a pool, for its file, and the number of their pages; lock held.

    A tensor for each context has a row for each node: the row of its parent, the tokens of the
    page, and the number of the page of each layer.
    """
    nodes = [*memory.prefixes.nodes]
    numbered = Numbered(memory, (page for node in nodes for page in node.stored()))
    groups: dict[Context, list[Node]] = {}
    for node in nodes:
        groups.setdefault(node.context, []).append(node)
    tensors, texts = [], []
    for context, some in groups.items():
        rows = {node: row for row, node in enumerate(some)}
        columns = []
        for node in some:
            parent = _NONE if node.parent is None else rows[node.parent]
            pages = [_NONE if page is None else numbered.numbers[page] for page in node.pages]
            columns.append([parent, *array("q", node.tokens), *pages])
        tensors.append(torch.tensor(columns, dtype=torch.int64, device="cpu"))
        texts.append({"key": context.key, "windows": list(some[0].windows)})
    state = {"contexts": texts, "groups": numbered.text()}
    return Record(state, [*tensors, *numbered.streams()]), len(numbered.numbers)


def load_prefixes(
    memory: Memory, file: TensorFile, entry: dict[str, Any], device: torch.device
) -> int:
    """Store the prefixes of an entry of a file, all of them or none; returns the number of pages
    that were not stored before. Inside of a change.

    The pool has the arguments of the one that was saved. A ValueError is raised if they could not
    be the prefixes of such a pool, or it has too few pages.
    """
    state, names, size = entry["state"], entry["streams"], memory.page_size
    groups = groups_from(state.get("groups"), memory, device)
    contexts = state.get("contexts")
    if not isinstance(contexts, list) or not all(map(_is_context, contexts)):
        raise ValueError(f"contexts have a key and the windows of layers, got {contexts!r:.200}")
    names, streams = names[: len(contexts)], names[len(contexts) :]
    check_shapes(groups, size, [file.entries[name] for name in streams])
    kinds = [group.outlines for group in groups for _ in range(group.size)]
    found: list[tuple[Context, tuple[int | None, ...], list[list[int]]]] = []
    for name, text in zip(names, contexts, strict=True):
        context, windows = Context(file.metadata["weights"], text["key"]), tuple(text["windows"])
        memory.prefixes.check_windows(windows, context)
        found.append((context, windows, _rows_from(file, name, size, windows, kinds)))
    numbers = [n for *_, rows in found for row in rows for n in row[1 + size :] if n != _NONE]
    if sorted(numbers) != [*range(len(kinds))]:
        raise ValueError(f"each of {len(kinds)} pages is in one place, got {numbers!r:.200}")
    pages = take_pages(memory, groups, map(file.pieces, streams), cold=True)
    count = 0
    for page in pages:
        page.sealed = True
    for context, windows, rows in found:
        nodes: list[Node] = []
        for row in rows:
            parent = None if row[0] == _NONE else nodes[row[0]]
            own = [None if n == _NONE else pages[n] for n in row[1 + size :]]
            tokens = array("q", row[1 : 1 + size]).tobytes()
            node, new = memory.prefixes.add(parent, context, tokens, windows, own)
            nodes.append(node)
            count += len(new)
            for page in new:
                page.used = memory.operation()  # pages that were stored first are evicted first
        for node in reversed(nodes):  # the beginning of a prefix is used with all that follows it
            last = max((page.used for page in node.stored()), default=0)
            for page in node.parent.stored() if node.parent is not None else ():
                page.used = max(page.used, last)
    return count


def _is_context(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"key", "windows"}:
        return False
    windows = value["windows"]
    if not isinstance(value["key"], str) or not isinstance(windows, list) or not windows:
        return False
    sizes = [each for each in windows if each is not None]
    return is_naturals(sizes) and 0 not in sizes


def _rows_from(
    file: TensorFile,
    name: str,
    page_size: int,
    windows: Sequence[int | None],
    kinds: Sequence[tuple[Outline, ...]],
) -> list[list[int]]:
    """The nodes of a context, from a tensor of a file. Raises a ValueError if they are none."""
    entry, columns = file.entries[name], 1 + page_size + len(windows)
    if entry.dtype != torch.int64 or len(entry.shape) != 2 or entry.shape[1] != columns:
        raise ValueError(f"{name} has {columns} columns of int64, got {entry.dtype} {entry.shape}")
    rows: list[list[int]] = file.read(name).tolist()
    of_layers: list[set[Any]] = [set() for _ in windows]
    for index, row in enumerate(rows):
        for number, window, own in zip(row[1 + page_size :], windows, of_layers, strict=True):
            least = 0 if window is None else _NONE
            if not least <= number < len(kinds) or not _NONE <= row[0] < index:
                raise ValueError(
                    f"a node follows its parent, and has pages below {len(kinds)} of every layer "
                    f"without a window, got {row!r:.200}"
                )
            if number != _NONE:
                own.add(kinds[number])
    if any(len(own) > 1 for own in of_layers):
        raise ValueError("the pages of a layer are of one kind")
    return rows
