"""Fewer key and value heads: MHA or GQA to GQA or MQA, with heads aligned before they are merged.

The mean of unaligned heads cancels, since the first channel of one head has nothing to do with that
of another. But values may be written in any basis if the output projection reads that basis, and
keys may be multiplied by any complex number at each frequency if queries are too, since that
commutes with rotation. So values are merged in their principal basis, and keys along the complex
direction, one per frequency, that keeps most of the scores' energy.

Mean pooling is the GQA paper's (arXiv:2305.13245); aligning before merging is in arXiv:2412.20677,
with real rotations and training.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from regard.convert.linear import (
    linear_of,
    refuse_unsupported,
    refuse_width_norm,
    rows_of,
    weight_and_bias,
    with_kv_heads,
)
from regard.convert.lossy.directions import (
    Lossy,
    PlainRows,
    RotaryRows,
    energy_of,
    frequencies_of,
    gain_of,
    join_rotary,
    roots_of,
    split_rotary,
)
from regard.layers.attention import Attention
from regard.rope import Rotary

LEAST = 1e-9  # of the largest energy of queries: the least weight of a key, so that none is zero
SLOW = 0.25  # radians over REACH: channels that rotate by less are merged as if not rotated
REACH = 512  # tokens between a query and a key
Method = Literal["aligned", "mean", "first"]


def regroup(
    layer: Attention,
    num_kv_heads: int,
    *,
    covariance: Float[Tensor, "E E"] | None = None,
    method: Method = "aligned",
) -> Lossy[Attention]:
    """The attention with fewer key and value heads, GQA or MQA; lossy, so measure the result.

    Args:
        layer: MHA or GQA.
        num_kv_heads: a divisor of the layer's own. For more heads than it has, see `spell_out`.
        covariance: `E[x x^T]` of the layer's inputs over some text (`Moments.covariance`, or
            `Moments.augmented` where projections have biases).
        method: `"aligned"` needs the covariance. `"mean"` and `"first"` are the GQA paper's mean
            pooling and first head (Ainslie et al. 2023, arXiv:2305.13245): without training their
            models are not usable.

    Raises:
        ValueError: if the heads do not divide, there is no covariance, or keys are normed: a norm
            of each head allows only `"mean"` and `"first"`, a norm of all heads neither.

    Examples:
        >>> import torch
        >>> from regard import MultiHeadAttention
        >>> from regard.convert import regroup
        >>> gqa = regroup(MultiHeadAttention(16, 4), 2, covariance=torch.eye(16))
        >>> gqa.layer.kind, 0 < gqa.lost < 1
        ('GQA', True)
    """
    if num_kv_heads < 1 or layer.num_kv_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads={num_kv_heads} must divide the layer's {layer.num_kv_heads}: heads are "
            "merged in groups of one size"
        )
    if num_kv_heads == layer.num_kv_heads:
        return Lossy(layer, 0.0)
    refuse_width_norm(layer)
    if method != "aligned":
        return Lossy(_pooled(layer, num_kv_heads, method), float("nan"))
    refuse_unsupported(layer, "an aligned merge")
    if covariance is None:
        raise ValueError(
            "aligned heads are fitted to text: give covariance=, gathered with watch([layer]), or "
            'method="mean", which is not usable without training'
        )
    return _aligned(layer, num_kv_heads, covariance)


def _pooled(layer: Attention, num_kv_heads: int, method: Method) -> Attention:
    size = layer.num_kv_heads // num_kv_heads
    pooled: dict[str, nn.Module] = {}
    for name in ("k_proj", "v_proj"):
        groups = rows_of(layer, name).unflatten(0, (num_kv_heads, size, layer.head_dim))
        heads = groups.mean(1) if method == "mean" else groups[:, 0]
        pooled[name] = _projection(layer, name, heads.flatten(0, 1))
    return with_kv_heads(layer, num_kv_heads, pooled)


def _aligned(layer: Attention, num_kv_heads: int, covariance: Tensor) -> Lossy[Attention]:
    size = layer.num_kv_heads // num_kv_heads
    groups = [list(range(layer.num_kv_heads))]
    if num_kv_heads > 1:
        groups = grouped(_losses(layer, covariance), size)
    keys = [merge_keys(layer, heads, covariance) for heads in groups]
    values = [merge_values(layer, heads, covariance) for heads in groups]
    rows = {
        "k_proj": torch.cat([each.shared for each in keys]),
        "v_proj": torch.cat([each.shared for each in values]),
        "q_proj": torch.cat([each.readers for each in keys]),
    }
    merged: dict[str, nn.Module] = {
        name: _projection(layer, name, each) for name, each in rows.items()
    }
    output = torch.cat([each.readers for each in values]).mT
    weight, offset = weight_and_bias(layer, "o_proj")
    merged["o_proj"] = linear_of(output.to(weight.dtype).contiguous(), offset)
    losses = [each.lost / each.energy for each in (*keys, *values)]
    return Lossy(with_kv_heads(layer, num_kv_heads, merged), sum(losses) / len(losses))


def _projection(layer: Attention, name: str, rows: Float64[Tensor, "R E1"]) -> nn.Linear:
    """A linear layer of these rows, with a bias if the layer's own has one, in its dtype."""
    old = layer.get_submodule(name)
    assert isinstance(old, nn.Linear)
    bias = None if old.bias is None else rows[:, -1].to(old.bias.dtype)
    return linear_of(rows[:, :-1].to(old.weight.dtype).contiguous(), bias)


