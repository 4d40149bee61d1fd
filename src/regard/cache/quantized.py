"""A cache whose keys and values are quantised to 8, 6 or 4 bits.

Each token, head and group of channels has its own scale and zero point. So tokens are quantised
once, independently of each other, and an outlier channel affects only its group.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache.codes import QuantizedStream, bytes_of
from regard.cache.growing import KVCache
from regard.cache.paging.formats import GROUP, PageFormat, format_of
from regard.cache.parts import Part, Streams
from regard.cache.quantizing import quantized
from regard.cache.saving import Record, checked_pieces, outlines_from, outlines_text
from regard.cache.stored import Stored
from regard.cache.streams import Lengths, check_streams, check_whole, needs_gradients, select_rows
from regard.span import Span
from regard.tracing import is_forward_mode


class _Described(NamedTuple):
    """How one stream is stored; `bits` is None where its numbers are not changed."""

    bits: int | None
    group: int
    rotation: tuple[int, ...]
    like: Tensor  # without tokens, of the stream's shape and dtype


class QuantizedCache(Stored):
    """A cache of keys and values in 8, 6 or 4 bits; integer streams are stored unchanged.

    Quantisation is asymmetric: `value = zero + scale * code`, with a bfloat16 scale and zero for
    each `group` channels of a token and head. The error of a value is at most half a scale, and one
    rounding. `update` returns the quantised values of all tokens, the new ones too, in their
    original dtype. Decoding reads the codes; other calls dequantise them all.
    Values must be finite, and below 1e38 in size; this is not checked. Buffers grow by doubling.

    With a `format`, keys and values each have their own bits, and a stream of fewer than 8 bits is
    rotated first: its channels are multiplied by a Hadamard matrix, which spreads outliers over all
    of them (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456). Of an MLA layer's joined stream only
    the latent is rotated.

    Args:
        bits: 8 or 4 (two codes a byte), of keys and values alike, without rotation.
        group: channels with one scale, an even number; the last group may be smaller.
        format: instead of `bits`, those of keys and of values: `"K8V4"`, or any other
            `K{8|6|4}V{8|6|4}`.

    Raises:
        ValueError: if an argument is none of these.

    Examples:
        >>> import torch
        >>> from regard import QuantizedCache
        >>> cache = QuantizedCache()
        >>> k = torch.randn(1, 2, 5, 64)
        >>> (cache.update(k, k)[0].streams[0] - k).abs().max().item() < 0.05
        True
        >>> cache.nbytes == 5 * 2 * 2 * (64 + 2 * 2)
        True
        >>> low = QuantizedCache(format="K8V4")
        >>> parts = low.update(k, k)
        >>> low.nbytes == 5 * 2 * ((64 + 2 * 2) + (32 + 2 * 2))
        True
    """

    def __init__(
        self, bits: int = 8, group: int = GROUP, *, format: str | PageFormat | None = None
    ) -> None:
        check_whole("bits", bits)
        check_whole("group", group)
        if bits not in (4, 8):
            raise ValueError(f"bits is 8 or 4, got {bits}; format='K6V6' has 6")
        if group < 1 or group % 2:
            raise ValueError(f"group is an even number of channels, got {group}")
        self.format = _format_of(bits, group) if format is None else _quantising(format, group)
        self.group = group
        self._store = KVCache()
        self._streams: tuple[_Described, ...] = ()  # those held

    @property
    def key_bits(self) -> int:
        """The bits of a key's channel, or of a joined stream's."""
        assert self.format.key_bits is not None
        return self.format.key_bits

    @property
    def value_bits(self) -> int:
        """The bits of a value's channel."""
        assert self.format.value_bits is not None
        return self.format.value_bits

    @property
    def bits(self) -> int:
        """The fewest bits of a channel, which decide what backends can read."""
        return min(self.key_bits, self.value_bits)

    @property
    def length(self) -> int:
        """The number of tokens so far."""
        return self._store.length

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens held: codes, scales and zeros."""
        return self._store.nbytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers, which have room for more tokens."""
        return self._store.allocated_bytes

    def span(self, new: int) -> Span:
        """The slots of the queries and keys of a call with `new` more tokens."""
        return self._store.span(new)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; return all tokens, dequantised on indexing.

        Raises:
            ValueError: if the streams do not fit, or require gradients.
        """
        streams = self._described(new)
        parts = self._store.update(*_stored(new, streams))
        self._streams = streams
        return _joined(parts, streams)

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        """The result of `update`, in new tensors, without changing the cache."""
        streams = self._described(new)
        return _joined(self._store.peek(*_stored(new, streams)), streams)

    def snapshot(self) -> object:
        """The present state."""
        return self._streams, self._store.snapshot()

    def restore(self, snapshot: object) -> None:
        """Undo the updates since `snapshot` was called; nothing else may have happened."""
        assert isinstance(snapshot, tuple)
        self._streams, store = snapshot
        self._store.restore(store)

    def truncate(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens, or `[B]` lengths; the buffers stay."""
        self._store.truncate(length)

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows, `[N]` integers, in this order."""
        self._store.reorder(rows)
        likes = select_rows([each.like for each in self._streams], rows)
        pairs = zip(self._streams, likes, strict=True)
        self._streams = tuple(each._replace(like=like) for each, like in pairs)

    @property
    def lengths(self) -> Lengths:
        """The number of tokens of each row."""
        return self._store.lengths

    @property
    def empty_streams(self) -> tuple[Tensor, ...]:
        """Tensors of no tokens, with the other sizes and the dtypes of the streams."""
        return tuple(each.like for each in self._streams)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the cache was constructed with, for its file."""
        return {"format": self.format.name, "group": self.group}

    def record(self) -> Record:
        """What the cache holds, for its file: codes, scales and zeros of the tokens."""
        store = self._store.record()
        pieces = None if self.pieces is None else list(self.pieces)
        own = {"outlines": outlines_text(self.empty_streams), "pieces": pieces}
        return Record(type(self).__name__, self.arguments, {**store.state, **own}, store.streams)

    def fill(self, record: Record) -> None:
        """Take what a file holds, into this new cache.

        Args:
            record: of a cache of this kind and these arguments.

        Raises:
            ValueError: if it could not be the record of such a cache.
        """
        like = outlines_from(record.state.get("outlines"), record.streams)
        pieces = checked_pieces(record.state.get("pieces"), like)
        self.pieces = self.pieces if pieces is None else pieces
        streams = self._described(like) if like else ()
        expected = outlines_text(_empty(streams))
        if expected != outlines_text(record.streams):
            raise ValueError(
                f"the codes of streams {outlines_text(like)} are {expected}, got "
                f"{outlines_text(record.streams)}"
            )
        self._store.fill(record)
        self._streams = streams

    def _described(self, new: tuple[Tensor, ...]) -> tuple[_Described, ...]:
        """How the streams are stored. Raises if they do not fit, or require gradients."""
        check_streams(new, self.empty_streams)
        if needs_gradients(new, ()) or is_forward_mode():
            raise ValueError(
                "QuantizedCache rounds, so that gradients do not flow; use KVCache(), or "
                "torch.no_grad()"
            )
        if self._streams:
            return self._streams
        return tuple(self._first(each, index, len(new)) for index, each in enumerate(new))

    def _first(self, stream: Tensor, index: int, count: int) -> _Described:
        like = stream.detach()[:, :, :0].clone()
        if not stream.is_floating_point():
            return _Described(None, self.group, (), like)
        rotation = self.format.rotation_of(index, count, stream.shape[-1], self.pieces)
        return _Described(self.format.bits_of_stream(index), self.group, rotation, like)

    def __repr__(self) -> str:
        given = f"format={self.format.name!r}" if self.format.rotates else f"bits={self.bits}"
        return f"QuantizedCache({given}, group={self.group})"


