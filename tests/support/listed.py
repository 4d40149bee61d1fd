"""Tokens as numbers in plain lists, what a cache should return for them, and how far codes may err.

A token is a number; what a layer's streams hold for it is read from one table, drawn once. So a
cache that mixes up rows, slots, layers or pages returns values of another number.
"""

from functools import cache as memoised
from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = 4093  # different tokens; a prime, so that layers' tables do not repeat each other
BETWEEN_LAYERS = 977  # a layer reads the table so many numbers later than the layer before it
FINEST = 2.0**-7  # the largest relative rounding of a scale or a zero, to bfloat16


class Coding(NamedTuple):
    """How a stream is stored as codes."""

    bits: int
    group: int
    rotation: tuple[int, ...] = ()
    by_channel: bool = False  # a scale for each channel of a page, of whichever tokens that has


class Streams(NamedTuple):
    """The streams of one layer: heads, width and dtype of each."""

    shapes: tuple[tuple[int, int, torch.dtype], ...]
    pieces: tuple[int, ...] | None = None  # of a joined stream, as MLA announces them

    def token_bytes(self, codings: list[Coding | None]) -> int:
        """Bytes of one token of one row, in full precision or as codes with scales and zeros."""
        total = 0
        for (heads, width, dtype), coding in zip(self.shapes, codings, strict=True):
            if coding is None:
                total += heads * width * dtype.itemsize
            else:
                total += heads * (-(-width * coding.bits // 8) + 4 * -(-width // coding.group))
        return total

    def of(self, tokens: list[list[int]], layer: int = 0) -> tuple[Tensor, ...]:
        """The streams `[B, G, L, W]` of rows of equal length."""
        at = torch.tensor(tokens, dtype=torch.int64).reshape(len(tokens), -1)
        at = (at + layer * BETWEEN_LAYERS) % NUMBERS
        return tuple(each[at].transpose(1, 2) for each in _values(self.shapes))


KEYS_VALUES = Streams(((2, 8, torch.float32), (1, 6, torch.float32), (1, 1, torch.int64)))
LATENT = Streams(((1, 12, torch.bfloat16),), pieces=(8, 4))
STREAMS = {"keys, values, positions": KEYS_VALUES, "latent": LATENT}


@memoised
def _values(shapes: tuple[tuple[int, int, torch.dtype], ...]) -> tuple[Tensor, ...]:
    """The table: for each stream `[NUMBERS, G, W]`."""
    generator = torch.Generator().manual_seed(1)
    drawn = []
    for heads, width, dtype in shapes:
        if dtype.is_floating_point:
            each = torch.randn(NUMBERS, heads, width, generator=generator).to(dtype)
        else:
            each = torch.randint(2**40, (NUMBERS, heads, width), generator=generator)
        drawn.append(each)
    return tuple(drawn)


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix, orthonormal."""
    if size == 1:
        return torch.ones(1, 1)
    half = hadamard(size // 2)
    return torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)]) / 2**0.5


@memoised
def errors(streams: Streams, index: int, coding: Coding) -> Tensor:
    """How far one rounding to codes may move a number of each token, `[NUMBERS]`.

    Half a scale, of any page where its tokens share that; in rotated columns, where every number is
    a sum of as many errors as a block is wide over the root of that, the root of the width times as
    much.
    """
    table = _values(streams.shapes)[index].float()
    rotated, at, widest = table.clone(), 0, 1
    for size in coding.rotation:
        rotated[..., at : at + size] = table[..., at : at + size] @ hadamard(size)
        at, widest = at + size, max(widest, size)
    steps = []
    columns = rotated.flatten(1).T[None]  # as if all tokens lay in one page
    for group in [columns] if coding.by_channel else rotated.split(coding.group, -1):
        low, high = group.amin(-1), group.amax(-1)
        span = (high - low + FINEST * low.abs()) * (1 + FINEST)
        steps.append(span / (2**coding.bits - 1))
    half = torch.stack(steps, -1).amax((-1, -2)) / 2 * widest**0.5
    unit = torch.finfo(streams.shapes[index][2]).eps
    return half * 1.001 + unit * table.abs().amax((-1, -2)) + 1e-6


def numbers_at(rows: list[list[int]], start: int, stop: int, layer: int) -> tuple[Tensor, Tensor]:
    """Where the table has the tokens `start..stop` of each row, `[B, stop - start]`, and whether
    the row has such a token."""
    size = stop - start
    cut = [row[start:stop] for row in rows]
    whole = [[*row, *[-1] * (size - len(row))] for row in cut]
    at = torch.tensor(whole, dtype=torch.int64).reshape(len(rows), size)
    return (at + layer * BETWEEN_LAYERS) % NUMBERS, at >= 0


def differences(got: Tensor, streams: Streams, index: int, at: Tensor) -> Tensor:
    """How far each token that was read, of `[B, G, S, W]`, is from the table, `[B, S]`.

    Args:
        got: what was read.
        streams: the streams of the layer.
        index: which of them.
        at: where the table has each token, `[B, S]`.
    """
    assert len(got) == len(at), (len(got), len(at))
    table = _values(streams.shapes)[index]
    assert got.dtype == table.dtype
    return (got.transpose(1, 2) - table[at]).abs().flatten(2).amax(2)