def _losses(layer: Attention, covariance: Tensor) -> Float64[Tensor, "heads heads"]:
    """The share of energy that merging each pair of heads loses, keys and values summed."""
    heads = range(layer.num_kv_heads)
    table = torch.zeros(len(heads), len(heads), dtype=torch.float64)
    for a in heads:
        for b in range(a):
            pair = [merge(layer, [b, a], covariance) for merge in (merge_keys, merge_values)]
            table[a, b] = table[b, a] = sum(each.lost / each.energy for each in pair)
    return table


def grouped(loss: Float[Tensor, "heads heads"], size: int) -> list[list[int]]:
    """Groups of `size` heads that lose little when merged; `loss[a, b]` is the loss of a with b.

    Groups are filled greedily; then heads of different groups are exchanged while that helps, since
    the last groups got the heads that were left over.

    Examples:
        >>> import torch
        >>> grouped(torch.tensor([[0.0, 9, 1, 9], [9, 0, 9, 1], [1, 9, 0, 9], [9, 1, 9, 0]]), 2)
        [[0, 2], [1, 3]]
    """
    table: list[list[float]] = loss.tolist()
    left, groups = list(range(len(table))), []
    while left:
        group = [left.pop(0)]
        while len(group) < size:
            nearest = min(left, key=lambda head: sum(table[head][other] for other in group))
            left.remove(nearest)
            group.append(nearest)
        groups.append(group)
    while _swapped(table, groups):
        pass
    return sorted(sorted(group) for group in groups)


def _swapped(table: list[list[float]], groups: list[list[int]]) -> bool:
    """Exchange two heads if that reduces the loss by more than rounding; whether it did."""
    for one, other in combinations(groups, 2):
        for i in range(len(one)):
            for j in range(len(other)):
                before = _within(table, one) + _within(table, other)
                one[i], other[j] = other[j], one[i]
                if _within(table, one) + _within(table, other) < before * (1 - 1e-9):
                    return True
                one[i], other[j] = other[j], one[i]
    return False


def _within(table: list[list[float]], group: list[int]) -> float:
    return sum(table[a][b] for a, b in combinations(group, 2))


@dataclass(frozen=True, eq=False)
class Merged:
    """One head in place of several: its rows, and the changed rows that read it.

    `readers` are rows of `q_proj` for keys, and columns of `o_proj`, as rows, for values; heads are
    concatenated. `lost` and `energy` are of scores or outputs, over the calibration text.
    """

    shared: Float64[Tensor, "D E1"]
    readers: Float64[Tensor, "R W"]
    lost: float
    energy: float


def merge_values(layer: Attention, heads: list[int], covariance: Float[Tensor, "E E"]) -> Merged:
    """One value head for these: the principal directions of the output projection's inputs."""
    dim = layer.head_dim
    values = rows_of(layer, "v_proj").unflatten(0, (-1, dim))[heads]
    columns = weight_and_bias(layer, "o_proj")[0].double().mT  # [H*D, E]
    readers = columns.unflatten(0, (layer.num_kv_heads, -1, dim))[heads]
    return _merged(values, readers, (readers @ readers.mT).sum(1), covariance)


