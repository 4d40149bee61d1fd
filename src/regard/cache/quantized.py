"""A cache whose keys and values are quantised to 8 or 4 bits.

Each token, head and group of channels has its own scale and zero point. So tokens are quantised
once, independently of each other, and an outlier channel affects only its group.
"""

from torch import Tensor

from regard.cache.codes import QuantizedStream, QuantizedStreams
from regard.cache.growing import KVCache
from regard.cache.quantizing import quantized
from regard.cache.streams import (
    Part,
    Stored,
    check_streams,
    check_whole,
    needs_gradients,
    select_rows,
)
from regard.span import Span
from regard.tracing import is_forward_mode


class QuantizedCache(Stored):
    """A cache of keys and values quantised to 8 or 4 bits; integer streams are stored unchanged.

    Quantisation is asymmetric: `value = zero + scale * code`, with a bfloat16 scale and zero for
    each `group` channels of a token and head. The error of a value is at most half a scale, and one
    rounding. `update` returns the quantised values of all tokens, the new ones too, in their
    original dtype. Decoding reads the codes; other calls dequantise them all.
    Values must be finite, and below 1e38 in size; this is not checked. Buffers grow by doubling.

    Args:
        bits: 8 or 4 (two codes a byte).
        group: channels with one scale, an even number; the last group may be smaller.

    Raises:
        ValueError: if `bits` or `group` is none of these.

    Examples:
        >>> import torch
        >>> from regard import QuantizedCache
        >>> cache = QuantizedCache()
        >>> k = torch.randn(1, 2, 5, 64)
        >>> (cache.update(k, k)[0].streams[0] - k).abs().max().item() < 0.05
        True
        >>> cache.nbytes == 5 * 2 * 2 * (64 + 2 * 2)
        True
    """

    def __init__(self, bits: int = 8, group: int = 64) -> None:
        check_whole("bits", bits)
        check_whole("group", group)
        if bits not in (4, 8):
            raise ValueError(f"bits is 8 or 4, got {bits}")
        if group < 1 or group % 2:
            raise ValueError(f"group is an even number of channels, got {group}")
        self.bits, self.group = bits, group
        self._store = KVCache()
        self._like: tuple[Tensor, ...] = ()  # empty tensors with the original shapes and dtypes

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
        added = self._quantized(new)
        if not self._like:
            self._like = tuple(each.detach()[:, :, :0].clone() for each in new)
        return self._parts(self._store.update(*added), new)

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        """The result of `update`, in new tensors, without changing the cache."""
        return self._parts(self._store.peek(*self._quantized(new)), new)

    def snapshot(self) -> object:
        """The present state."""
        return self._like, self._store.snapshot()

    def restore(self, snapshot: object) -> None:
        """Undo the updates since `snapshot` was called; nothing else may have happened."""
        assert isinstance(snapshot, tuple)
        self._like, store = snapshot
        self._store.restore(store)

    def truncate(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens, or `[B]` lengths; the buffers stay."""
        self._store.truncate(length)

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows, `[N]` integers, in this order."""
        self._store.reorder(rows)
        self._like = select_rows(self._like, rows)

    def _quantized(self, new: tuple[Tensor, ...]) -> list[Tensor]:
        check_streams(new, self._like)
        if needs_gradients(new, ()) or is_forward_mode():
            raise ValueError(
                "QuantizedCache rounds, so that gradients do not flow; use KVCache(), or "
                "torch.no_grad()"
            )
        stored: list[Tensor] = []
        for each in new:
            floating = each.is_floating_point()
            stored += quantized(each, self.bits, self.group) if floating else [each]
        return stored

    def _parts(self, parts: tuple[Part, ...], like: tuple[Tensor, ...]) -> tuple[Part, ...]:
        """The parts of the store with codes and scales joined to one stream each."""
        described = []
        for start, stop, stored in parts:
            tensors = iter(stored)
            streams: list[QuantizedStream | Tensor] = []
            for each in like:
                if not each.is_floating_point():
                    streams.append(next(tensors))
                    continue
                codes, scales = next(tensors), next(tensors)
                sizes = self.bits, self.group, each.shape[-1]
                streams.append(QuantizedStream(codes, scales, *sizes, each.dtype))
            described.append(Part(start, stop, QuantizedStreams(streams)))
        return tuple(described)

    def __repr__(self) -> str:
        return f"QuantizedCache(bits={self.bits}, group={self.group})"
