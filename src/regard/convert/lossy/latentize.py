"""Keys and values through one joint latent: exact at full rank, calibrated below it.

Stack the key and value projections as W, `[2*G*D, E]`. A latent of rank R is `W ~ B A`: the cache
holds `A x`, and B computes keys and values when they are read. Keys are normed (if the layer norms
them) and rotated after that, so both stay exact. Below full rank, A is the principal directions of
`W x` over calibration text: under the metric of what their errors do to the layer's outputs
(`sensitivity`), or, if only a covariance is given, with values scaled to count for less than keys.
"""

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from regard.convert.linear import (
    JOINT_LATENT,
    common_arguments,
    linear_of,
    rebuilt,
    refuse_unsupported,
    weight_and_bias,
)
from regard.convert.lossy.directions import Lossy, directions_of, energy_of, roots_of
from regard.convert.lossy.sensitivity import sensitivity
from regard.hf.loading.offloaded import fetched
from regard.layers.attention import Attention
from regard.layers.latent_kv import LatentKVAttention


def as_latent(layer: Attention) -> LatentKVAttention:
    """The same attention over a joint latent of full rank: equal to rounding.

    The rank is `min(hidden_size, 2 * num_kv_heads * head_dim)`. `q_proj` and `o_proj` are shared.

    Raises:
        ValueError: if the layer has a gate, sinks or a context of another width, which
            `LatentKVAttention` does not have.

    Examples:
        >>> import torch
        >>> from regard import Causal, GroupedQueryAttention, Rotary
        >>> from regard.convert import as_latent
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
    inputs: Float[Tensor, "*N L E"] | None = None,
    gradients: Float[Tensor, "T R"] | None = None,
) -> Lossy[LatentKVAttention]:
    """The attention over a joint latent of `rank` elements a token, chosen by calibration.

    Args:
        layer: MHA, GQA or MQA.
        rank: of the latent; `2 * num_kv_heads * head_dim` is the size of GQA's cache.
        covariance: `E[x x^T]` of the layer's inputs over some text (`watch`, `Moments`). A few
            thousand tokens are enough.
        inputs: windows of the inputs themselves. They improve the fit: errors count by what they
            do to the layer's outputs over them, and the covariance is theirs.
        gradients: of the outputs by keys and values over the text (`sensitivity`), if they are
            known already.

    Raises:
        ValueError: as `as_latent`, or if the rank or the covariance does not fit.

    Examples:
        >>> import torch
        >>> from regard import GroupedQueryAttention
        >>> from regard.convert import latentize
        >>> gqa = GroupedQueryAttention(16, 4, 2)
        >>> half = latentize(gqa, rank=8, covariance=torch.eye(16))
        >>> half.layer.kv_lora_rank, 0 < half.lost < 0.5
        (8, True)
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
    metric = None
    if inputs is not None:
        metric, covariance = sensitivity(layer, inputs, gradients)
    up, down, lost = directions_of(weight, covariance, rank, metric)
    return Lossy(_build(layer, down, up), lost)


def energies_of(
    layer: Attention,
    inputs: Float[Tensor, "*N L E"],
    gradients: Float[Tensor, "T R"] | None = None,
) -> Float64[Tensor, " R"]:
    """The energy of a layer's outputs that each direction of a full latent carries, largest first.

    They are the squared changes of the outputs if `latentize` with these inputs leaves it out; with
    the gradients of the predictions, those of their log-likelihood.
    """
    metric, covariance = sensitivity(layer, inputs, gradients)
    root, _ = roots_of(metric)
    energy = energy_of(_stacked(layer), covariance)
    return torch.linalg.eigvalsh(root @ energy @ root).flip(0).clamp_min(0.0)


def _stacked(layer: Attention) -> Float[Tensor, "R E"]:
    """Key rows, then value rows, in float64."""
    refuse_unsupported(layer, JOINT_LATENT)
    rows = [weight_and_bias(layer, name)[0] for name in ("k_proj", "v_proj")]
    return torch.cat(rows).double()


def _build(layer: Attention, down: Tensor, up: Tensor) -> LatentKVAttention:
    biases = {name: weight_and_bias(layer, f"{name}_proj")[1] for name in "qkvo"}
    norms = {
        name: plain_norm(norm)
        for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm))
        if norm is not None
    }
    biased = any(biases[name] is not None for name in "qkv")
    arguments = common_arguments(layer) | {
        "num_kv_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "kv_lora_rank": len(down),
        "rope": layer.rope,
        "bias": biased,
        "out_bias": biases["o"] is not None,
        "qk_norm": layer.arguments.get("qk_norm"),
        "norm_eps": getattr(norms.get("k_norm"), "eps", None) or 1e-6,
        "softcap": layer.softcap,
    }
    dtype, half = layer.q_proj.weight.dtype, len(up) // 2
    zeros = up.new_zeros(half)
    bias = torch.cat([zeros if each is None else each for each in (biases["k"], biases["v"])])
    children = norms | {
        "q_proj": layer.q_proj,
        "o_proj": layer.o_proj,
        "kv_a_proj": linear_of(down.to(dtype).contiguous()),
        "kv_b_proj": linear_of(up.to(dtype).contiguous(), bias.to(dtype) if biased else None),
    }
    return rebuilt(LatentKVAttention, arguments, children).train(layer.training)


def plain_norm(norm: nn.Module) -> nn.Module:
    """An `nn.RMSNorm` equal to `norm`, so that it can be saved; `norm` itself if it is no RMS norm.

    Models of transformers define their own RMS norms, some of which multiply by `weight` and some
    (Gemma's) by `1 + weight`. Running it shows which of the two it is.

    Examples:
        >>> norm = nn.LayerNorm(4)
        >>> plain_norm(norm) is norm
        True
    """
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if type(norm) is nn.RMSNorm or eps is None or getattr(norm, "weight", None) is None:
        return norm
    weight = fetched(norm, "weight")
    wide = weight.float()  # 1 + weight has more digits than a half-precision weight
    for gain in (weight, 1 + wide):
        made = nn.RMSNorm(len(weight), eps=eps, device=weight.device, dtype=gain.dtype)
        made.weight = nn.Parameter(gain)
        if _alike(made, norm, weight):
            return made.train(norm.training)
    return norm


@torch.no_grad()
def _alike(made: nn.Module, norm: nn.Module, weight: Tensor) -> bool:
    """Whether two norms agree for inputs of ordinary size and as small as epsilon."""
    sizes = torch.tensor([[1.0], [1e-3], [30.0]], device=weight.device)
    x = (sizes * torch.linspace(-2.0, 1.0, len(weight), device=weight.device)).to(weight.dtype)
    one, other = made(x.to(made.get_parameter("weight").dtype)).float(), norm(x).float()
    bound = 8 * torch.finfo(weight.dtype).eps  # half-precision norms round two or three times
    return bool(((one - other).abs() <= bound * (other.abs() + 1e-30)).all())