def merge_keys(layer: Attention, heads: list[int], covariance: Float[Tensor, "E E"]) -> Merged:
    """One key head for these. At each frequency it is the complex direction with most of the
    scores' energy; channels that are rotated slowly, or not at all, share principal directions."""
    dim = layer.head_dim
    keys = rows_of(layer, "k_proj").unflatten(0, (-1, dim))[heads]
    queries = rows_of(layer, "q_proj").unflatten(0, (layer.num_kv_heads, -1, dim))[heads]
    if not isinstance(layer.rope, Rotary):
        return _merged(keys, queries, energy_of(queries, covariance).sum(1), covariance)
    rope, copies = layer.rope, queries.shape[1]
    rotary, plain = split_rotary(keys.flatten(0, 1), dim, rope)
    rotary_queries, plain_queries = split_rotary(queries.flatten(0, 2), dim, rope)
    slow = frequencies_of(rope) * REACH < SLOW
    slow_keys = _slow_channels(rotary, plain, slow)
    slow_queries = _slow_channels(rotary_queries, plain_queries, slow).unflatten(0, (-1, copies))
    metric = energy_of(slow_queries, covariance).sum(1)
    slowly = _merged(slow_keys, slow_queries, metric, covariance)
    fast_queries = rotary_queries[:, ~slow].unflatten(0, (-1, copies))
    shared, readers, lost, energy = _aligned_keys(rotary[:, ~slow], fast_queries, covariance)
    slow_readers = slowly.readers.unflatten(0, (len(rotary_queries), -1))
    return Merged(
        _joined(shared[None], slowly.shared[None], slow, rope),
        _joined(readers, slow_readers, slow, rope),
        lost + slowly.lost,
        energy + slowly.energy,
    )


def _slow_channels(
    rotary: RotaryRows, plain: PlainRows, slow: Tensor
) -> Float64[Tensor, "heads D E1"]:
    """The channels that are merged as if not rotated: real parts, imaginary parts, the others."""
    return torch.cat([rotary.real[:, slow], rotary.imag[:, slow], plain], dim=1)


def _joined(fast: RotaryRows, others: PlainRows, slow: Tensor, rope: Rotary) -> Tensor:
    """The inverse of `_slow_channels`: channels in the order of the head, heads concatenated."""
    count = int(slow.sum())
    rotary = fast.new_zeros(fast.shape[0], len(slow), fast.shape[-1])
    rotary[:, ~slow] = fast
    rotary[:, slow] = torch.complex(others[:, :count], others[:, count : 2 * count])
    return join_rotary(rotary, others[:, 2 * count :], rope)


def _merged(
    rows: Float64[Tensor, "heads D E1"],
    readers: Float64[Tensor, "heads copies D W"],
    metric: Float64[Tensor, "heads D D"],
    covariance: Tensor,
) -> Merged:
    """The principal directions of all rows, weighted by `metric`, the energy of their readers."""
    root, inverse = roots_of(metric)
    weighted = (root @ rows).flatten(0, 1)
    energies, basis = torch.linalg.eigh(energy_of(weighted, covariance))
    width = rows.shape[1]
    best = basis[:, -width:] if width else basis
    bases = inverse @ best.unflatten(0, root.shape[:2])  # [heads, D, D]
    shared, changed = best.mT @ weighted, bases.mT[:, None] @ readers
    gain = gain_of(shared, changed.movedim(2, 0).flatten(1))[:, None]
    lost = energies[: len(energies) - width].clamp_min(0.0).sum()
    changed = (changed / gain).flatten(0, 2)
    return Merged(gain * shared, changed, float(lost), float(energies.sum()))


def _aligned_keys(
    keys: RotaryRows, queries: Tensor, covariance: Tensor
) -> tuple[Tensor, Tensor, float, float]:
    """The shared key `[freq, E1]`, all queries changed for it, the energy lost, and all energy."""
    energy = energy_of(queries[..., None, :], covariance).real[..., 0, 0].sum(1)
    energy = energy.clamp_min(LEAST * float(energy.max()))
    weight = energy.sqrt().mT[..., None]  # [freq, heads, 1]
    weighted = weight * keys.transpose(0, 1)
    energies, basis = torch.linalg.eigh(energy_of(weighted, covariance))
    best = basis[..., -1:]
    shared = (best.mH @ weighted)[:, 0]
    factors = (best / weight)[..., 0].mT.conj()  # of the queries of a key head, per frequency
    changed = (queries * factors[:, None, :, None]).flatten(0, 1)
    energies = energies.clamp_min(0.0)
    gain = gain_of(shared, changed.transpose(0, 1).flatten(1))[:, None]
    return gain * shared, changed / gain, float(energies[:, :-1].sum()), float(energies.sum())
