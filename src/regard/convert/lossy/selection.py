"""Keys in components that turn by themselves, and which of them it hurts most to still.

regard's rule is `"harm"`. Two published rules are here to compare with: they select otherwise, and
still what they do not select as if its angle were nought.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Complex128, Float, Float64
from torch import Tensor

from regard.convert.linear import rows_of
from regard.convert.lossy.complex_rope import frequencies_of, split_turning
from regard.convert.lossy.principal import energy_of
from regard.layers.attention import Attention
from regard.rope import Rotary

DISTANCES = 512  # tokens between a query and a key, of those that count for what turning loses
LEAST = 1e-12  # of energy: what nobody asks for may be mixed any way


@dataclass(frozen=True, eq=False)
class Components:
    """The keys of all heads in uncorrelated complex components, `heads` of them a frequency.

    Head g's key at frequency f is the sum over c of `mixing[f, g, c] * rows[f, c] @ x`. `harm[f,
    c]` is the energy that the scores of all heads lose if that component rests, `average[f]` what
    it is best multiplied by then.
    """

    rows: Complex128[Tensor, "freq heads E"]
    mixing: Complex128[Tensor, "freq heads heads"]
    score: Float64[Tensor, "freq heads"]
    harm: Float64[Tensor, "freq heads"]
    average: Complex128[Tensor, " freq"]
    frequencies: Float64[Tensor, " freq"]


class Rule(NamedTuple):
    """A way to select: the components, and whose directions the latent keeps."""

    components: Callable[[Attention, Tensor], Components]
    metric: Callable[[Tensor], Tensor] = lambda covariance: covariance


def components(layer: Attention, covariance: Float[Tensor, "E E"]) -> Components:
    """The keys of a layer in components that are uncorrelated over the calibration text.

    Heads weigh as much as their queries. What a component loses by resting is its energy times what
    turning adds to the best constant in its place, over distances of up to 512.

    Raises:
        ValueError: if the layer has no rotary embedding, or one whose frequencies change.
    """
    keys, frequencies = _keys(layer)
    weight = _asked(layer, covariance).clamp_min(LEAST).sqrt().mT[..., None]  # [freq, heads, 1]
    weighed = weight * keys
    energies, basis = torch.linalg.eigh(energy_of(weighed, covariance))
    energies, basis = energies.flip(-1).clamp_min(0.0), basis.flip(-1)
    average = _average(frequencies)
    harm = energies * (1.0 - average.abs().square())[:, None]
    return Components(basis.mH @ weighed, basis / weight, harm, harm, average, frequencies)


def _transmla(layer: Attention, covariance: Tensor) -> Components:
    """RoRoPE of TransMLA (arXiv:2502.07864): real principal components of the heads at every
    frequency; the first of each frequency turn, then the second."""
    keys, frequencies = _keys(layer)
    energies, basis = torch.linalg.eigh(energy_of(keys, covariance).real)
    energies, basis = energies.flip(-1).clamp_min(0.0), basis.flip(-1).to(keys.dtype)
    order = torch.arange(keys.shape[1]).double().expand_as(energies)
    score = -order - 1e-3 * torch.arange(len(order))[:, None] / len(order)
    return _stilled(basis.mH @ keys, basis, score, energies, frequencies)


def _mha2mla(layer: Attention, covariance: Tensor) -> Components:
    """MHA2MLA's 2-norm (arXiv:2502.14837): heads stay as they are, and as many frequencies of each
    turn; those with the largest product of the norms of queries and keys."""
    keys, frequencies = _keys(layer)
    energies = energy_of(keys[..., None, :], covariance).real[..., 0, 0]
    product = energies * _asked(layer, covariance).mT
    ranks = product.argsort(0, descending=True).argsort(0).double()
    alone = torch.eye(keys.shape[1], dtype=keys.dtype).expand(len(keys), -1, -1)
    return _stilled(keys, alone, -ranks, energies, frequencies)


RULES = {
    "harm": Rule(components),
    "TransMLA": Rule(_transmla),
    "MHA2MLA": Rule(_mha2mla, lambda covariance: torch.eye(len(covariance)).to(covariance)),
}


def _keys(layer: Attention) -> tuple[Complex128[Tensor, "freq heads E1"], Float64[Tensor, " freq"]]:
    rope = layer.rope
    if not isinstance(rope, Rotary):
        raise ValueError(f"rope={rope} turns nothing that could be taken apart; use latentize")
    turning, _ = split_turning(rows_of(layer, "k_proj"), layer.head_dim, rope)
    return turning.transpose(0, 1), frequencies_of(rope)


def _stilled(
    rows: Tensor, mixing: Tensor, score: Tensor, energies: Tensor, frequencies: Tensor
) -> Components:
    """Components that rest at an angle of nought."""
    still = torch.ones_like(frequencies).to(rows.dtype)
    harm = energies * (1.0 - _average(frequencies).abs().square())[:, None]
    return Components(rows, mixing, score, harm, still, frequencies)


def _average(frequencies: Tensor) -> Complex128[Tensor, " freq"]:
    """What turning is on average over distances: the best constant in its place."""
    turns = torch.arange(1, DISTANCES + 1).double()[:, None] * frequencies
    return torch.polar(torch.ones_like(turns), -turns).mean(0)


def _asked(layer: Attention, covariance: Tensor) -> Float64[Tensor, "heads freq"]:
    """The energy of the queries that read each key head, at each frequency."""
    assert isinstance(layer.rope, Rotary)
    queries, _ = split_turning(rows_of(layer, "q_proj"), layer.head_dim, layer.rope)
    energy = energy_of(queries[..., None, :], covariance).real[..., 0, 0]
    return energy.unflatten(0, (layer.num_kv_heads, -1)).sum(1)
