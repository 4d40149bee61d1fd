"""Files of what caches hold, and operations on the caches of all layers: on all or on none.

A file has the version of this format, the fingerprint of the weights that made the keys and values,
and for each cache its kind, its arguments and the lengths of its rows. All of it is compared before
a tensor is allocated: a cache of other weights has the right shapes and gives wrong results.
"""

import json
import reprlib
import sys
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from regard.cache.files import (
    DTYPES,
    TensorFile,
    is_naturals,
    is_shape,
    parsed,
    refused,
    write_tensors,
)

FORMAT = "regard.cache"  # of a file of caches, in its metadata
VERSION = "1"  # of the format, in its metadata; changes when older versions cannot read a file
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


class Record(NamedTuple):
    """What a cache holds: what JSON can express, and streams `[B, G, tokens, W]`."""

    kind: str  # the name of its class
    arguments: dict[str, Any]  # of its constructor
    state: dict[str, Any]  # lengths, first slot, ...
    streams: tuple[Any, ...]  # tensors, or a Stacked that is to be written


@runtime_checkable
class Truncatable(Protocol):
    """A cache that says what it can be truncated to."""

    def can_truncate(self, length: int | Tensor) -> bool: ...

    def truncate(self, length: int | Tensor) -> None: ...


@runtime_checkable
class Fillable(Protocol):
    """A cache that can be written to a file and read from one."""

    length: int
    arguments: dict[str, Any]

    def record(self) -> Record: ...

    def fill(self, record: Record) -> None: ...

    def become(self, other: Any) -> None: ...


def save_all(caches: Sequence[object], path: str | Path, *, weights: str | nn.Module) -> None:
    """Write what the caches of all layers hold to one file, in the safetensors format.

    Args:
        caches: one for each layer, in order.
        path: of the file, which appears there when it is complete; one that is there is replaced.
            Only its owner can read it.
        weights: the model whose keys and values they are, or its fingerprint.

    Raises:
        OSError: if the disk is full or read-only; a file of that name is as before.
        TypeError: if a cache has no `record`.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from regard import KVCache
        >>> from regard.cache import load_all, save_all
        >>> caches, k = [KVCache(), KVCache()], torch.ones(1, 2, 5, 8)
        >>> for cache in caches:
        ...     _ = cache.update(k, k)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "caches.safetensors")
        ...     save_all(caches, path, weights="my model")
        ...     again = [KVCache(), KVCache()]
        ...     load_all(again, path, weights="my model")
        >>> [cache.length for cache in again]
        [5, 5]
    """
    records = [_recorded(layer, cache) for layer, cache in enumerate(caches)]
    write_tensors(
        path,
        {
            "format": FORMAT,
            "version": VERSION,
            "regard": library_version(),
            "weights": weights_text(weights),
            "caches": json.dumps([_entry(each) for each in records]),
        },
        {
            _name(layer, index): stream
            for layer, each in enumerate(records)
            for index, stream in enumerate(each.streams)
        },
    )


def load_all(
    caches: Sequence[object],
    path: str | Path,
    *,
    weights: str | nn.Module,
    device: torch.device | str = "cpu",
) -> None:
    """Take what a file holds into the caches of all layers, or into none.

    Args:
        caches: one for each layer, in order, empty, and of the kinds and arguments of those saved.
        path: of the file. It is checked before anything is allocated, and may come from elsewhere.
        weights: the model that the caches are for, or its fingerprint.
        device: of the streams.

    Raises:
        OSError: if the file cannot be read.
        TypeError: if a cache has no `fill`.
        ValueError: if a cache holds tokens, or the file is of other kinds of caches, of other
            weights, of an unknown version, or damaged. All caches are as before.

    Examples:
        >>> import torch
        >>> from regard import KVCache
        >>> from regard.cache import load_all
        >>> cache = KVCache()
        >>> _ = cache.update(torch.zeros(1, 2, 5, 8))
        >>> load_all([cache], "any.safetensors", weights="my model")
        Traceback (most recent call last):
        ...
        ValueError: the cache of layer 0 holds 5 tokens; load into an empty one
    """
    empty = _checked_empty(caches)
    with TensorFile(path) as file:
        check_origin(file, FORMAT, VERSION, weights)
        entries = _entries(file, empty)
        filled = []
        for layer, (cache, entry) in enumerate(zip(empty, entries, strict=True)):
            names = [_name(layer, index) for index in range(len(entry["streams"]))]
            streams = tuple(file.read(name).to(device) for name in names)
            new = copy(cache)
            try:
                new.fill(Record(entry["kind"], entry["arguments"], entry["state"], streams))
            except ValueError as error:
                raise ValueError(f"{file.path}: layer {layer}: {error}; save it again") from error
            filled.append(new)
    for cache, new in zip(empty, filled, strict=True):
        cache.become(new)


