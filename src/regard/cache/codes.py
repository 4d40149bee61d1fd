"""Tensors quantised to 8, 6 or 4 bits, and matrix products with them, a block of tokens at a time.

`value = zero + scale * code`. A head has a scale and a zero for each token and group of channels,
or for each channel of a run of tokens, such as a page. A product with values is a scaled product
with codes, plus a sum: so backends of torch's operators convert one block of codes at a time. The
compiled kernel reads the codes as they are laid out here.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from regard.cache.rotation import hadamard

NIBBLES = 16  # bytes of 4-bit codes: their low halves are so many channels, the high ones the next
STEP = 2 * NIBBLES  # channels packed together; their 4-bit codes are 16 bytes, their 6-bit ones 24
_LOW = 0xFFFF  # the half of a float32 that a bfloat16 does not have
_LARGEST = 1e38  # in size, of numbers that have codes: the range of two of them is a float32
_GREATEST_HALF = torch.finfo(torch.float16).max
_BLOCK = 1024  # tokens converted to floating point at a time; they fit in the L2 cache
_LONG_BLOCK = 1 << 16  # the same on a GPU, which waits for the start of operators on short ones


class QuantizedStream(NamedTuple):
    """A `Stream` `[B, G, S, W]` of `dtype`, rotated where it says so, and quantised by `quantize`.

    Products are with the rotated values: multiply by rows that are rotated alike, and rotate sums
    back.
    """

    codes: UInt8[Tensor, "B G S bytes"]
    scales: Tensor  # [B, G, runs, 2 x groups]: scale and zero of each group, side by side
    bits: int
    group: int  # channels that share a scale
    width: int
    dtype: torch.dtype
    rotation: tuple[int, ...] = ()  # widths of the blocks of columns that are rotated
    run: int = 1  # tokens that share scales
    skipped: int = 0  # tokens of the first run that are left out

    @property
    def outline(self) -> Tensor:
        """A tensor of the shape and dtype of the values, which are all zero."""
        return self.scales.new_zeros((), dtype=self.dtype).expand(*self.codes.shape[:3], self.width)

    def to_tensor(self) -> Float[Tensor, "B G S W"]:
        """The values in the original dtype."""
        values = hadamard(self._dequantize(), self.rotation)
        if self.dtype is torch.float16:  # rounding must not make the greatest numbers infinite
            values = values.clamp(-_GREATEST_HALF, _GREATEST_HALF)
        return values.to(self.dtype)

    @property
    def kinds(self) -> tuple[type, ...]:
        return (QuantizedStream,)

    @property
    def is_shared(self) -> bool:
        return self.codes.shape[0] > 1 and self.codes.stride(0) == 0

    @property
    def is_scattered(self) -> bool:
        return False

    def rows(self, start: int, size: int) -> "QuantizedStream":
        codes, scales = self.codes.narrow(0, start, size), self.scales.narrow(0, start, size)
        return self._replace(codes=codes, scales=scales)

    def in_one(self) -> "QuantizedStream":
        return self

    def cuts(self, most: int) -> Iterator[tuple[int, int]]:
        yield 0, self.codes.shape[2]

    def narrow(self, start: int, size: int) -> "QuantizedStream":
        first = (self.skipped + start) // self.run  # no divmod: Dynamo has none of symbolic sizes
        skipped = (self.skipped + start) % self.run
        return self._replace(
            codes=self.codes.narrow(2, start, size),
            scales=self.scales.narrow(2, first, -(-(skipped + size) // self.run)),
            skipped=skipped,
        )

    def _dequantize(self) -> Tensor:
        """Dequantise to float32. The values are still rotated."""
        if self.run == 1:
            return dequantize(self.codes, self.scales, self.bits, self.group, self.width)
        tokens, runs = self.codes.shape[2], self.scales.shape[2]
        outside = self.skipped, runs * self.run - self.skipped - tokens
        codes = torch.nn.functional.pad(self.codes, (0, 0, *outside))
        codes = unpacked(codes, self.width, self.bits).unflatten(2, (runs, self.run))
        scale, zero = self._scale_and_zero(torch.float32)
        values = codes.float() * scale.unsqueeze(3) + zero.unsqueeze(3)
        return values.flatten(2, 3).narrow(2, self.skipped, tokens)

    def product(self, rows: Float[Tensor, "B G M W"]) -> Float[Tensor, "B G M S"]:
        """The product of every row with every token."""
        return torch.cat([block._product(rows) for block in self._blocks()], -1)

    def weighted_sum(self, weights: Float[Tensor, "B G M S"]) -> Float[Tensor, "B G M W"]:
        """The weighted sum of the tokens for every row of weights."""
        total = weights.new_zeros(*weights.shape[:3], self.width)
        pieces = weights.split(self._block, -1)
        for block, piece in zip(self._blocks(), pieces, strict=False):
            total = total + block._weighted_sum(piece)
        return total

    def _product(self, rows: Tensor) -> Tensor:
        if self.run > 1:
            return rows @ self._dequantize().to(rows.dtype).mT
        middle = 2.0 ** (self.bits - 1)  # codes around 0 lose fewer digits to cancellation
        values = unpacked(self.codes, self.width, self.bits).to(rows.dtype)
        scale, zero = self._scale_and_zero(rows.dtype)
        total = rows.new_zeros(())
        for at, piece in enumerate(rows.split(self.group, -1)):
            codes = values[..., at * self.group : at * self.group + piece.shape[-1]] - middle
            by_scale, by_one = scale[..., at : at + 1].mT, zero[..., at : at + 1].mT
            whole = piece.sum(-1, keepdim=True)
            total = total + (piece @ codes.mT) * by_scale + whole * (by_one + middle * by_scale)
        return total

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        if self.run > 1:
            return weights @ self._dequantize().to(weights.dtype)
        values = unpacked(self.codes, self.width, self.bits).to(weights.dtype)
        scale, zero = self._scale_and_zero(weights.dtype)
        pieces = []
        for at, codes in enumerate(values[..., : self.width].split(self.group, -1)):
            by_scale, by_one = scale[..., at : at + 1].mT, zero[..., at : at + 1].mT
            pieces.append((weights * by_scale) @ codes + (weights * by_one).sum(-1, keepdim=True))
        return torch.cat(pieces, -1)

    def _scale_and_zero(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The scales and zeros of each run of tokens, head and group of channels."""
        return self.scales[..., 0::2].to(dtype), self.scales[..., 1::2].to(dtype)

    @property
    def _block(self) -> int:
        return _BLOCK if self.codes.device.type == "cpu" else _LONG_BLOCK

    def _blocks(self) -> Iterator["QuantizedStream"]:
        tokens = self.codes.shape[2]
        for start in range(0, tokens, self._block):
            yield self.narrow(start, min(self._block, tokens - start))


