"""Keys and values as caches return them, in parts, and as they are stored, in streams.

A stream is a tensor, or an object such as codes or pages, whose class says how it is stored. The
classes are those of the features that store so; here nothing knows them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Stream(Protocol):
    """Keys or values `[B, G, S, W]` that are stored in another way than as a tensor, such as codes
    or pages. Each way is a class in the module of its feature; a backend names those that it reads.
    """

    @property
    def outline(self) -> Tensor:
        """A tensor of the shape and dtype of the values, which are all zero."""

    @property
    def kinds(self) -> tuple[type, ...]:
        """The class of the stream, then that of what it consists of, if that is no tensor."""

    @property
    def bits(self) -> int | None:
        """The bits of a code; None for values."""

    @property
    def rotation(self) -> tuple[int, ...]:
        """Widths of the blocks of channels that are rotated before they are quantised."""

    @property
    def is_shared(self) -> bool:
        """Whether all rows of a batch of several read the same memory."""

    @property
    def is_scattered(self) -> bool:
        """Whether the tokens lie apart, so that they are copied, or read through a table."""

    def to_tensor(self) -> Tensor:
        """The values, in a tensor."""

    def narrow(self, start: int, size: int) -> "Stream":
        """The tokens `start..start + size`."""

    def rows(self, start: int, size: int) -> "Stream":
        """The rows `start..start + size` of the batch."""

    def in_one(self) -> "AnyStream":
        """The tokens side by side in memory: a view where they lie so, else a copy."""

    def cuts(self, most: int) -> Iterator[tuple[int, int]]:
        """Ranges of tokens to read in turn; a range that is copied has at most `most` tokens."""


AnyStream = Tensor | Stream


class Streams(Sequence[Tensor]):
    """The streams of a part that are not all tensors. Indexing copies them out to tensors; backends
    may read `stored`."""

    def __init__(self, stored: Sequence[AnyStream]) -> None:
        self.stored = tuple(stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return tuple(map(to_tensor, self.stored[index]))
        return to_tensor(self.stored[index])


def streams_of(stored: Sequence[AnyStream]) -> Sequence[Tensor]:
    """The streams of a part: tensors as they are."""
    for each in stored:
        if not isinstance(each, Tensor):
            return Streams(stored)
    return tuple(stored)  # type: ignore[arg-type]


def to_tensor(stream: AnyStream) -> Tensor:
    """A stream as a tensor."""
    return stream if isinstance(stream, Tensor) else stream.to_tensor()


class Storage(NamedTuple):
    """How keys and values are stored.

    Attributes:
        kinds: the classes of their streams, but for tensors.
        bits: of their codes, the fewest where these differ; None for values.
        several: whether they lie in several parts, or in a part that is read in pieces.
    """

    kinds: tuple[type, ...] = ()
    bits: int | None = None
    several: bool = False


TENSORS = Storage()


class Part(NamedTuple):
    """Keys and values of a range of slots, as caches return them and backends read them.

    Attributes:
        kv_start: the slot of the first key.
        kv_stop: one past the last key.
        streams: tensors `[B, G, kv_stop - kv_start, W]`: keys and values, or one joined latent.

    Examples:
        >>> import torch
        >>> from regard import Part
        >>> k = torch.zeros(1, 2, 5, 8)
        >>> part = Part(0, 5, (k, k))
        >>> part.narrow(3, 5).streams[0].shape
        torch.Size([1, 2, 2, 8])
    """

    kv_start: int
    kv_stop: int
    streams: Sequence[Tensor]

    @property
    def stored(self) -> Sequence[AnyStream]:
        """The streams as they are stored."""
        return self.streams.stored if isinstance(self.streams, Streams) else self.streams

    @property
    def outlines(self) -> Sequence[Tensor]:
        """Tensors of the streams' shapes and dtypes; of other streams, without their values."""
        return tuple(x if isinstance(x, Tensor) else x.outline for x in self.stored)

    @property
    def is_scattered(self) -> bool:
        """Whether the tokens of a stream lie apart, so that they are read in pieces."""
        return any(x.is_scattered for x in self._others())

    @property
    def is_shared(self) -> bool:
        """Whether all rows of a batch of several read the same memory."""
        return all(
            x.shape[0] > 1 and x.stride(0) == 0 if isinstance(x, Tensor) else x.is_shared
            for x in self.stored
        )

    def narrow(self, start: int, stop: int) -> "Part":
        """The part with only the slots `start..stop`."""
        begin, size = start - self.kv_start, stop - start
        some = [
            x.narrow(2, begin, size) if isinstance(x, Tensor) else x.narrow(begin, size)
            for x in self.stored
        ]
        return Part(start, stop, streams_of(some))

    def rows(self, start: int, size: int) -> "Part":
        """The part with only the rows `start..start + size` of the batch."""
        some = [
            x.narrow(0, start, size) if isinstance(x, Tensor) else x.rows(start, size)
            for x in self.stored
        ]
        return self._replace(streams=streams_of(some))

    def in_one(self) -> "Part":
        """The same keys and values, those of each stream side by side in memory."""
        if not self.is_scattered:
            return self
        whole = [x if isinstance(x, Tensor) else x.in_one() for x in self.stored]
        return self._replace(streams=streams_of(whole))

    def as_tensors(self) -> "Part":
        """The same keys and values in tensors."""
        return self if isinstance(self.streams, tuple) else self._replace(streams=self.streams[:])

    def pieces(self, most: int) -> "Iterator[Part]":
        """The part in pieces whose tokens lie side by side; copies have `most` tokens or fewer."""
        scattered = next((x for x in self._others() if x.is_scattered), None)
        if scattered is None:
            yield self
            return
        for start, stop in scattered.cuts(most):
            yield self.narrow(self.kv_start + start, self.kv_start + stop).in_one()

    def _others(self) -> "Iterator[Stream]":
        """The streams that are no tensors."""
        if isinstance(self.streams, Streams):
            yield from (x for x in self.streams.stored if not isinstance(x, Tensor))


def storage_of(parts: Sequence[Part]) -> Storage:
    """How the keys and values of a call are stored."""
    if len(parts) == 1 and isinstance(parts[0].streams, tuple):
        return TENSORS
    others = [x for part in parts for x in part.stored if not isinstance(x, Tensor)]
    kinds = dict.fromkeys([kind for stream in others for kind in stream.kinds])
    bits = [stream.bits for stream in others if stream.bits is not None]
    several = len(parts) > 1 or any(stream.is_scattered for stream in others)
    return Storage(tuple(kinds), min(bits) if bits else None, several)
