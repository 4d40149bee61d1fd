"""One key head, and one value head, for several: what they share, and how their readers change."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from regard.convert.linear import numbers_of, rows_of
from regard.convert.lossy.balance import gain_of
from regard.convert.lossy.complex_rope import (
    Resting,
    Turning,
    frequencies_of,
    join_turning,
    split_turning,
)
from regard.convert.lossy.principal import energy_of, roots_of
from regard.layers.attention import Attention
from regard.rope import Rotary

LEAST = 1e-9  # of the largest: what nobody asks for may be mixed any way
SLOW = 0.25  # radians
REACH = 512  # tokens: channels that turn less than SLOW over them are mixed as if they rested


@dataclass(frozen=True, eq=False)
class Merged:
    """The rows that several heads now share; and the rows of all that read them, head after head.

    Readers are rows of `q_proj` for keys, and columns of `o_proj`, as rows, for values. `lost` and
    `energy` are of the scores or the outputs, over the calibration text.
    """

    shared: Float64[Tensor, "D E1"]
    readers: Float64[Tensor, "R W"]
    lost: float
    energy: float


def merge_values(layer: Attention, heads: list[int], covariance: Float[Tensor, "E E"]) -> Merged:
    """One value head for these: the principal directions of what the output projection reads."""
    dim = layer.head_dim
    values = rows_of(layer, "v_proj").unflatten(0, (-1, dim))[heads]
    columns = numbers_of(layer, "o_proj")[0].double().mT  # [H*D, E]
    readers = columns.unflatten(0, (layer.num_kv_heads, -1, dim))[heads]
    return _merged(values, readers, (readers @ readers.mT).sum(1), covariance)


def merge_keys(layer: Attention, heads: list[int], covariance: Float[Tensor, "E E"]) -> Merged:
    """One key head for these. At each frequency it keeps the complex direction with most of the
    scores' energy; channels that turn slowly, or not at all, share their principal directions."""
    dim = layer.head_dim
    keys = rows_of(layer, "k_proj").unflatten(0, (-1, dim))[heads]
    queries = rows_of(layer, "q_proj").unflatten(0, (layer.num_kv_heads, -1, dim))[heads]
    if not isinstance(layer.rope, Rotary):
        return _merged(keys, queries, energy_of(queries, covariance).sum(1), covariance)
    rope, copies = layer.rope, queries.shape[1]
    turning, rest = split_turning(keys.flatten(0, 1), dim, rope)
    asking, asking_rest = split_turning(queries.flatten(0, 2), dim, rope)
    slow = frequencies_of(rope) * REACH < SLOW
    still = _still(turning, rest, slow)
    asking_still = _still(asking, asking_rest, slow).unflatten(0, (-1, copies))
    metric = energy_of(asking_still, covariance).sum(1)
    resting = _merged(still, asking_still, metric, covariance)
    fast = _aligned(turning[:, ~slow], asking[:, ~slow].unflatten(0, (-1, copies)), covariance)
    return Merged(
        _together(fast[0][None], resting.shared[None], slow, rope),
        _together(fast[1], resting.readers.unflatten(0, (len(asking), -1)), slow, rope),
        fast[2] + resting.lost,
        fast[3] + resting.energy,
    )


def _still(turning: Turning, rest: Resting, slow: Tensor) -> Float64[Tensor, "heads D E1"]:
    """The channels that are mixed as if they rested, side by side."""
    return torch.cat([turning.real[:, slow], turning.imag[:, slow], rest], dim=1)


def _together(fast: Turning, still: Resting, slow: Tensor, rope: Rotary) -> Tensor:
    """The inverse: channels in the head's own order, heads one after the other."""
    count = int(slow.sum())
    turning = fast.new_zeros(fast.shape[0], len(slow), fast.shape[-1])
    turning[:, ~slow] = fast
    turning[:, slow] = torch.complex(still[:, :count], still[:, count : 2 * count])
    return join_turning(turning, still[:, 2 * count :], rope)


def _merged(
    rows: Float64[Tensor, "heads D E1"],
    readers: Float64[Tensor, "heads copies D W"],
    metric: Float64[Tensor, "heads D D"],
    covariance: Tensor,
) -> Merged:
    """The principal directions of all rows, where `metric` says how much their readers care."""
    root, inverse = roots_of(metric)
    weighed = (root @ rows).flatten(0, 1)
    energies, basis = torch.linalg.eigh(energy_of(weighed, covariance))
    width = rows.shape[1]
    best = basis[:, -width:] if width else basis
    opened = inverse @ best.unflatten(0, root.shape[:2])  # [heads, D, D]
    shared, changed = best.mT @ weighed, opened.mT[:, None] @ readers
    even = gain_of(shared, changed.movedim(2, 0).flatten(1))[:, None]
    lost = energies[: len(energies) - width].clamp_min(0.0).sum()
    changed = (changed / even).flatten(0, 2)
    return Merged(even * shared, changed, float(lost), float(energies.sum()))


def _aligned(
    keys: Turning, queries: Tensor, covariance: Tensor
) -> tuple[Tensor, Tensor, float, float]:
    """The shared key `[freq, E1]`, all queries changed for it, the energy lost, and that of all."""
    asked = energy_of(queries[..., None, :], covariance).real[..., 0, 0].sum(1)
    asked = asked.clamp_min(LEAST * float(asked.max()))
    weight = asked.sqrt().mT[..., None]  # [freq, heads, 1]
    weighed = weight * keys.transpose(0, 1)
    energies, basis = torch.linalg.eigh(energy_of(weighed, covariance))
    best = basis[..., -1:]
    shared = (best.mH @ weighed)[:, 0]
    gain = (best / weight)[..., 0].mT.conj()  # of a key head at a frequency: its queries are given
    changed = (queries * gain[:, None, :, None]).flatten(0, 1)
    energies = energies.clamp_min(0.0)
    even = gain_of(shared, changed.transpose(0, 1).flatten(1))[:, None]
    lost, energy = float(energies[:, :-1].sum()), float(energies.sum())
    return even * shared, changed / even, lost, energy