def _format_of(bits: int, group: int) -> PageFormat:
    """Keys and values of the same bits, not rotated."""
    return PageFormat(f"int{bits}", bits, bits, group, rotates=False)


def _quantising(format: str | PageFormat, group: int) -> PageFormat:
    """The format of that name. Raises if it does not quantise."""
    found = format_of(format)
    if found.key_bits is None:
        raise ValueError(f"format={found.name!r} stores values as they are; use KVCache()")
    return found._replace(group=group)


def _stored(new: Sequence[Tensor], streams: Sequence[_Described]) -> list[Tensor]:
    """The codes and scales of each stream, or the stream itself."""
    found: list[Tensor] = []
    for each, (bits, group, rotation, _) in zip(new, streams, strict=True):
        found += [each] if bits is None else quantized(each, bits, group, rotation)
    return found


def _empty(streams: Sequence[_Described]) -> list[Tensor]:
    """The codes and scales of no tokens. They are not computed: to rotate the widths that a file
    without data may claim, a matrix would be needed for which no memory has room."""
    found: list[Tensor] = []
    for bits, group, _, like in streams:
        *sizes, width = like.shape
        if bits is None:
            found.append(like)
            continue
        found.append(like.new_empty(*sizes, bytes_of(width, bits), dtype=torch.uint8))
        found.append(like.new_empty(*sizes, 2 * -(-width // group), dtype=torch.bfloat16))
    return found


def _joined(parts: tuple[Part, ...], streams: Sequence[_Described]) -> tuple[Part, ...]:
    """The parts of the store with codes and scales joined to one stream each."""
    described = []
    for start, stop, stored in parts:
        tensors = iter(stored)
        joined: list[QuantizedStream | Tensor] = []
        for bits, group, rotation, like in streams:
            first = next(tensors)
            if bits is None:
                joined.append(first)
                continue
            sizes = bits, group, like.shape[-1]
            joined.append(QuantizedStream(first, next(tensors), *sizes, like.dtype, rotation))
        described.append(Part(start, stop, Streams(joined)))
    return tuple(described)
