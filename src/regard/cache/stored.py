"""Base classes of caches: copies, snapshots, descriptions and files of what a cache holds."""

from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from regard.cache.describing import describe
from regard.cache.files import is_naturals
from regard.cache.saving import Record, load_all, save_all
from regard.cache.streams import Lengths, check_streams, lengths_of, writable

Kind = TypeVar("Kind", bound="Stored")


class Stored:
    """Base class of caches: copies that share no memory, and a snapshot to undo failed updates.

    An update rebinds attributes, and writes to buffers only after the tokens held. So the
    attributes are the whole state, and a snapshot needs no copy of a tensor.

    Attributes:
        pieces: the widths of the pieces of a joined stream, which a layer announces before its
            first update; None of other streams.
    """

    pieces: Sequence[int] | None = None

    def __copy__(self: Kind) -> Kind:
        new = type(self).__new__(type(self))
        vars(new).update({name: _copied(value) for name, value in vars(self).items()})
        return new

    def __deepcopy__(self: Kind, memo: object) -> Kind:
        return self.__copy__()

    def fork(self: Kind) -> Kind:
        """An independent cache with the same tokens.

        Returns:
            A cache of the same kind: what is appended to one of the two is not in the other.

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
        vars(self).update(snapshot)

    def can_truncate(self, length: int | Tensor) -> bool:
        """Whether `truncate(length)` would not raise.

        Args:
            length: the number of tokens that would remain, or `[B]` numbers.

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
        return describe(self)

    def save(self, path: str | Path, *, weights: str | nn.Module) -> None:
        """Write the tokens held to a file, in the safetensors format.

        Args:
            path: of the file, which appears there when it is complete; one that is there is
                replaced. Only its owner can read it.
            weights: the model whose keys and values they are, or its fingerprint: `load` refuses
                those of other weights.

        Raises:
            OSError: if the disk is full or read-only; a file of that name is as before.

        Examples:
            >>> import tempfile
            >>> from pathlib import Path
            >>> from regard import KVCache
            >>> cache, k = KVCache(), torch.ones(1, 2, 5, 8)
            >>> _ = cache.update(k, k)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = Path(folder, "cache.safetensors")
            ...     cache.save(path, weights="layer 3 of my model")
            ...     again = KVCache()
            ...     again.load(path, weights="layer 3 of my model")
            >>> again.length, again.buffers[0].sum().item()
            (5, 80.0)
        """
        save_all([self], path, weights=weights)

    def load(
        self, path: str | Path, *, weights: str | nn.Module, device: torch.device | str = "cpu"
    ) -> None:
        """Take the tokens of a file that `save` wrote, into this cache, which is empty.

        Args:
            path: of the file. It is checked before anything is allocated, and may come from
                elsewhere.
            weights: the model that the cache is for, or its fingerprint.
            device: of the streams.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if this cache holds tokens, the file is of another kind of cache or of one
                with other arguments, of other weights, of an unknown version, or damaged. The
                cache is as before.

        Examples:
            >>> import tempfile
            >>> from pathlib import Path
            >>> from regard import KVCache, StaticCache
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = Path(folder, "cache.safetensors")
            ...     KVCache().save(path, weights="mine")
            ...     try:
            ...         StaticCache(8).load(path, weights="mine")
            ...     except ValueError as error:
            ...         print(str(error).partition(": ")[2])
            layer 0 is StaticCache(max_length=8), got KVCache(); load it into that
        """
        load_all([self], path, weights=weights, device=device)

    @property
    def length(self) -> int:
        """The number of tokens so far."""
        raise NotImplementedError

    @property
    def lengths(self) -> Lengths:
        """The number of tokens of each row."""
        return Lengths(self.length, self.length)

    @property
    def first(self) -> int:
        """The slot of the first token held."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens held."""
        raise NotImplementedError

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the memory, which may have room for more tokens."""
        raise NotImplementedError

    @property
    def empty_streams(self) -> tuple[Tensor, ...]:
        """Tensors of no tokens, with the other sizes and the dtypes of the streams."""
        raise NotImplementedError

    @property
    def arguments(self) -> dict[str, Any]:
        """What the cache was constructed with, for its file."""
        raise NotImplementedError

    def record(self) -> Record:
        """What the cache holds, for its file."""
        raise NotImplementedError

    def fill(self, record: Record) -> None:
        """Take what a file holds, into this new cache.

        Args:
            record: of a cache of this kind and these arguments.

        Raises:
            ValueError: if it could not be the record of such a cache.
        """
        raise NotImplementedError

    def become(self: Kind, other: Kind) -> None:
        """Take the state of a cache that is not used any more."""
        vars(self).update(vars(other))

    if TYPE_CHECKING:

        def truncate(self, length: int | Tensor) -> None: ...


def _copied(value: object) -> object:
    """A copy with cloned tensors, because caches with a common buffer would overwrite each other.

    Clones keep their autograd graph.
    """
    if isinstance(value, Tensor):
        return writable(value.clone)
    if isinstance(value, tuple):
        parts, new = tuple(map(_copied, value)), cast(Callable[..., object], type(value))
        return parts if new is tuple else new(*parts)
    return value.__copy__() if isinstance(value, Stored) else value


class Contiguous(Stored):
    """Base class of caches that hold each stream in one tensor."""

    _first = 0  # the slot of the first token held

    def __init__(self) -> None:
        self._lengths = Lengths()
        self._held: tuple[Tensor, ...] = ()

    @property
    def length(self) -> int:
        """The number of tokens so far."""
        return self._lengths.longest

    @property
    def lengths(self) -> Lengths:
        """The number of tokens of each row."""
        return self._lengths

    @property
    def first(self) -> int:
        """The slot of the first token held."""
        return self._first

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The tensors that hold the tokens, some with room for more after them."""
        return self._held

    def count(self, new: int) -> None:
        """Count tokens that have been written to `buffers`, after those held."""
        self._lengths = self._lengths.grown(new)

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens held."""
        sizes = ((held.shape, held.element_size()) for held in self._held)
        per_token = sum(shape[0] * shape[1] * shape[3] * size for shape, size in sizes)
        return per_token * (self.length - self._first)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers, which have room for more tokens."""
        return sum(held.numel() * held.element_size() for held in self._held)

    @property
    def empty_streams(self) -> tuple[Tensor, ...]:
        """Tensors of no tokens, with the other sizes and the dtypes of the streams."""
        return tuple(each.detach()[:, :, :0] for each in self._held)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the cache was constructed with, for its file."""
        return {}

    def record(self) -> Record:
        """What the cache holds, for its file: tokens, without the room after them."""
        rows = self._lengths.rows
        state = {
            "length": self.length,
            "first": self._first,
            "rows": None if rows is None else rows.tolist(),
        }
        held = tuple(each.detach().narrow(2, 0, self.length - self._first) for each in self._held)
        streams = held if rows is None else tuple(_without_stale(each, rows) for each in held)
        return Record(type(self).__name__, self.arguments, state, streams)

    def fill(self, record: Record) -> None:
        """Take what a file holds, into this new cache.

        Args:
            record: of a cache of this kind and these arguments.

        Raises:
            ValueError: if it could not be the record of such a cache.
        """
        length, first, rows = (record.state.get(name) for name in ("length", "first", "rows"))
        if not is_naturals([length, first]) or not (rows is None or is_naturals(rows)):
            raise ValueError(f"length, first and rows are whole numbers, got {record.state}")
        assert isinstance(length, int) and isinstance(first, int)
        lengths = Lengths(length, length)
        if rows is not None:
            lengths = lengths_of(torch.tensor(rows, dtype=torch.int64, device="cpu"))
        held = check_streams(record.streams, ()) if record.streams else 0
        batch = record.streams[0].shape[0] if record.streams else 0
        if (
            held != length - first
            or lengths.longest != length
            or (rows is not None and len(rows) != batch)
        ):
            raise ValueError(
                f"streams have {length} - {first} tokens, those of the longest row, and a row for "
                f"each length, got {held} tokens of {batch} rows, rows={rows}"
            )
        self._check_first(length, first)
        self._lengths, self._first = lengths, first
        self._held = self._buffers(record.streams)

    def _check_first(self, length: int, first: int) -> None:
        if first:
            raise ValueError(f"{type(self).__name__} holds tokens from slot 0 on, got {first}")

    def _buffers(self, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Buffers for the tokens of a file; the next update makes some with more room."""
        return streams


def _without_stale(stream: Tensor, lengths: Tensor) -> Tensor:
    """A stream with zeros in the slots after the end of each row, where dropped tokens remain."""
    slots = torch.arange(stream.shape[2], device=stream.device)
    stale = slots >= lengths.to(stream.device)[:, None]
    return stream.masked_fill(stale[:, None, :, None], 0)
