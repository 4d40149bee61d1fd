"""Fewer key and value heads: MHA or GQA to GQA or MQA, with heads aligned before they are merged.

Heads that are merged as they are cancel out: nothing makes the first channel of one head mean what
it means in another. But a head's values may be written in any basis if the output projection reads
them in it, and its keys may be multiplied by any complex number at each frequency if its queries
are too, since that commutes with rotation. So values are merged in their principal basis, and keys
along the complex direction, one a frequency, that keeps most of the scores' energy.

Mean pooling is the GQA paper's (arXiv:2305.13245); aligning before merging is in arXiv:2412.20677,
with real rotations and training.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from regard.convert.exact.spell_out import refuse_norm_of_width
from regard.convert.linear import linear_of, numbers_of, refuse_unheld, rows_of
from regard.convert.lossy.grouping import grouped
from regard.convert.lossy.merging import merge_keys, merge_values
from regard.layers.attention import Attention

Method = Literal["aligned", "mean", "first"]


@dataclass(frozen=True, eq=False)
class Regrouped:
    """A layer of fewer key heads, and the share of its scores' and values' energy that is lost."""

    layer: Attention
    lost: float


def regroup(
    layer: Attention,
    num_kv_heads: int,
    *,
    covariance: Float[Tensor, "E E"] | None = None,
    method: Method = "aligned",
) -> Regrouped:
    """The attention with `num_kv_heads` key and value heads; a lossy conversion, measure it.

    Args:
        layer: MHA or GQA.
        num_kv_heads: a divisor of the layer's own. For more heads than it has, see `spell_out`.
        covariance: `E[x x^T]` of the layer's inputs over some text (`Moments.covariance`, or
            `Moments.augmented` where projections have biases).
        method: `"aligned"` needs the covariance. `"mean"` and `"first"` are the GQA paper's mean
            pooling and first head: without training their models are not usable.

    Raises:
        ValueError: if the heads do not divide, there is no covariance, or keys are normed: then
            only `"mean"` and `"first"` can be made, and neither where all heads have one norm.
    """
    if num_kv_heads < 1 or layer.num_kv_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads={num_kv_heads} must divide the layer's {layer.num_kv_heads}: heads are "
            "merged in groups of one size"
        )
    if num_kv_heads == layer.num_kv_heads:
        return Regrouped(layer, 0.0)
    refuse_norm_of_width(layer)
    if method != "aligned":
        return _pooled(layer, num_kv_heads, method)
    refuse_unheld(layer, "an aligned merge")
    if covariance is None:
        raise ValueError(
            "aligned heads are fitted to text: give covariance=, gathered with watch([layer]), or "
            'method="mean", which is not usable without training'
        )
    return _aligned(layer, num_kv_heads, covariance)


def _pooled(layer: Attention, num_kv_heads: int, method: Method) -> Regrouped:
    made = outline(layer, num_kv_heads)
    size = layer.num_kv_heads // num_kv_heads
    for name in ("k_proj", "v_proj"):
        groups = rows_of(layer, name).unflatten(0, (num_kv_heads, size, layer.head_dim))
        kept = groups.mean(1) if method == "mean" else groups[:, 0]
        _set(made, layer, name, kept.flatten(0, 1))
    return Regrouped(made, float("nan"))


def _aligned(layer: Attention, num_kv_heads: int, covariance: Tensor) -> Regrouped:
    size = layer.num_kv_heads // num_kv_heads
    groups = [list(range(layer.num_kv_heads))]
    if num_kv_heads > 1:
        groups = grouped(_losses(layer, covariance), size)
    keys = [merge_keys(layer, heads, covariance) for heads in groups]
    values = [merge_values(layer, heads, covariance) for heads in groups]
    made = outline(layer, num_kv_heads)
    _set(made, layer, "k_proj", torch.cat([each.shared for each in keys]))
    _set(made, layer, "v_proj", torch.cat([each.shared for each in values]))
    _set(made, layer, "q_proj", torch.cat([each.readers for each in keys]))
    output = torch.cat([each.readers for each in values]).mT
    weight, offset = numbers_of(layer, "o_proj")
    made.o_proj = linear_of(output.to(weight.dtype).contiguous(), offset)
    losses = [each.lost / each.energy for each in (*keys, *values)]
    return Regrouped(made, sum(losses) / len(losses))


def _losses(layer: Attention, covariance: Tensor) -> Float64[Tensor, "heads heads"]:
    """What merging each pair of heads would lose, keys and values alike as shares."""
    heads = range(layer.num_kv_heads)
    table = torch.zeros(len(heads), len(heads), dtype=torch.float64)
    for a in heads:
        for b in range(a):
            pair = [merge(layer, [b, a], covariance) for merge in (merge_keys, merge_values)]
            table[a, b] = table[b, a] = sum(each.lost / each.energy for each in pair)
    return table


def outline(layer: Attention, num_kv_heads: int) -> Attention:
    """The layer as it will be, sharing what does not change."""
    sizes = {"num_heads": layer.num_heads, "num_kv_heads": num_kv_heads}
    with torch.device("meta"):  # all of it is replaced
        made = Attention(**{**layer.arguments, **sizes})
    for name, child in layer.named_children():
        setattr(made, name, child)
    made.sinks = layer.sinks
    return made.train(layer.training)


def _set(made: Attention, layer: Attention, name: str, rows: Float64[Tensor, "R E1"]) -> None:
    old = layer.get_submodule(name)
    assert isinstance(old, nn.Linear)
    bias = None if old.bias is None else rows[:, -1].to(old.bias.dtype)
    setattr(made, name, linear_of(rows[:, :-1].to(old.weight.dtype).contiguous(), bias))