def quantize(x: Float[Tensor, "*B L W"], bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes `[*B, L, bytes]`, and a scale and a zero for each group of channels, side by side."""
    codes, scales = _quantize(_groups(x.detach().float(), group), -1, bits)
    return _pack(codes.flatten(-2)[..., : x.shape[-1]], bits), scales


def quantize_channels(x: Float[Tensor, "*B L W"], bits: int, run: int) -> tuple[Tensor, Tensor]:
    """Codes `[*B, L, bytes]`, and `[*B, L / run, 2 W]`: a scale and a zero for each channel of a
    run of tokens, side by side, rounded as those of `quantize`.

    Numbers are codable: one that is not would spoil its channel in all tokens of the run.
    """
    codes, scales = _quantize(x.detach().float().unflatten(-2, (-1, run)), -2, bits)
    return _pack(codes.flatten(-3, -2), bits), scales


def are_codable(x: Tensor) -> Bool[Tensor, "..."]:
    """Whether each number is finite, and small enough for the range of any two to be finite."""
    return x.abs() < _LARGEST


def _quantize(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """Codes, one a byte, and the scales and zeros of the numbers along a dimension, side by side.

    Scale and zero are rounded to bfloat16 first, zero down and scale up, so that the codes cover
    the range. Codes are computed from the rounded values, so that this rounding adds little error.
    """
    levels = 2**bits - 1
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)  # aminmax is far slower
    zero = _round_down(low)
    scale = _round_up((high - zero) / levels)
    step = scale.masked_fill(scale == 0, 1.0)
    codes = (x - zero).div_(step).round_().clamp_(0, levels).to(torch.uint8)
    return codes, torch.stack([scale, zero], -1).bfloat16().flatten(-3)


def _groups(x: Float[Tensor, "... W"], group: int) -> Float[Tensor, "... N group"]:
    """Channels in groups; a last one that is smaller is filled with its last channel."""
    missing = -x.shape[-1] % group
    if missing:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1)
    return x.unflatten(-1, (-1, group))


def _round_up(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The next bfloat16 that is not less, of x >= 0: a float32 is one if its low half is zero."""
    return ((x.view(torch.int32) + _LOW) & ~_LOW).view(torch.float32)


def _round_down(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The next bfloat16 that is not greater: negative numbers grow in size, others shrink."""
    word = x.view(torch.int32)
    return ((word + (word >> 31 & _LOW)) & ~_LOW).view(torch.float32)


def bytes_of(width: int, bits: int) -> int:
    """Bytes of the codes of `width` channels."""
    if bits == 8:
        return width
    whole, rest = divmod(width, STEP)
    return whole * STEP * bits // 8 + (rest + 1) // 2 + ((rest + 3) // 4 if bits == 6 else 0)


def _pack(codes: UInt8[Tensor, "... W"], bits: int) -> UInt8[Tensor, "... bytes"]:
    """Codes of fewer than 8 bits, packed 32 channels at a time, and then the remaining ones.

    Of n channels, ceil(n / 2) bytes have the low 4 bits: byte i those of channel i in its low half,
    and of channel i + ceil(n / 2) in its high half. For 6 bits, ceil(n / 4) more bytes have the
    high 2 bits: byte i those of channels i, i + ceil(n / 4), ..., from its lowest bits up. So the
    same bits of neighbouring bytes are neighbouring channels.
    """
    if bits == 8:
        return codes
    whole = codes.shape[-1] // STEP * STEP
    steps = _pack_step(codes[..., :whole].unflatten(-1, (-1, STEP)), bits).flatten(-2)
    rest = codes[..., whole:]
    return torch.cat([steps, _pack_step(rest, bits)], -1) if rest.shape[-1] else steps


def _pack_step(codes: UInt8[Tensor, "... n"], bits: int) -> UInt8[Tensor, "... bytes"]:
    low = _join_fields(codes & 15, 2)
    return low if bits == 4 else torch.cat([low, _join_fields(codes >> 4, 4)], -1)


def _join_fields(fields: UInt8[Tensor, "... n"], count: int) -> UInt8[Tensor, "... bytes"]:
    """Pack `count` codes of `8 / count` bits into each byte."""
    missing = -fields.shape[-1] % count
    first, *others = torch.nn.functional.pad(fields, (0, missing)).chunk(count, -1)
    for at, each in enumerate(others, 1):
        first = first | each << (8 // count * at)
    return first


def unpacked(codes: UInt8[Tensor, "... bytes"], width: int, bits: int) -> UInt8[Tensor, "... W"]:
    """The codes of `width` channels, one a byte."""
    if bits == 8:
        return codes
    rest = width % STEP
    whole = bytes_of(width - rest, bits)
    steps = codes[..., :whole].unflatten(-1, (-1, bytes_of(STEP, bits)))
    values = _unpack_step(steps, STEP, bits).flatten(-2)
    return torch.cat([values, _unpack_step(codes[..., whole:], rest, bits)], -1) if rest else values


def _unpack_step(codes: UInt8[Tensor, "... bytes"], n: int, bits: int) -> UInt8[Tensor, "... n"]:
    low, high = codes.tensor_split([(n + 1) // 2], -1)
    codes = _split_fields(low, 2)[..., :n]
    return codes if bits == 4 else codes | _split_fields(high, 4)[..., :n] << 4


def _split_fields(codes: UInt8[Tensor, "... bytes"], count: int) -> UInt8[Tensor, "... n"]:
    size = 8 // count
    return torch.cat([codes >> size * at & (1 << size) - 1 for at in range(count)], -1)


def dequantize(
    codes: UInt8[Tensor, "B G L bytes"], scales: Tensor, bits: int, group: int, width: int
) -> Float[Tensor, "B G L W"]:
    """The values `zero + scale * code`, in float32."""
    codes = unpacked(codes, width, bits)
    pairs = scales.float().unflatten(-1, (-1, 2))
    missing = pairs.shape[-2] * group - codes.shape[-1]
    groups = torch.nn.functional.pad(codes, (0, missing)).unflatten(-1, (-1, group)).float()
    return (groups * pairs[..., :1] + pairs[..., 1:]).flatten(-2)[..., :width]
