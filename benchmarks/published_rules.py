"""Published rules that convert GQA to latents, as baselines without the papers' training.

TransMLA's and MHA2MLA's choose which key components keep RoPE: both convert to DeepSeek's MLA, as
`regard.convert.decouple` does, but select other components; those that lose their rotation are
treated as if its angle were zero. Palu's, ReCalKV's and CARE's choose the latents of keys and of
values where rotation follows the up-projection, as in `regard.convert.latentize`, but keys and
values have latents of their own. `converting.py` and `elsewhere.py` measure them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.convert.linear import linear_of, weight_and_bias
from regard.convert.lossy.decouple import (
    Components,
    average_rotation,
    from_components,
    largest,
    query_energy,
    rotary_keys,
)
from regard.convert.lossy.directions import Lossy, energy_of, gain_of
from regard.convert.lossy.latentize import as_latent
from regard.layers.latent import MultiHeadLatentAttention


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
    one = torch.ones_like(frequencies)[:, None].to(rows.dtype)
    return Components(rows, mixing, harm, one, frequencies)


def _decouple(
    layer: Any,
    covariance: Tensor,
    *,
    rank: int,
    rope_dim: int,
    select: Callable[[Any, Tensor], tuple[Components, Tensor]],
    calibrated: bool,
) -> Lossy[MultiHeadLatentAttention]:
    """The layer as MLA; a latent that is not `calibrated` has the directions of the weights."""
    found, score = select(layer, covariance)
    metric = covariance if calibrated else torch.eye(len(covariance)).to(covariance)
    return from_components(layer, found, largest(score, rope_dim), rank=rank, covariance=metric)


RULES: dict[str, Callable[..., Lossy[MultiHeadLatentAttention]]] = {
    "TransMLA": partial(_decouple, select=transmla, calibrated=True),
    "MHA2MLA": partial(_decouple, select=mha2mla, calibrated=False),
}


def separate(layer: Any, covariance: Tensor, *, rank: int, groups: int) -> Any:
    """A latent for the keys, and one for the values, of each group of key heads, all of one rank.

    Each is the best under the covariance of its inputs (a whitened SVD), as in Palu
    (arXiv:2407.21118), whose Fisher weights of the matrices are left out, and in ReCalKV
    (arXiv:2505.24357). ReCalKV puts similar heads into one group; if all heads are one, no order of
    them matters, and its calibration of the values ends at the same directions.
    """
    names = ("k_proj", "v_proj")
    rows = [weight_and_bias(layer, name)[0].double().chunk(groups) for name in names]
    parts = [part for each in rows for part in each]
    counts = [rank // len(parts) + (i < rank % len(parts)) for i in range(len(parts))]
    return _latent(
        layer, [_whitened(*each, covariance) for each in zip(parts, counts, strict=True)]
    )


def _whitened(rows: Tensor, rank: int, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """The best up- and down-projection of that rank for these rows alone."""
    _, basis = torch.linalg.eigh(energy_of(rows, covariance))
    up = basis[:, max(0, len(basis) - rank) :]
    down = up.mT @ rows
    gain = gain_of(down, up.mT)
    return up / gain, gain[:, None] * down


def _latent(layer: Any, parts: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """A layer whose latent is these parts, each of which is read by its own rows alone."""
    made, dtype = as_latent(layer), layer.q_proj.weight.dtype
    bias = weight_and_bias(made, "kv_b_proj")[1]
    down = torch.cat([each for _, each in parts])
    up = torch.block_diag(*(each for each, _ in parts))
    made.kv_a_proj = linear_of(down.to(dtype).contiguous())
    made.kv_b_proj = linear_of(up.to(dtype).contiguous(), bias)
    made.kv_lora_rank = len(down)
    return made


def care_ranks(layers: Sequence[Any], covariances: Sequence[Tensor], rank: int) -> list[list[int]]:
    """CARE's ranks of keys and values in each layer (arXiv:2603.17946): a total of `rank` a layer
    goes, one by one, to the matrix whose next direction holds the largest share of its energy."""
    spectra = [
        torch.linalg.eigvalsh(energy_of(weight_and_bias(layer, name)[0].double(), each)).flip(-1)
        for layer, each in zip(layers, covariances, strict=True)
        for name in ("k_proj", "v_proj")
    ]
    shares = torch.stack([each.clamp_min(0.0) / each.sum() for each in spectra])
    shares[:, 0] = 2.0  # every matrix has one direction at least
    best = shares.flatten().topk(rank * len(layers)).indices // shares.shape[1]
    return best.bincount(minlength=len(spectra)).unflatten(0, (-1, 2)).tolist()


def care(layer: Any, covariance: Tensor, ranks: Sequence[int]) -> Any:
    """Latents of keys and of values with these ranks, from a covariance-aware SVD."""
    rows = [weight_and_bias(layer, name)[0].double() for name in ("k_proj", "v_proj")]
    parts = zip(rows, ranks, strict=True)
    return _latent(layer, [_whitened(*each, covariance) for each in parts])