def truncate_all(caches: Sequence[object], length: int | Tensor) -> None:
    """Truncate the caches of all layers to the first `length` tokens, or none of them.

    Args:
        caches: one for each layer.
        length: the number of tokens that remain, or `[B]` numbers.

    Raises:
        TypeError: if a cache has no `can_truncate`.
        ValueError: if one cannot be truncated to it. All caches are as before.

    Examples:
        >>> import torch
        >>> from regard import KVCache, SlidingCache
        >>> from regard.cache import truncate_all
        >>> caches, k = [KVCache(), SlidingCache(4)], torch.zeros(1, 2, 10, 8)
        >>> for cache in caches:
        ...     _ = cache.update(k, k)
        >>> truncate_all(caches, 9)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: layer 1: length=9 needs keys from slot 6 on, ...; no layer was truncated
        >>> [cache.length for cache in caches]
        [10, 10]
    """
    able: list[Truncatable] = []
    for layer, cache in enumerate(caches):
        if not isinstance(cache, Truncatable):
            raise TypeError(
                f"layer {layer}: {type(cache).__name__} has no can_truncate(length), so that not "
                "all layers or none could be truncated; add it, or truncate each cache"
            )
        if not cache.can_truncate(length):
            try:
                cache.truncate(length)
            except ValueError as error:
                raise ValueError(f"layer {layer}: {error}; no layer was truncated") from error
            raise AssertionError("can_truncate says False where truncate does not raise")
        able.append(cache)
    for each in able:
        each.truncate(length)


def weights_text(weights: str | nn.Module) -> str:
    """The fingerprint of weights, of which a module's is computed.

    Args:
        weights: a module, or a text that names its weights and no others.

    Raises:
        TypeError: if it is neither.
        ValueError: if it is an empty text.

    Examples:
        >>> from regard.cache.saving import weights_text
        >>> weights_text("my model")
        'my model'
    """
    if isinstance(weights, nn.Module):
        from regard.cache.paging.fingerprints import fingerprint

        return fingerprint(weights)
    if not isinstance(weights, str):
        raise TypeError(
            f"weights is the model, or a text that names its weights, got {type(weights).__name__}"
        )
    if not weights.strip():
        raise ValueError(f"weights names the weights of a model, got {weights!r}; give the model")
    return weights


def check_origin(file: TensorFile, kind: str, version: str, weights: str | nn.Module) -> None:
    """Raise unless a file is of this format and version, and of these weights.

    Args:
        file: with its metadata.
        kind: the format.
        version: of the format.
        weights: the model that its tokens are for, or its fingerprint.

    Raises:
        ValueError: naming what differs.
    """
    metadata = file.metadata
    if metadata.get("format") != kind:
        out = "give a file that save() wrote"
        raise refused(file.path, f"its format is {kind!r}", metadata.get("format"), out)
    if metadata.get("version") != version:
        out = f"it was written by regard {reprlib.repr(metadata.get('regard'))}, use that"
        raise refused(file.path, f"its version is {version}", metadata.get("version"), out)
    expected = weights_text(weights)
    if metadata.get("weights") != expected:
        out = "keys and values of other weights give wrong results: load those of this model"
        came = metadata.get("weights")
        raise refused(file.path, f"its weights are {reprlib.repr(expected)}", came, out)


def outlines_text(streams: Sequence[Tensor]) -> list[dict[str, Any]]:
    """The shapes and dtypes of streams, for JSON; tokens are not counted.

    Examples:
        >>> from regard.cache.saving import outlines_text
        >>> outlines_text([torch.zeros(1, 2, 5, 8)])
        [{'shape': [1, 2, 0, 8], 'dtype': 'float32'}]
    """
    return [_outline((*each.shape[:2], 0, *each.shape[3:]), each.dtype) for each in streams]


