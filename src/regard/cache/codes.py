"""Tensors quantised to 8 or 4 bits, and matrix products with them, a block of tokens at a time.

`value = zero + scale * code`, with a scale and a zero for each token, head and group of channels. A
product with values is a scaled product with codes, plus a sum. So 8-bit codes are read, a quarter
of float32, and only one block of them at a time is converted to floating point.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

_BLOCK = 1024  # tokens converted to floating point at a time; they fit in the L2 cache


class QuantizedStream(NamedTuple):
    """A stream `[B, G, S, W]` of `dtype`, quantised by `quantize`."""

    codes: UInt8[Tensor, "B G S bytes"]
    scale: Tensor
    zero: Tensor
    bits: int
    group: int
    width: int
    dtype: torch.dtype

    def dequantized(self) -> Float[Tensor, "B G S W"]:
        """The values in the original dtype."""
        return dequantize(*self[:6]).to(self.dtype)

    def narrow(self, start: int, size: int) -> "QuantizedStream":
        """The tokens `start..start + size`."""
        return self._replace(
            codes=self.codes.narrow(2, start, size),
            scale=self.scale.narrow(2, start, size),
            zero=self.zero.narrow(2, start, size),
        )

    def product(self, rows: Float[Tensor, "B G M W"]) -> Float[Tensor, "B G M S"]:
        """The product of every row with every token."""
        middle = 2.0 ** (self.bits - 1)  # codes around 0 lose fewer digits to cancellation
        return torch.cat([self._block_product(rows, block, middle) for block in self._blocks()], -1)

    def weighted_sum(self, weights: Float[Tensor, "B G M S"]) -> Float[Tensor, "B G M W"]:
        """The weighted sum of the tokens for every row of weights."""
        total = weights.new_zeros(*weights.shape[:3], self.width)
        start = 0
        for block in self._blocks():
            size = block.codes.shape[2]
            total = total + block._weighted_sum(weights[..., start : start + size])
            start += size
        return total

    def _block_product(self, rows: Tensor, block: "QuantizedStream", middle: float) -> Tensor:
        values, scale, zero = block._floating(rows.dtype)
        total = rows.new_zeros(())
        for at, piece in enumerate(rows.split(self.group, -1)):
            codes = values[..., at * self.group : at * self.group + piece.shape[-1]] - middle
            by_scale, by_one = scale[..., at : at + 1].mT, zero[..., at : at + 1].mT
            whole = piece.sum(-1, keepdim=True)
            total = total + (piece @ codes.mT) * by_scale + whole * (by_one + middle * by_scale)
        return total

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        values, scale, zero = self._floating(weights.dtype)
        pieces = []
        for at, codes in enumerate(values[..., : self.width].split(self.group, -1)):
            by_scale, by_one = scale[..., at : at + 1].mT, zero[..., at : at + 1].mT
            pieces.append((weights * by_scale) @ codes + (weights * by_one).sum(-1, keepdim=True))
        return torch.cat(pieces, -1)

    def _floating(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        codes = unpacked(self.codes) if self.bits == 4 else self.codes
        return codes.to(dtype), self.scale.to(dtype), self.zero.to(dtype)

    def _blocks(self) -> Iterator["QuantizedStream"]:
        tokens = self.codes.shape[2]
        for start in range(0, tokens, _BLOCK):
            yield self.narrow(start, min(_BLOCK, tokens - start))


class QuantizedStreams(Sequence[Tensor]):
    """The streams of a part. Indexing dequantises; backends may read the codes from `stored`."""

    def __init__(self, stored: Sequence[QuantizedStream | Tensor]) -> None:
        self.stored = tuple(stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return tuple(_values(each) for each in self.stored[index])
        return _values(self.stored[index])

    def narrow(self, start: int, size: int) -> "QuantizedStreams":
        """The tokens `start..start + size` of each stream."""
        return QuantizedStreams([_narrow(each, start, size) for each in self.stored])


def _narrow(stream: QuantizedStream | Tensor, start: int, size: int) -> QuantizedStream | Tensor:
    if isinstance(stream, QuantizedStream):
        return stream.narrow(start, size)
    return stream.narrow(2, start, size)


def _values(stream: QuantizedStream | Tensor) -> Tensor:
    return stream.dequantized() if isinstance(stream, QuantizedStream) else stream


def quantize(x: Float[Tensor, "B G L W"], bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[B, G, L, bytes]`, and a scale and a zero for each group of channels.

    Scale and zero are rounded to bfloat16 first, zero down and scale up, so that the codes cover
    the range. Codes are computed from the rounded values, so that this rounding adds little error.
    """
    levels = 2**bits - 1
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x.detach().float(), (0, -width % group))
    if width % group:
        padded[..., width:] = padded[..., width - 1 : width]
    groups = padded.unflatten(-1, (-1, group))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    zero = _bfloat16(low, -torch.inf)
    scale = _bfloat16((high - zero.float()) / levels, torch.inf)
    step = scale.float().masked_fill(scale == 0, 1.0)
    codes = ((groups - zero.float()) / step).round().clamp(0, levels).to(torch.uint8).flatten(-2)
    codes = codes[..., : width + width % 2]
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4) if bits == 4 else codes[..., :width]
    return packed, scale.squeeze(-1), zero.squeeze(-1)


def _bfloat16(x: Float[Tensor, "..."], towards: float) -> Tensor:
    """`x` rounded to bfloat16 towards plus or minus infinity."""
    rounded = x.bfloat16()
    beyond = rounded.float() > x if towards < 0 else rounded.float() < x
    limit = torch.full_like(rounded, towards)
    return torch.where(beyond, torch.nextafter(rounded, limit), rounded)


def unpacked(codes: UInt8[Tensor, "B G L bytes"]) -> UInt8[Tensor, "B G L W"]:
    """4-bit codes, of which each byte holds two."""
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)


def dequantize(
    codes: UInt8[Tensor, "B G L bytes"],
    scale: Tensor,
    zero: Tensor,
    bits: int,
    group: int,
    width: int,
) -> Float[Tensor, "B G L W"]:
    """The values `zero + scale * code`, in float32."""
    if bits == 4:
        codes = unpacked(codes)
    missing = scale.shape[-1] * group - codes.shape[-1]
    groups = torch.nn.functional.pad(codes, (0, missing)).unflatten(-1, (-1, group)).float()
    values = groups * scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)
    return values.flatten(-2)[..., :width]
