"""The fit of keys that a norm follows: errors count relative to the size of a key.

RMSNorm divides a key k by its root mean square and multiplies by gains g, so an error e of the key
becomes, to first order, the error `g * e / rms(k)` of what is rotated and scored. (Its part along k
vanishes too: one direction of a head's, which is left in.) So heads whose keys are large count no
more than others, and tokens whose keys are small count more:

    minimise   E sum over heads of |g * (W - B A) x|^2 / mean((W x)^2)

With one weight for a token, the mean of its heads', that is a weighted principal component
analysis of keys and values together. A weight for each head, and alternating between A and B, were
tried and brought nothing more; `benchmarks/qk_norm.py` says what the weights bring.
"""

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from regard.convert.linear import rows_of
from regard.convert.lossy.norms import plain_norm
from regard.convert.lossy.principal import directions_of
from regard.layers.attention import Attention

AT_ONCE = 1024  # tokens in float64
SMALLEST = 1e-6  # of the mean square of keys: a smaller one counts as if it were so large


def normed_directions(
    layer: Attention,
    weight: Float64[Tensor, "R E"],
    covariance: Float[Tensor, "E E"],
    rank: int,
    inputs: Float[Tensor, "*N E"] | None,
) -> tuple[Float64[Tensor, "R rank"], Float64[Tensor, "rank E"], float]:
    """As `directions_of`, for keys that `layer.k_norm` norms after they were rebuilt.

    `inputs` are those of the covariance; without them all tokens count the same.
    """
    energy = covariance.double() if inputs is None else _relative_energy(layer, inputs)
    keys = weight[: len(weight) // 2]
    scale = torch.cat([_scale(layer, keys, covariance.double()), weight.new_ones(len(keys))])
    up, down, lost = directions_of(scale[:, None] * weight, energy, rank)
    return up / scale[:, None], down, lost


def _heads(layer: Attention) -> int:
    """How many parts of the keys are normed apart."""
    return 1 if layer.norm_width else layer.num_kv_heads


def _relative_energy(layer: Attention, inputs: Tensor) -> Float64[Tensor, "E E"]:
    """`E[w x x^T]`, w being one over the mean square of a key, on average over heads."""
    rows, x = rows_of(layer, "k_proj"), inputs.flatten(0, -2)
    parts = [
        (some.double() @ rows[:, :-1].mT + rows[:, -1]).square().unflatten(-1, (_heads(layer), -1))
        for some in x.split(AT_ONCE)
    ]
    squares = torch.cat([part.mean(-1) for part in parts])
    weights = 1 / squares.maximum(SMALLEST * squares.mean(0))
    weights = (weights / weights.mean(0)).mean(1)
    total = rows.new_zeros(x.shape[-1], x.shape[-1])
    for some, each in zip(x.split(AT_ONCE), weights.split(AT_ONCE), strict=True):
        total += (each[:, None] * some.double()).mT @ some.double()
    return total / len(x)


def _scale(layer: Attention, keys: Tensor, covariance: Tensor) -> Float64[Tensor, " keys"]:
    """What an error of a channel is multiplied by: its gain over the size of its head's keys."""
    squares = ((keys @ covariance) * keys).sum(1).unflatten(0, (_heads(layer), -1))
    sizes = squares.mean(1, keepdim=True).expand_as(squares).flatten().clamp_min(1e-30).sqrt()
    assert layer.k_norm is not None
    norm = plain_norm(layer.k_norm)
    if type(norm) is not nn.RMSNorm or norm.weight is None:
        return 1 / sizes  # of another norm, gains are not known
    gains = norm.weight.detach().double().abs().clamp_min(1e-6)
    return gains.repeat(len(sizes) // len(gains)) / sizes
