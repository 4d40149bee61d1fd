"""A cache whose keys and values are quantised to 8, 6 or 4 bits.

Each token, head and group of channels has its own scale and zero point. So tokens are quantised
once, independently of each other, and an outlier channel affects only its group.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from regard.cache.codes import QuantizedStream
from regard.cache.growing import Contiguous, KVCache
from regard.cache.paging.formats import GROUP, PageFormat, format_of
from regard.cache.parts import AnyStream, Part, Streams
from regard.cache.quantizing import quantized
from regard.cache.saving import Record, outlines_from, outlines_text, pieces_from
from regard.cache.sliding import SlidingCache
from regard.cache.streams import check_streams, check_whole, needs_gradients, select_rows
from regard.tracing import is_forward_mode


class _Storage(NamedTuple):
    """The storage of one stream: its bits, None if it is not quantised, and its groups."""

    bits: int | None
    rotation: tuple[int, ...]
    like: Tensor  # without tokens, of the stream's shape and dtype


class Quantizing(Contiguous):
    """Base class of caches that quantise their streams. A subclass names it before the class of the
    cache that decides which tokens are kept."""

    def __init__(
        self, bits: int, group: int, format: str | PageFormat | None, **store: Any
    ) -> None:
        check_whole("bits", bits)
        check_whole("group", group)
        if bits not in (4, 8):
            raise ValueError(f"bits is 8 or 4, got {bits}; format='K6V6' has 6")
        if group < 1 or group % 2:
            raise ValueError(f"group is an even number of channels, got {group}")
        super().__init__(**store)
        named = PageFormat(f"int{bits}", bits, bits, group, rotates=False)
        self.format = named if format is None else format_of(format)._replace(group=group)
        if self.format.key_bits is None:
            raise ValueError(f"format={format!r} stores values as they are; use KVCache()")
        self.group = group
        self._streams: tuple[_Storage, ...] = ()  # of those held

    @property
    def bits(self) -> int:
        """The fewest bits of a channel: `format` has those of keys and of values."""
        return min(bits for bits in (self.format.key_bits, self.format.value_bits) if bits)

    @property
    def empty_streams(self) -> tuple[Tensor, ...]:
        return tuple(each.like for each in self._streams)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"format": self.format.name, "group": self.group, **super().arguments}

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; return all tokens, dequantised on indexing.

        Raises:
            ValueError: if the streams do not fit, or require gradients.
        """
        streams = self._storage_of(new)
        parts = super().update(*self._encode(new, streams))
        self._streams = streams
        return self._join(parts, streams)

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        streams = self._storage_of(new)
        return self._join(super().peek(*self._encode(new, streams)), streams)

    def reorder(self, rows: Tensor) -> None:
        super().reorder(rows)
        likes = select_rows(self.empty_streams, rows)
        pairs = zip(self._streams, likes, strict=True)
        self._streams = tuple(each._replace(like=like) for each, like in pairs)

    def record(self) -> Record:
        state, streams = super().record()
        own = {"outlines": outlines_text(self.empty_streams), "pieces": self.pieces}
        return Record(state | own, streams)

    def fill(self, record: Record) -> None:
        like = outlines_from(record.state.get("outlines"), record.streams)
        self.pieces = pieces_from(record.state.get("pieces"), like) or self.pieces
        self._streams = self._storage_of(like) if like else ()
        expected = outlines_text(self._encode(like, self._streams))
        if expected != outlines_text(record.streams):
            raise ValueError(
                f"the codes of streams {outlines_text(like)} are {expected}, got "
                f"{outlines_text(record.streams)}"
            )
        super().fill(record)

    def _storage_of(self, new: tuple[Tensor, ...]) -> tuple[_Storage, ...]:
        """How the streams are stored. Raises if they do not fit, or require gradients."""
        check_streams(new, self.empty_streams)
        if needs_gradients(new, ()) or is_forward_mode():
            raise ValueError(
                "QuantizedCache rounds, so that gradients do not flow; use KVCache(), or "
                "torch.no_grad()"
            )
        if self._streams:
            return self._streams
        return tuple(self._first_storage(each, index, len(new)) for index, each in enumerate(new))

    def _first_storage(self, stream: Tensor, index: int, count: int) -> _Storage:
        like = stream.detach()[:, :, :0].clone()
        if not stream.is_floating_point():
            return _Storage(None, (), like)
        rotation = self.format.rotation_of(index, count, stream.shape[-1], self.pieces)
        return _Storage(self.format.bits_of_stream(index), rotation, like)

    def _encode(self, new: Sequence[Tensor], streams: Sequence[_Storage]) -> list[Tensor]:
        """The codes and scales of each stream, or the stream itself."""
        tensors: list[Tensor] = []
        for stream, (bits, rotation, _) in zip(new, streams, strict=True):
            if bits is None:
                tensors.append(stream)
            else:
                tensors += quantized(stream, bits, self.group, rotation)
        return tensors

    def _join(self, parts: tuple[Part, ...], streams: Sequence[_Storage]) -> tuple[Part, ...]:
        """The part with codes and scales joined to one stream each."""
        ((start, stop, stored),) = parts
        tensors = iter(stored)
        joined: list[QuantizedStream | Tensor] = []
        for bits, rotation, like in streams:
            first = next(tensors)
            if bits is None:
                joined.append(first)
            else:
                sizes = bits, self.group, like.shape[-1]
                joined.append(QuantizedStream(first, next(tensors), *sizes, like.dtype, rotation))
        return (Part(start, stop, Streams(joined)),)

    def _code(self) -> str:
        """The arguments of this class as code."""
        kind = f"format={self.format.name!r}" if self.format.rotates else f"bits={self.bits}"
        return f"{kind}, group={self.group}"


class QuantizedCache(Quantizing, KVCache):
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
        super().__init__(bits, group, format)

    def __repr__(self) -> str:
        return f"QuantizedCache({self._code()})"


class QuantizedWindow(Quantizing, SlidingCache):
    """A `QuantizedCache` of the last `size` tokens: `SlidingCache` says how it holds them.

    The arguments are those of the two.

    Examples:
        >>> import torch
        >>> from regard.cache.quantized import QuantizedWindow
        >>> cache, k = QuantizedWindow(4), torch.zeros(1, 2, 10, 8)
        >>> _ = cache.update(k, k)
        >>> cache.span(1).kv_start, cache.length
        (7, 10)
    """

    def __init__(
        self,
        size: int,
        rollback: int = 0,
        bits: int = 8,
        group: int = GROUP,
        *,
        format: str | PageFormat | None = None,
    ) -> None:
        super().__init__(bits, group, format, size=size, rollback=rollback)

    def __repr__(self) -> str:
        rollback = f"rollback={self.rollback}, " if self.rollback else ""
        return f"QuantizedWindow({self.size}, {rollback}{self._code()})"


def streams_with_room(cache: Quantizing) -> tuple[AnyStream, ...]:
    """The streams in a cache's buffers: codes with their scales, with room for more tokens."""
    held = cache.buffers
    (part,) = cache._join((Part(0, held[0].shape[2], held),), cache._streams)
    return tuple(part.stored)
