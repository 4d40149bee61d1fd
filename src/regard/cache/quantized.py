"""A cache in 8 or 4 bits: for memory alone, the cheapest thing there is.

Every token, head and group of channels has a scale and a zero of its own, so that nothing is ever
requantised, no neighbour matters, and an outlier channel spoils its group only.
"""

from torch import Tensor

from regard.cache.codes import QuantizedStream, QuantizedStreams, quantize
from regard.cache.growing import KVCache
from regard.cache.streams import Part, Stored, check_streams, check_whole, chosen, wants_grad
from regard.span import Span
from regard.tracing import is_forward_mode


class QuantizedCache(Stored):
    """Holds floating streams as codes of `bits`, integer streams exactly. Grows by doubling.

    Codes are asymmetric: `value = zero + scale * code`, both in bfloat16, for each `group` channels
    of a token and head; the error of a value is at most half a scale, and one rounding. What
    `update` returns is what is held, the new tokens too, in the dtype that came; decoding reads the
    codes a block at a time, and other calls dequantise them all. Values must be
    finite, and below 1e38 in size: nothing reads them to check.

    Args:
        bits: 8 or 4 (two codes a byte).
        group: channels that share a scale; the last group of a width may be smaller.

    Raises:
        ValueError: if `bits` or `group` is neither.

    >>> import torch
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
        self._like: tuple[Tensor, ...] = ()  # empty, of the shapes and dtypes that came

    @property
    def length(self) -> int:
        return self._store.length

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens held: codes, scales and zeros."""
        return self._store.nbytes

    @property
    def allocated_bytes(self) -> int:
        return self._store.allocated_bytes

    def span(self, new: int) -> Span:
        return self._store.span(new)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; return everything held, dequantised on indexing.

        Raises:
            ValueError: if the streams do not fit, or gradients are wanted.
        """
        quantized = self._quantized(new)
        if not self._like:
            self._like = tuple(each.detach()[:, :, :0].clone() for each in new)
        return self._parts(self._store.update(*quantized), new)

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        return self._parts(self._store.peek(*self._quantized(new)), new)

    def snapshot(self) -> object:
        return self._like, self._store.snapshot()

    def restore(self, snapshot: object) -> None:
        assert isinstance(snapshot, tuple)
        self._like, store = snapshot
        self._store.restore(store)

    def truncate(self, length: int | Tensor) -> None:
        self._store.truncate(length)

    def reorder(self, rows: Tensor) -> None:
        self._store.reorder(rows)
        self._like = chosen(self._like, rows)

    def _quantized(self, new: tuple[Tensor, ...]) -> list[Tensor]:
        check_streams(new, self._like)
        if wants_grad(new, ()) or is_forward_mode():
            raise ValueError(
                "QuantizedCache rounds, which gradients cannot follow; use KVCache(), or "
                "torch.no_grad()"
            )
        quantized: list[Tensor] = []
        for each in new:
            quantized += (
                quantize(each, self.bits, self.group) if each.is_floating_point() else [each]
            )
        return quantized

    def _parts(self, parts: tuple[Part, ...], like: tuple[Tensor, ...]) -> tuple[Part, ...]:
        """The parts: dequantised on indexing; backends may read the codes."""
        described = []
        for start, stop, stored in parts:
            rest = list(stored)
            streams: list[QuantizedStream | Tensor] = []
            for each in like:
                if each.is_floating_point():
                    codes, scale, zero, *rest = rest
                    width = each.shape[-1]
                    streams.append(
                        QuantizedStream(
                            codes, scale, zero, self.bits, self.group, width, each.dtype
                        )
                    )
                else:
                    first, *rest = rest
                    streams.append(first)
            described.append(Part(start, stop, QuantizedStreams(streams)))
        return tuple(described)

    def __repr__(self) -> str:
        return f"QuantizedCache(bits={self.bits}, group={self.group})"