def outlines_from(value: Any, streams: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors of no tokens, with the shapes and dtypes that JSON of `outlines_text` describes.

    Args:
        value: of the JSON of a file.
        streams: on whose device they are made.

    Raises:
        ValueError: if it describes none.
    """
    if not isinstance(value, list) or not all(_is_outline(each) for each in value):
        raise ValueError(f"outlines have a shape [B, G, 0, W] and a dtype, got {value!r:.200}")
    device = streams[0].device if streams else torch.device("cpu")
    return tuple(
        torch.empty(each["shape"], dtype=_DTYPES[each["dtype"]], device=device) for each in value
    )


def checked_pieces(value: Any, like: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The widths of the pieces of one joined stream, from the JSON of a file.

    Args:
        value: of the JSON.
        like: the streams of the cache.

    Raises:
        ValueError: if they are not the width of the stream together.

    Examples:
        >>> from regard.cache.saving import checked_pieces
        >>> checked_pieces([512, 64], [torch.zeros(1, 1, 0, 576)])
        (512, 64)
    """
    if value is None:
        return None
    width = like[0].shape[-1] if like else 0
    if not is_naturals(value) or 0 in value or (len(like) == 1 and sum(value) != width):
        raise ValueError(f"pieces are {width} channels wide together, got {value!r:.200}")
    return tuple(value)


def _is_outline(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"shape", "dtype"}:
        return False
    shape, dtype = value["shape"], value["dtype"]
    known = isinstance(dtype, str) and dtype in _DTYPES
    return known and is_shape(shape) and len(shape) == 4 and shape[2] == 0


def _outline(shape: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}


def _recorded(layer: int, cache: object) -> Record:
    if not isinstance(cache, Fillable):
        raise TypeError(
            f"layer {layer}: {type(cache).__name__} cannot be saved: it has no record()"
        )
    return cache.record()


def _entry(record: Record) -> dict[str, Any]:
    streams = [_outline(each.shape, each.dtype) for each in record.streams]
    return {
        "kind": record.kind,
        "arguments": record.arguments,
        "state": record.state,
        "streams": streams,
    }


def _checked_empty(caches: Sequence[object]) -> list[Fillable]:
    """The caches. Raises unless each can be filled, is empty, and is there once."""
    empty: list[Fillable] = []
    for layer, cache in enumerate(caches):
        if not isinstance(cache, Fillable):
            raise TypeError(
                f"layer {layer}: {type(cache).__name__} cannot be loaded: it has no fill(record)"
            )
        if cache.length:
            raise ValueError(
                f"the cache of layer {layer} holds {cache.length} tokens; load into an empty one"
            )
        empty.append(cache)
    if len({id(cache) for cache in caches}) != len(caches):
        raise ValueError("a cache comes twice; each layer needs its own cache")
    return empty


def _entries(file: TensorFile, caches: Sequence[Fillable]) -> list[dict[str, Any]]:
    """What the file says of each cache, if it fits the caches and the tensors of the file."""
    entries = parsed(file.metadata.get("caches", ""), file.path)
    if not isinstance(entries, list) or len(entries) != len(caches):
        got = len(entries) if isinstance(entries, list) else entries
        out = "load it into as many as were saved"
        raise refused(file.path, f"it has {len(caches)} caches, one for each layer", got, out)
    described: dict[str, dict[str, Any]] = {}
    for layer, (entry, cache) in enumerate(zip(entries, caches, strict=True)):
        if not isinstance(entry, dict) or set(entry) != {"kind", "arguments", "state", "streams"}:
            raise refused(file.path, "a cache has kind, arguments, state and streams", entry)
        own = (type(cache).__name__, cache.arguments)
        if (entry["kind"], entry["arguments"]) != own:
            rule = f"layer {layer} is {_called(*own)}"
            got = _called(entry["kind"], entry["arguments"])
            raise ValueError(f"{file.path}: {rule}, got {got:.200}; load it into that")
        if not isinstance(entry["state"], dict) or not isinstance(entry["streams"], list):
            raise refused(file.path, "state is an object and streams are a list", entry)
        described |= {_name(layer, index): each for index, each in enumerate(entry["streams"])}
    found = {name: _outline(each.shape, each.dtype) for name, each in file.entries.items()}
    if found != described:
        names = [name for name in {**found, **described} if found.get(name) != described.get(name)]
        rule = f"{names[0]!r} is what its metadata says, {reprlib.repr(described.get(names[0]))}"
        raise refused(file.path, rule, found.get(names[0]))
    return entries


def _called(kind: Any, arguments: Any) -> str:
    given = arguments.items() if isinstance(arguments, dict) else [("?", arguments)]
    return f"{kind}({', '.join(f'{name}={value!r}' for name, value in given)})"


def _name(layer: int, index: int) -> str:
    return f"layers.{layer}.streams.{index}"


def library_version() -> str:
    """The version of regard, for files."""
    version: str = sys.modules["regard"].__version__  # importing it here would be a circle
    return version
