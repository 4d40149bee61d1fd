"""Copies, snapshots and descriptions of every kind of cache; files of the caches of all layers."""

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from regard.cache.files import is_naturals, open_tensors
from regard.cache.saving import (
    Record,
    lengths_from,
    lengths_state,
    read_entries,
    write_entries,
)
from regard.cache.streams import Lengths, check_streams, writable
from regard.words import counted

Kind = TypeVar("Kind", bound="Stored")


class Stored:
    """Base class of caches: copies that share no memory, and a snapshot to undo failed updates.

    An update rebinds attributes, and writes to buffers only after the tokens held. So the
    attributes are the whole state, and a snapshot needs no copy of a tensor. Each stream is held in
    one tensor; caches that hold pages override what depends on it.

    Attributes:
        pieces: the widths of the pieces of a joined stream, which a layer announces before its
            first update; None of other streams.
        window: how many tokens a query may attend to, its own counted; None: all of them.
    """

    pieces: Sequence[int] | None = None
    window: int | None = None
    _first = 0  # the slot of the first token held

    def __init__(self) -> None:
        self._lengths = Lengths()
        self._held: tuple[Tensor, ...] = ()  # the streams, with room after the tokens

    def __copy__(self: Kind) -> Kind:
        new = type(self).__new__(type(self))
        vars(new).update(vars(self))
        new._held = tuple(writable(each.clone) for each in self._held)  # with their autograd graph
        return new

    def __deepcopy__(self: Kind, memo: object) -> Kind:
        return copy(self)

    def fork(self: Kind) -> Kind:
        """A cache of the same kind with the same tokens, independent of this one.

        Examples:
            >>> from regard import KVCache
            >>> cache, k = KVCache(), torch.zeros(1, 2, 5, 8)
            >>> _ = cache.update(k, k)
            >>> other = cache.fork()
            >>> _ = other.update(k, k)
            >>> cache.length, other.length
            (5, 10)
        """
        return copy(self)

    def snapshot(self) -> object:
        """The present state."""
        return dict(vars(self))

    def restore(self, snapshot: object) -> None:
        """Undo the updates since `snapshot` was called; nothing else may have happened."""
        assert isinstance(snapshot, dict)
        vars(self).clear()
        vars(self).update(snapshot)

    def truncate(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens, or `[B]` lengths; the buffers stay."""
        self._lengths = self._lengths.truncated(length, self._held)

    def can_truncate(self, length: int | Tensor) -> bool:
        """Whether `truncate(length)`, to a number of tokens or to `[B]` numbers, would not raise.

        Examples:
            >>> from regard import SlidingCache
            >>> cache, k = SlidingCache(4, rollback=2), torch.zeros(1, 2, 10, 8)
            >>> _ = cache.update(k, k)
            >>> cache.can_truncate(8), cache.can_truncate(7)
            (True, False)
        """
        before = self.snapshot()
        try:
            self.truncate(length)
        except ValueError:
            return False
        finally:
            self.restore(before)
        return True

    def describe(self) -> str:
        """The kind of cache, its rows and lengths, bytes, and the shapes and dtypes of its streams.

        Examples:
            >>> from regard import KVCache
            >>> cache, k = KVCache(), torch.zeros(1, 2, 5, 8)
            >>> _ = cache.update(k, k)
            >>> print(cache.describe())
            KVCache(): 1 row of 5 tokens, 640 bytes held, 32,768 allocated
              streams [1, 2, 5, 8] float32, [1, 2, 5, 8] float32
        """
        if not self.empty_streams:
            return f"{self!r}: no tokens"
        shortest, count = self.lengths.shortest, self.length - self._first
        tokens = counted(self.length, "token")
        if shortest != self.length:
            tokens = f"{shortest:,} to {tokens}"
        latest = f", the last {count:,} held" if count != self.length else ""
        rows = counted(self.empty_streams[0].shape[0], "row")
        streams = ", ".join(
            f"{[*x.shape[:2], self.length, x.shape[3]]} {str(x.dtype).removeprefix('torch.')}"
            for x in self.empty_streams
        )
        return (
            f"{self!r}: {rows} of {tokens}{latest}, {self.nbytes:,} bytes held, "
            f"{self.allocated_bytes:,} allocated\n"
            f"  streams {streams}"
        )

    def save(self, path: str | Path, *, weights: str | nn.Module) -> None:
        """Write the tokens held to a file: `save_all` of this cache alone."""
        save_all([self], path, weights=weights)

    def load(
        self, path: str | Path, *, weights: str | nn.Module, device: torch.device | str = "cpu"
    ) -> None:
        """Take the tokens of a file into this cache, which is empty: `load_all` of it alone."""
        load_all([self], path, weights=weights, device=device)

    @property
    def length(self) -> int:
        """The number of tokens so far."""
        return self._lengths.longest

    @property
    def lengths(self) -> Lengths:
        """The number of tokens of each row."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens held."""
        return sum(each[:, :, : self.length - self._first].nbytes for each in self._held)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the memory, which may have room for more tokens."""
        return sum(each.nbytes for each in self._held)

    @property
    def empty_streams(self) -> tuple[Tensor, ...]:
        """Tensors of no tokens, with the other sizes and the dtypes of the streams."""
        return tuple(each.detach()[:, :, :0] for each in self._held)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the constructor, for a file of the cache."""
        return {}

    def record(self) -> Record:
        """The tokens and their state, for a file of the cache."""
        rows = self._lengths.rows
        streams = [x.detach().narrow(2, 0, self.length - self._first) for x in self._held]
        if rows is not None:
            streams = [_without_stale(stream, rows) for stream in streams]
        return Record(lengths_state(self._lengths) | {"first": self._first}, streams)

    def fill(self, record: Record) -> None:
        """Take the tokens of a file into this cache, which is empty and has the same arguments.

        Raises:
            ValueError: if it could not be the record of such a cache.
        """
        lengths, first = lengths_from(record.state), cast(int, record.state.get("first"))
        tokens = check_streams(record.streams, ()) if record.streams else 0
        rows = record.streams[0].shape[0] if record.streams else 0
        if (
            not is_naturals([first])
            or lengths.longest - first != tokens
            or (lengths.rows is not None and len(lengths.rows) != rows)
        ):
            raise ValueError(
                f"streams have the tokens from slot {first} to {lengths.longest} and a row for "
                f"each length, got {tokens} tokens of {rows} rows and {lengths.rows}"
            )
        self._lengths, self._first = lengths, first
        self._held = tuple(record.streams)
        if min(first, self.length) > self._oldest():
            raise ValueError(
                f"{self!r} holds the tokens from slot {self._oldest()} on, got those from slot "
                f"{first} of {self.length}"
            )

    def _oldest(self) -> int:
        """The oldest slot that the next token may attend to."""
        return 0 if self.window is None else max(0, self.length - self.window + 1)


def _without_stale(stream: Tensor, lengths: Tensor) -> Tensor:
    """A stream with zeros in the slots after the end of each row, where dropped tokens remain."""
    slots = torch.arange(stream.shape[2], device=stream.device)
    stale = slots >= lengths.to(stream.device)[:, None]
    return stream.masked_fill(stale[:, None, :, None], 0)


def save_all(caches: Sequence[object], path: str | Path, *, weights: str | nn.Module) -> None:
    """Write what the caches of all layers hold to one file, in the safetensors format.

    Args:
        caches: one for each layer, in order.
        path: of the file, which appears there when it is complete; one that is there is replaced.
            Only its owner can read it.
        weights: the model whose keys and values they are, or its fingerprint.

    Raises:
        OSError: if the disk is full or read-only; a file of that name is as before.
        TypeError: if a cache is not one of regard's.

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
    stored = _check_stored(caches, "saved")
    entries = [(type(each).__name__, each.arguments, each.record()) for each in stored]
    write_entries(path, entries, weights)


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
        ImportError: if safetensors is not installed.
        TypeError: if a cache is not one of regard's.
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
    stored = _check_stored(caches, "loaded")
    for layer, cache in enumerate(stored):
        if cache.length:
            raise ValueError(
                f"the cache of layer {layer} holds {cache.length} tokens; load into an empty one"
            )
    if len({id(cache) for cache in stored}) != len(stored):
        raise ValueError("a cache comes twice; each layer needs its own cache")
    before = [cache.snapshot() for cache in stored]
    with open_tensors(path) as file:
        own = [(type(cache).__name__, cache.arguments) for cache in stored]
        entries = read_entries(file, own, weights)
        try:
            for layer, (cache, entry) in enumerate(zip(stored, entries, strict=True)):
                streams = [file.read(name).to(device) for name in entry["streams"]]
                try:
                    cache.fill(Record(entry["state"], streams))
                except ValueError as error:
                    where = f"{file.path}: layer {layer}"
                    raise ValueError(f"{where}: {error}; save it again") from error
        except BaseException:
            for cache, snapshot in zip(stored, before, strict=True):
                cache.restore(snapshot)
            raise


def truncate_all(caches: Sequence[object], length: int | Tensor) -> None:
    """Truncate the caches of all layers to the first `length` tokens, or none of them.

    Args:
        caches: one for each layer.
        length: the number of tokens that remain, or `[B]` numbers.

    Raises:
        TypeError: if a cache is not one of regard's.
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
    stored = _check_stored(caches, "truncated with others")
    for layer, cache in enumerate(stored):
        try:
            if not cache.can_truncate(length):
                cache.truncate(length)  # raises, and says why
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}; no layer was truncated") from error
    for cache in stored:
        cache.truncate(length)


def _check_stored(caches: Sequence[object], change: str) -> list[Stored]:
    """The caches. Raises unless each is one of regard's."""
    for layer, cache in enumerate(caches):
        if not isinstance(cache, Stored):
            raise TypeError(
                f"layer {layer}: {type(cache).__name__} cannot be {change}: it is not a cache of "
                "regard; use KVCache(), say"
            )
    return cast(list[Stored], list(caches))
