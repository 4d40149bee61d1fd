"""Where the energy is: moments of what a projection puts out, and the directions that hold most."""

import torch
from jaxtyping import Float, Float64, Inexact
from torch import Tensor

from regard.convert.lossy.balance import gain_of

VALUES = 0.65  # of what keys count: the fit of the output can mend values, nothing mends scores
MOST = 1e3  # times, that values are made to count for more or less: one of them may be nothing


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
    weight: Float64[Tensor, "R E"], covariance: Float[Tensor, "E E"], rank: int
) -> tuple[Float64[Tensor, "R rank"], Float64[Tensor, "rank E"], float]:
    """The best `up @ down` of that rank for keys stacked on values, and the share of energy lost.

    Values are rescaled to have a fixed share of the keys' energy, whatever their own.
    """
    energy = energy_of(weight, covariance)
    balance = _balance(energy)
    energies, directions = torch.linalg.eigh(balance[:, None] * energy * balance)
    chosen = directions[:, -rank:]  # eigh sorts upwards
    lost = 1.0 - float(energies[-rank:].sum() / energies.sum())
    down = chosen.mT @ (balance[:, None] * weight)
    up = chosen / balance[:, None]
    gain = gain_of(down, up.mT)
    return up / gain, gain[:, None] * down, max(0.0, lost)


def _balance(energy: Float64[Tensor, "R R"]) -> Float64[Tensor, " R"]:
    """What to multiply rows by, so that values count in all as they should beside keys."""
    keys, values = energy.diagonal().chunk(2)
    share = VALUES * (keys.sum() / values.sum()).sqrt().nan_to_num(1.0).clamp(1 / MOST, MOST)
    return torch.cat([torch.ones_like(keys), share.expand_as(values)])


def roots_of(
    metric: Float64[Tensor, "*heads D D"],
) -> tuple[Float64[Tensor, "*heads D D"], Float64[Tensor, "*heads D D"]]:
    """The symmetric square root of a metric, and its inverse; directions of no weight get a little.

    >>> root, inverse = roots_of(torch.tensor([[4.0, 0.0], [0.0, 9.0]], dtype=torch.float64))
    >>> root.diagonal().tolist(), (root @ inverse).diagonal().tolist()
    ([2.0, 3.0], [1.0, 1.0])
    """
    weights, basis = torch.linalg.eigh(metric)
    largest = weights[..., -1:] if weights.shape[-1] else weights
    weights = weights.maximum(1e-9 * largest).clamp_min(1e-300).sqrt()
    return (basis * weights[..., None, :]) @ basis.mT, (basis / weights[..., None, :]) @ basis.mT
