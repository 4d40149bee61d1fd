"""Linear algebra of the lossy conversions: energies, principal directions, RoPE in complex numbers.

A head's first `rope.dim` channels are `rope.dim / 2` complex numbers, one per frequency; rotation
by a position multiplies each by `exp(i * angle)`. So multiplying or mixing numbers of *one*
frequency commutes with rotation, and heads may be aligned and mixed that way.

A channel's writing weights may be multiplied by any number if the weights that read it are divided
by it (`gain_of`). Calibration makes the two differ by orders of magnitude; training changes all
weights in steps of one size, which would destroy the small ones.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from jaxtyping import Complex128, Float, Float64, Inexact
from torch import Tensor, nn

from regard.rope import NoRotary, Rope, Rotary

LARGEST_GAIN = 1e6  # ratio of norms: a channel beyond it (one side is zero) is left unchanged
VALUES = 0.65  # weight of values relative to keys: the refitted output corrects values, not scores
LARGEST_BALANCE = 1e3  # most that values are scaled to get that weight, since they may be zero
RotaryRows = Complex128[Tensor, "heads freq E"]
PlainRows = Float64[Tensor, "heads rest E"]
Layer = TypeVar("Layer", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class Lossy(Generic[Layer]):
    """A converted layer, and what it lost over the calibration text: shares of energy, 0.01 is 1 %.

    Attributes:
        layer: the new layer.
        lost: of keys and values, with the weights that the fit uses, or, of merged heads, of scores
            and values; NaN where it is not known.
        lost_rotation: of scores, by key components that are not rotated any more (`decouple`).

    Examples:
        >>> import torch
        >>> from regard import GroupedQueryAttention
        >>> from regard.convert import latentize
        >>> gqa = GroupedQueryAttention(16, 4, 2)
        >>> latentized = latentize(gqa, rank=16, covariance=torch.eye(16))
        >>> abs(latentized.lost) < 1e-6  # 16 is the full rank
        True
    """

    layer: Layer
    lost: float
    lost_rotation: float = 0.0


def gain_of(written: Inexact[Tensor, "R W"], read: Inexact[Tensor, "R V"]) -> Float64[Tensor, " R"]:
    """The factors that give writing and reading weights of each channel the same root mean square.

    Writing rows are to be multiplied by them, reading rows divided; a row is a channel.

    Examples:
        >>> gain_of(torch.tensor([[8.0, 8.0]]).double(), torch.tensor([[2.0]]).double())
        tensor([0.5000], dtype=torch.float64)
    """
    sizes = (rows.abs().square().mean(1).sqrt() for rows in (read, written))
    ratio = torch.nan_to_num(torch.div(*sizes), nan=1.0, posinf=LARGEST_GAIN * 2)
    inside = (ratio > 1 / LARGEST_GAIN) & (ratio < LARGEST_GAIN)
    gain: Tensor = torch.where(inside, ratio, 1.0).sqrt()
    return gain


def energy_of(
    rows: Inexact[Tensor, "*shape R E1"], covariance: Float[Tensor, "E E"]
) -> Inexact[Tensor, "*shape R R"]:
    """`E[(W x)(W x)^H]` of inputs with that covariance.

    A last column of biases counts only if the covariance has one too (`Moments.augmented`).
    """
    width = min(rows.shape[-1], covariance.shape[0])
    weight, covariance = rows[..., :width], covariance[:width, :width]
    middle = covariance.to(weight.dtype).to(weight.device)
    return weight @ middle @ weight.mH


def directions_of(
    weight: Float64[Tensor, "R E"],
    covariance: Float[Tensor, "E1 E1"],
    rank: int,
    metric: Float64[Tensor, "R R"] | None = None,
) -> tuple[Float64[Tensor, "R rank"], Float64[Tensor, "rank E"], float]:
    """The best `up @ down` of that rank for keys stacked on values, and the share of energy lost.

    Errors count by the `metric`; without one, all keys count the same, and values are rescaled to a
    fixed share of the keys' energy.
    """
    energy = energy_of(weight, covariance)
    root, inverse = roots_of(_balance(energy).square().diag() if metric is None else metric)
    energies, directions = torch.linalg.eigh(root @ energy @ root)
    chosen = directions[:, -rank:]  # eigh sorts upwards
    lost = 1.0 - float(energies[-rank:].sum() / energies.sum())
    down, up = chosen.mT @ root @ weight, inverse @ chosen
    gain = gain_of(down, up.mT)
    return up / gain, gain[:, None] * down, max(0.0, lost)


def _balance(energy: Float64[Tensor, "R R"]) -> Float64[Tensor, " R"]:
    """Factors of rows with which an error of a value counts `VALUES` times one of a key."""
    keys, values = energy.diagonal().chunk(2)
    ratio = (keys.sum() / values.sum()).sqrt().nan_to_num(1.0)
    share = VALUES * ratio.clamp(1 / LARGEST_BALANCE, LARGEST_BALANCE)
    return torch.cat([torch.ones_like(keys), share.expand_as(values)])


def roots_of(
    metric: Float64[Tensor, "*heads D D"],
) -> tuple[Float64[Tensor, "*heads D D"], Float64[Tensor, "*heads D D"]]:
    """The symmetric square root of a metric, and its inverse; null directions get a small weight.

    Examples:
        >>> root, inverse = roots_of(torch.tensor([[4.0, 0.0], [0.0, 9.0]], dtype=torch.float64))
        >>> root.diagonal().tolist(), (root @ inverse).diagonal().tolist()
        ([2.0, 3.0], [1.0, 1.0])
    """
    weights, basis = torch.linalg.eigh(metric)
    largest = weights[..., -1:] if weights.shape[-1] else weights
    weights = weights.maximum(1e-9 * largest).clamp_min(1e-300).sqrt()
    return (basis * weights[..., None, :]) @ basis.mT, (basis / weights[..., None, :]) @ basis.mT


def split_rotary(
    rows: Float64[Tensor, "R E"], head_dim: int, rope: Rotary
) -> tuple[RotaryRows, PlainRows]:
    """A projection's rows, `[heads * head_dim, E]`: the rotated channels, as complex numbers, and
    the others.

    Examples:
        >>> rows = torch.arange(4.0, dtype=torch.float64)[:, None]
        >>> rotary, plain = split_rotary(rows, 4, Rotary(2))
        >>> rotary.flatten().tolist(), plain.flatten().tolist()
        ([1j], [2.0, 3.0])
    """
    heads = rows.unflatten(0, (-1, head_dim))
    rotated, plain = heads[:, : rope.dim], heads[:, rope.dim :]
    if rope.pairing == "halves":
        real, imaginary = rotated.chunk(2, dim=1)
    else:
        real, imaginary = rotated[:, 0::2], rotated[:, 1::2]
    return torch.complex(real.contiguous(), imaginary.contiguous()), plain


def join_rotary(rotary: RotaryRows, plain: PlainRows, rope: Rotary) -> Float64[Tensor, "R E"]:
    """The inverse of `split_rotary`."""
    pair = (rotary.real, rotary.imag)
    if rope.pairing == "halves":
        rotated = torch.cat(pair, dim=1)
    else:
        rotated = torch.stack(pair, dim=2).flatten(1, 2)
    return torch.cat([rotated, plain], dim=1).flatten(0, 1)


def frequencies_of(rope: Rope) -> Float64[Tensor, " freq"]:
    """Radians a position, one for each pair of channels.

    Raises:
        ValueError: if there are none, or they change with the length of the text, so that no
            mixture of channels is right for all lengths.
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
