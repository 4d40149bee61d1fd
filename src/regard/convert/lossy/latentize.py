"""Keys and values through one joint latent: exact at full rank, below it as calibration finds best.

Stack the key and value projections as W, `[2*G*D, E]`. A latent of rank R is `W ~ B A`, where the
cache holds `A x` and B rebuilds keys and values on reading; keys are normed (where the layer norms
them) and rotated after that, so both stay exact. At full rank nothing is lost. Below, the rank is
spent where the inputs are: the principal directions of `W x` over calibration text, with values
rescaled to weigh less than keys in all. Where keys are normed, their errors count relative to the
size of a key (`normed_keys`).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.convert.linear import JOINT_LATENT, linear_of, numbers_of, refuse_unheld
from regard.convert.lossy.normed_keys import normed_directions
from regard.convert.lossy.norms import plain_norm
from regard.convert.lossy.principal import directions_of
from regard.layers.attention import Attention
from regard.layers.latent_kv import LatentKVAttention


@dataclass(frozen=True, eq=False)
class Latentized:
    """A layer, and the share of its keys' and values' energy that its latent no longer carries.

    Values count for less, as where directions are chosen. Of the calibration text; 0.01 is 1 %.
    """

    layer: LatentKVAttention
    lost: float


def as_latent(layer: Attention) -> LatentKVAttention:
    """The same attention over a joint latent of full rank: equal to rounding.

    The rank is `min(hidden_size, 2 * num_kv_heads * head_dim)`. `q_proj` and `o_proj` are shared.

    Raises:
        ValueError: if the layer gates, has sinks or reads another width: a joint latent of keys
            and values does not hold those.

    >>> import torch
    >>> from regard import Causal, GroupedQueryAttention, Rotary
    >>> gqa = GroupedQueryAttention(16, 4, 2, rope=Rotary(4), mask=Causal())
    >>> latent, x = as_latent(gqa), torch.randn(1, 5, 16)
    >>> latent.kv_lora_rank, torch.allclose(latent(x), gqa(x), atol=1e-5)
    (16, True)
    """
    weight = _stacked(layer)
    directions = torch.linalg.svd(weight, full_matrices=False).U
    return _build(layer, directions.mT @ weight, directions)


def latentize(
    layer: Attention,
    *,
    rank: int,
    covariance: Float[Tensor, "E E"],
    inputs: Float[Tensor, "*N E"] | None = None,
) -> Latentized:
    """The attention over a joint latent of `rank` numbers a token, chosen by calibration.

    Args:
        layer: MHA, GQA or MQA.
        rank: of the latent; `2 * num_kv_heads * head_dim` would be all of GQA's cache.
        covariance: `E[x x^T]` of the layer's inputs over some text (`watch`, `Moments`). A few
            thousand tokens are enough.
        inputs: what it is the covariance of; read where the layer norms its keys. Such a layer is
            fitted better with them.

    Raises:
        ValueError: as `as_latent`, or if the rank or the covariance does not fit.
    """
    weight = _stacked(layer)
    full = min(weight.shape)
    if not 1 <= rank <= full:
        raise ValueError(f"rank={rank} is not in 1..{full}, the full rank of keys and values")
    if covariance.shape[0] != layer.hidden_size:
        raise ValueError(
            f"covariance is of inputs of width {covariance.shape[0]}, the layer reads "
            f"{layer.hidden_size}; gather it with watch([layer])"
        )
    covariance = covariance.to(weight.device)
    if layer.k_norm is None:
        up, down, lost = directions_of(weight, covariance, rank)
    else:
        up, down, lost = normed_directions(layer, weight, covariance, rank, inputs)
    return Latentized(_build(layer, down, up), lost)


def _stacked(layer: Attention) -> Float[Tensor, "R E"]:
    """Key rows, then value rows, in float64."""
    refuse_unheld(layer, JOINT_LATENT)
    rows = [numbers_of(layer, name)[0] for name in ("k_proj", "v_proj")]
    return torch.cat(rows).double()


def _build(layer: Attention, down: Tensor, up: Tensor) -> LatentKVAttention:
    q_bias, o_bias = (numbers_of(layer, name)[1] for name in ("q_proj", "o_proj"))
    kv_biases = [numbers_of(layer, name)[1] for name in ("k_proj", "v_proj")]
    norms = {
        name: plain_norm(norm)
        for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm))
        if norm is not None
    }
    biased = any(bias is not None for bias in (q_bias, *kv_biases))
    with torch.device("meta"):  # all of it is replaced
        latent = LatentKVAttention(
            layer.hidden_size,
            layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            kv_lora_rank=down.shape[0],
            rope=layer.rope,
            bias=biased,
            out_bias=o_bias is not None,
            dropout=layer.dropout,
            qk_norm=layer.arguments["qk_norm"],
            norm_eps=getattr(norms.get("k_norm"), "eps", None) or 1e-6,
            mask=layer.mask,
            scale=layer.scale,
            score_bias=layer.score_bias,
            softcap=layer.softcap,
            backend=layer.backend,
            precision=layer.precision,
        )
    latent.q_proj, latent.o_proj = layer.q_proj, layer.o_proj  # type: ignore[assignment]
    for name, norm in norms.items():
        setattr(latent, name, norm)
    dtype = layer.q_proj.weight.dtype
    half = up.shape[0] // 2
    bias = torch.cat([up.new_zeros(half) if b is None else b for b in kv_biases]).to(dtype)
    latent.kv_a_proj = linear_of(down.to(dtype).contiguous())
    latent.kv_b_proj = linear_of(up.to(dtype).contiguous(), bias if biased else None)
    return latent.train(layer.training)
