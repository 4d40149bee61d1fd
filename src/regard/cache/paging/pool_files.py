"""Stored prefixes in a file: tokens, contexts and pages, which another process finds again."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.cache.files import (
    Stacked,
    TensorFile,
    file_error,
    is_naturals,
    open_tensors,
    parse_json,
    write_tensors,
)
from regard.cache.paging.bookkeeping import Pages
from regard.cache.paging.contexts import Context
from regard.cache.paging.page_files import Group, Numbered, check_shapes, groups_from, taken
from regard.cache.paging.pages import Page
from regard.cache.paging.prefixes import Entry
from regard.cache.paging.tree import Layer
from regard.cache.saving import check_origin, origin

FORMAT = "regard.pool"  # of a file of stored prefixes, in its metadata
VERSION = "1"  # of the format, in its metadata
_NONE = -1  # the number of a page that a window layer does not have
_TOKENS, _PAGES = "tokens", "pages"  # tensors of all entries, one after another


class _Entry(NamedTuple):
    """An entry of a file: each layer has a window, a first page and the numbers of its pages."""

    context: Context
    tokens: list[int]
    layers: list[tuple[int | None, int, list[int]]]


def save(pool: Pages, path: str | Path) -> int:
    """See `PagePool.save`."""
    with pool.lock:
        pool.settle()
        if pool.weights is None:
            raise ValueError("the pool belongs to no model yet; store a prefix before it is saved")
        entries = list(pool.prefixes.entries())
        every: list[Any] = [p for entry in entries for each in entry.layers for p in each.pages]
        numbered = Numbered(pool, (page for page in every if page is not None))
        numbers = [_NONE if page is None else numbered.numbers[page] for page in every]
        tokens = [token for entry in entries for token in entry.tokens]
        content = {
            "page_size": pool.page_size,
            "pool_format": pool.format.name,
            "entries": [_entry_text(entry) for entry in entries],
            "groups": numbered.text(),
        }
        metadata = origin(FORMAT, VERSION, pool.weights) | {"content": json.dumps(content)}
        tensors: dict[str, Tensor | Stacked] = {_TOKENS: _long(tokens), _PAGES: _long(numbers)}
        streams = enumerate(numbered.streams())
        write_tensors(path, metadata, tensors | {_name(index): each for index, each in streams})
        return len(numbered.numbers)


def load(
    pool: Pages,
    path: str | Path,
    weights: Context | str | nn.Module,
    device: torch.device | str,
) -> int:
    """See `PagePool.load`."""
    with open_tensors(path) as file, pool.lock:
        pool.settle()
        expected = weights.weights if isinstance(weights, Context) else weights
        check_origin(file, FORMAT, VERSION, expected)
        _check_weights(pool, file)
        content = _content(file, pool)
        try:
            device = torch.device(device)
            groups = groups_from(content["groups"], pool.format, pool.page_size, device)
            names = _stream_names(groups, file)
            check_shapes(groups, pool.page_size, [file.entries[name] for name in names])
            entries = _entries(file, content["entries"], pool, groups)
            streams = (file.pieces(name) for name in names)
            pages = taken(pool, groups, streams, offloaded=True)
        except ValueError as error:
            raise ValueError(f"{file.path}: {error}") from error
        try:
            return _insert(pool, entries, pages)
        except ValueError as error:
            raise ValueError(f"{file.path}: {error}") from error
        finally:
            for page in pages:
                pool.release(page)


def _insert(pool: Pages, entries: Sequence[_Entry], pages: Sequence[Page]) -> int:
    """Store all entries or none; the number of pages that were not there."""
    before, count = pool.weights, 0
    for page in pages:
        page.sealed = True
    try:
        for context, tokens, layers in entries:
            pool.bind(context)
            found = [
                Layer(window, first, [None if n == _NONE else pages[n] for n in numbers])
                for window, first, numbers in layers
            ]
            count += len(pool.prefixes.insert(tokens, context, found))
    except ValueError:
        pool.weights = before
        for page in pages:
            pool.prefixes.forget(page)
        raise
    return count


def _entry_text(entry: Entry) -> dict[str, Any]:
    layers = [[each.window, each.first, len(each.pages)] for each in entry.layers]
    return {"key": entry.context.key, "tokens": len(entry.tokens), "layers": layers}


def _content(file: TensorFile, pool: Pages) -> dict[str, Any]:
    content = parse_json(file.metadata.get("content", ""), file.path)
    names = {"page_size", "pool_format", "entries", "groups"}
    if not isinstance(content, dict) or set(content) != names:
        raise file_error(file.path, f"its content has {', '.join(sorted(names))}", content)
    for name, own in (("page_size", pool.page_size), ("pool_format", pool.format.name)):
        if content[name] != own:
            out = f"make a PagePool with {name.removeprefix('pool_')}={content[name]!r:.50}"
            raise file_error(file.path, f"its {name} is {own!r}, the pool's", content[name], out)
    return content


def _check_weights(pool: Pages, file: TensorFile) -> None:
    weights = file.metadata["weights"]
    if pool.weights is not None and pool.weights != weights:
        rule = f"its weights are the pool's, {pool.weights[:12]!r}"
        raise file_error(file.path, rule, weights[:12], "give each model a pool of its own")


def _stream_names(groups: Sequence[Group], file: TensorFile) -> list[str]:
    """The names of the tensors that hold pages. Raises if the file has other ones."""
    count = sum(len(group.shapes(1)) for group in groups)
    names = [_name(index) for index in range(count)]
    if set(file.entries) != {_TOKENS, _PAGES, *names}:
        raise ValueError(
            f"it has tokens, pages and {count} streams, got {sorted(file.entries)!r:.200}"
        )
    return names


def _entries(file: TensorFile, texts: Any, pool: Pages, groups: Sequence[Group]) -> list[_Entry]:
    """The entries of a file."""
    tokens, numbers = (_numbers(file, name) for name in (_TOKENS, _PAGES))
    kinds = [index for index, group in enumerate(groups) for _ in range(group.size)]
    used: set[int] = set()
    entries = []
    if not isinstance(texts, list):
        raise ValueError(f"entries are a list, got {texts!r:.200}")
    for text in texts:
        context, count, shapes = _checked_entry(text, file.metadata["weights"], pool)
        layers = []
        for window, first, size in shapes:
            found = list(islice(numbers, size))
            _check_layer(window, first, found, size, kinds, groups)
            used.update(n for n in found if n != _NONE)
            layers.append((window, first, found))
        mine = list(islice(tokens, count))
        if len(mine) != count:
            raise ValueError("there are fewer tokens than the entries have")
        entries.append(_Entry(context, mine, layers))
    if len(used) != len(kinds) or next(tokens, None) is not None or next(numbers, None) is not None:
        raise ValueError("tokens or pages belong to no entry")
    return entries


def _checked_entry(
    text: Any, weights: str, pool: Pages
) -> tuple[Context, int, list[tuple[int | None, int, int]]]:
    """The context of an entry, the number of its tokens, and window, first page and pages of each
    layer."""
    if not isinstance(text, dict) or set(text) != {"key", "tokens", "layers"}:
        raise ValueError(f"an entry has a key, tokens and layers, got {text!r:.200}")
    key, count, layers = text["key"], text["tokens"], text["layers"]
    if not isinstance(key, str):
        raise ValueError(f"the key of an entry is text, got {key!r:.200}")
    if not is_naturals([count]) or not isinstance(layers, list) or not layers:
        raise ValueError(f"an entry has a number of tokens and layers, got {text!r:.200}")
    size = count // pool.page_size
    for layer in layers:
        if (
            not isinstance(layer, list)
            or len(layer) != 3
            or not is_naturals(layer[1:])
            or not (layer[0] is None or (is_naturals(layer[:1]) and layer[0]))
            or layer[1] + layer[2] > size
        ):
            raise ValueError(f"a layer has a window, a first page and pages, got {layer!r:.200}")
    return Context(weights, key), count, [tuple(layer) for layer in layers]


def _check_layer(
    window: int | None,
    first: int,
    found: Sequence[int],
    size: int,
    kinds: Sequence[int],
    groups: Sequence[Group],
) -> None:
    """Raise unless a layer's pages are there, and of one kind."""
    own = [n for n in found if n != _NONE]
    if len(found) != size or any(not 0 <= n < len(kinds) for n in own):
        raise ValueError(f"{size} pages are numbers below {len(kinds)}, got {found!r:.200}")
    if len({groups[kinds[n]].outlines for n in own}) > 1 or len(set(own)) != len(own):
        raise ValueError("the pages of a layer are different ones, of one kind")
    if window is None and (first or len(own) != len(found)):
        raise ValueError("a layer without a window has all pages of a prefix")


def _long(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _numbers(file: TensorFile, name: str) -> Iterator[int]:
    """The numbers of a tensor of a file."""
    entry = file.entries[name]
    if entry.dtype != torch.int64 or len(entry.shape) != 1:
        raise ValueError(f"{name} are a row of 64-bit integers, got {entry.dtype} {entry.shape}")
    return iter(file.read(name).tolist())


def _name(index: int) -> str:
    return f"streams.{index}"
