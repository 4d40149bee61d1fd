"""The published rules that choose which key components keep RoPE: TransMLA's and MHA2MLA's.

They are baselines for `converting.py`, without the papers' training. Both convert GQA to DeepSeek's
MLA, as `regard.convert.decouple` does, but select other components; those that lose their rotation
are treated as if its angle were zero.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.convert.lossy.decouple import (
    Components,
    Decoupled,
    average_rotation,
    from_components,
    largest,
    query_energy,
    rotary_keys,
)
from regard.convert.lossy.directions import energy_of


def transmla(layer: Any, covariance: Tensor) -> tuple[Components, Tensor]:
    """RoRoPE of TransMLA (arXiv:2502.07864): real principal components of the heads at every
    frequency; the first component of each frequency is rotated, then the second."""
    keys, frequencies = rotary_keys(layer)
    energies, basis = torch.linalg.eigh(energy_of(keys, covariance).real)
    energies, basis = energies.flip(-1).clamp_min(0.0), basis.flip(-1).to(keys.dtype)
    order = torch.arange(keys.shape[1]).double().expand_as(energies)
    score = -order - 1e-3 * torch.arange(len(order))[:, None] / len(order)
    return _components(basis.mH @ keys, basis, energies, frequencies), score


def mha2mla(layer: Any, covariance: Tensor) -> tuple[Components, Tensor]:
    """MHA2MLA's 2-norm (arXiv:2502.14837): heads are not mixed, and as many frequencies of each are
    rotated; those with the largest product of the norms of queries and keys."""
    keys, frequencies = rotary_keys(layer)
    energies = energy_of(keys[..., None, :], covariance).real[..., 0, 0]
    product = energies * query_energy(layer, covariance).mT
    ranks = product.argsort(0, descending=True).argsort(0).double()
    identity = torch.eye(keys.shape[1], dtype=keys.dtype).expand(len(keys), -1, -1)
    return _components(keys, identity, energies, frequencies), -ranks


def _components(rows: Tensor, mixing: Tensor, energies: Tensor, frequencies: Tensor) -> Components:
    """Components whose rotation, if they lose it, is replaced by the factor 1."""
    harm = energies * (1.0 - average_rotation(frequencies).abs().square())[:, None]
    one = torch.ones_like(frequencies).to(rows.dtype)
    return Components(rows, mixing, harm, one, frequencies)


def _decouple(
    layer: Any,
    covariance: Tensor,
    *,
    rank: int,
    rope_dim: int,
    select: Callable[[Any, Tensor], tuple[Components, Tensor]],
    calibrated: bool,
) -> Decoupled:
    """The layer as MLA; a latent that is not `calibrated` has the directions of the weights."""
    found, score = select(layer, covariance)
    metric = covariance if calibrated else torch.eye(len(covariance)).to(covariance)
    return from_components(layer, found, largest(score, rope_dim), rank=rank, covariance=metric)


RULES: dict[str, Callable[..., Decoupled]] = {
    "TransMLA": partial(_decouple, select=transmla, calibrated=True),
    "MHA2MLA": partial(_decouple, select=mha2mla, calibrated=False),
}
