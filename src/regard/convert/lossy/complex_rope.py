"""Rotary channels as complex numbers: what turns together is one number, and turning multiplies it.

A head's first `rope.dim` channels are `rope.dim / 2` complex numbers, one a frequency; rotation by
a position multiplies each by `exp(i * angle)`. So whatever multiplies or mixes numbers of *one*
frequency commutes with rotation: that is the freedom in which heads are aligned and mixed.
"""

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from regard.rope import NoRotary, Rope, Rotary

Turning = Complex128[Tensor, "heads freq E"]
Resting = Float64[Tensor, "heads rest E"]


def split_turning(
    rows: Float64[Tensor, "R E"], head_dim: int, rope: Rotary
) -> tuple[Turning, Resting]:
    """Rows of a projection, `[heads * head_dim, E]`: the channels that turn, and those that do not.

    >>> rows = torch.arange(4.0, dtype=torch.float64)[:, None]
    >>> turning, resting = split_turning(rows, 4, Rotary(2))
    >>> turning.flatten().tolist(), resting.flatten().tolist()
    ([1j], [2.0, 3.0])
    """
    heads = rows.unflatten(0, (-1, head_dim))
    turned, resting = heads[:, : rope.dim], heads[:, rope.dim :]
    if rope.pairing == "halves":
        real, imaginary = turned.chunk(2, dim=1)
    else:
        real, imaginary = turned[:, 0::2], turned[:, 1::2]
    return torch.complex(real.contiguous(), imaginary.contiguous()), resting


def join_turning(turning: Turning, resting: Resting, rope: Rotary) -> Float64[Tensor, "R E"]:
    """The inverse of `split_turning`."""
    pair = (turning.real, turning.imag)
    if rope.pairing == "halves":
        turned = torch.cat(pair, dim=1)
    else:
        turned = torch.stack(pair, dim=2).flatten(1, 2)
    return torch.cat([turned, resting], dim=1).flatten(0, 1)


def frequencies_of(rope: Rope) -> Float64[Tensor, " freq"]:
    """Radians a position, one for each pair of channels.

    Raises:
        ValueError: if there are none, or they change with the length of the text: then no mixture
            stays right.
    """
    if isinstance(rope, NoRotary):
        raise ValueError(
            "a layer without rotary embedding has no frequencies; a joint latent can be made"
        )
    if not isinstance(rope, Rotary):
        raise ValueError(f"conversion mixes the frequencies of a Rotary, got rope={rope!r}")
    if rope.scaling is not None and rope.scaling.uses_length:
        raise ValueError(
            f"the frequencies of {rope} change with the length of the text, and what is chosen for "
            "one length is wrong for another; a joint latent that rotates on reading can be made"
        )
    return rope.angles(torch.ones(1, dtype=torch.float64), torch.float64)[0]
