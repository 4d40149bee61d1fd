"""Hadamard rotation: channels are mixed, so that none is much larger than the others.

Few bits then cost less precision, without calibration: QuaRot (Ashkboos et al. 2024,
arXiv:2404.00456). Scores do not change where queries and keys are rotated alike.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.constants import accumulating_dtype, constant
from regard.tracing import without_autocast


def blocks_of(width: int) -> tuple[int, ...]:
    """Powers of two, in decreasing order, that add up to `width`; but no block of one channel.

    Examples:
        >>> blocks_of(128), blocks_of(96), blocks_of(7)
        ((128,), (64, 32), (4, 2))
    """
    powers = (1 << bit for bit in range(width.bit_length() - 1, 0, -1))
    return tuple(power for power in powers if width & power)


def hadamard(x: Float[Tensor, "... W"], blocks: tuple[int, ...]) -> Float[Tensor, "... W"]:
    """`x` with each block of channels multiplied by the orthonormal Hadamard matrix of that width.

    Channels after the last block are unchanged. The matrix (Sylvester 1867) is symmetric, so the
    rotation is its own inverse. Products are in float32, or in float64 for float64.

    Raises:
        ValueError: if a width is not a power of two, or `x` has fewer channels.

    Examples:
        >>> import torch
        >>> hadamard(torch.tensor([1.0, 2.0, 3.0, 4.0, 7.0]), (4,))
        tensor([ 5., -1., -2.,  0.,  7.])
    """
    if not blocks:
        return x
    width, dtype = x.shape[-1], accumulating_dtype(x.dtype)
    if any(block < 1 or block & (block - 1) for block in blocks) or sum(blocks) > width:
        raise ValueError(
            f"blocks are powers of two that add up to at most the {width} channels, got {blocks}; "
            f"blocks_of({width}) is {blocks_of(width)}"
        )
    rest = width - sum(blocks)
    pieces = x.split([*blocks, rest] if rest else list(blocks), -1) if width else ()
    with without_autocast(x.device):
        mixed = [
            (piece.to(dtype) @ _matrix(piece.shape[-1], dtype, x.device)).to(x.dtype)
            for piece in pieces[: len(blocks)]
        ]
    return mixed[0] if len(pieces) == 1 else torch.cat([*mixed, *pieces[len(blocks) :]], -1)


@constant
def _matrix(width: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "W W"]:
    """Sylvester's matrix `[[H, H], [H, -H]]`, where H is the matrix of half the width."""
    found = torch.ones(1, 1, dtype=dtype, device=device)
    while len(found) < width:
        upper = torch.cat([found, found], 1)
        found = torch.cat([upper, torch.cat([found, -found], 1)])
    return found * width**-0.5
