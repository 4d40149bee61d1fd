"""The same attention with more key heads: GQA's are copied, MLA's computed from its latent.

Both are exact; only the cache grows.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.convert.linear import (
    common_arguments,
    linear_of,
    rebuilt,
    refuse_width_norm,
    weight_and_bias,
    with_kv_heads,
)
from regard.layers.attention import Attention
from regard.layers.construct import normed
from regard.layers.latent import MultiHeadLatentAttention

Parameters = tuple[Tensor, Tensor | None]  # a weight and a bias


def spell_out(layer: Attention, num_kv_heads: int | None = None) -> Attention:
    """The same attention with more key heads, exactly: each head's rows are repeated.

    All but `k_proj` and `v_proj` is shared with `layer`, not copied; a layer that already has that
    many heads is returned unchanged. The cache grows with the heads.

    Args:
        layer: GQA or MQA.
        num_kv_heads: a multiple of the layer's own that divides its query heads; MHA if None.

    Raises:
        ValueError: if the heads do not divide, or keys are normed over their whole width, where
            copies would change the norm.

    Examples:
        >>> import torch
        >>> from regard import Causal, GroupedQueryAttention
        >>> from regard.convert import spell_out
        >>> gqa = GroupedQueryAttention(16, 4, 2, mask=Causal())
        >>> mha, x = spell_out(gqa), torch.randn(1, 5, 16)
        >>> mha.kind, torch.allclose(mha(x), gqa(x), atol=1e-6)
        ('MHA', True)
    """
    wanted = layer.num_heads if num_kv_heads is None else num_kv_heads
    if wanted < 1 or wanted % layer.num_kv_heads or layer.num_heads % wanted:
        raise ValueError(
            f"num_kv_heads={wanted} must be a multiple of the layer's {layer.num_kv_heads} that "
            f"divides its {layer.num_heads} query heads"
        )
    if wanted == layer.num_kv_heads:
        return layer
    refuse_width_norm(layer)

    def repeated(rows: Tensor) -> Tensor:
        """Repeat each head's rows: `[G*D, ..]` to `[wanted*D, ..]`."""
        heads = rows.unflatten(0, (layer.num_kv_heads, layer.head_dim))
        return heads.repeat_interleave(wanted // layer.num_kv_heads, dim=0).flatten(0, 1)

    projections: dict[str, nn.Module] = {}
    for name in ("k_proj", "v_proj"):
        weight, bias = weight_and_bias(layer, name)
        projections[name] = linear_of(repeated(weight), None if bias is None else repeated(bias))
    return with_kv_heads(layer, wanted, projections)


class LowRank(nn.Module):
    """A low-rank projection: `down`, a norm of its first `normed_width` channels, and `up`.

    Several projections may share `down` and `norm`, as MLA's keys and values do.
    """

    def __init__(self, down: nn.Module, norm: nn.Module, normed_width: int, up: nn.Module) -> None:
        super().__init__()
        self.down, self.norm, self.normed_width, self.up = down, norm, normed_width, up

    def forward(self, x: Float[Tensor, "*B E"]) -> Float[Tensor, "*B O"]:
        """`[..., E]` to `[..., O]`."""
        narrow = self.down(x)
        latent, rest = narrow.tensor_split([self.normed_width], dim=-1)
        wide: Tensor = self.up(torch.cat([normed(self.norm, latent), rest], dim=-1))
        return wide


def expand(layer: MultiHeadLatentAttention) -> Attention:
    """MLA as MHA with `max(qk_head_dim, v_head_dim)` channels a head, exactly.

    Every head gets a copy of the rotary key as its first channels, where `Attention` rotates. The
    narrower of keys and values is padded with zeros, which change no score and no output. If
    latents are not normed, projections are multiplied out into plain linear layers; if they are,
    they stay in two steps (`LowRank`) and share the layer's parameters.

    Raises:
        ValueError: if a projection is not a plain linear layer.

    Examples:
        >>> import torch
        >>> from regard import Causal, MultiHeadLatentAttention, Rotary
        >>> from regard.convert import expand
        >>> mla = MultiHeadLatentAttention(16, 2, kv_lora_rank=6, qk_nope_head_dim=5,
        ...     qk_rope_head_dim=4, v_head_dim=3, rope=Rotary(4), mask=Causal())
        >>> mha, x = expand(mla), torch.randn(1, 7, 16)
        >>> mha.kind, mha.head_dim, torch.allclose(mha(x), mla(x), atol=1e-5)
        ('MHA', 9, True)
    """
    dim = max(layer.qk_head_dim, layer.v_head_dim)
    keys, values = _up_projections(layer, dim)
    latent = "kv_a_proj_with_mqa", "kv_a_layernorm", layer.kv_lora_rank
    children = {
        "q_proj": _queries(layer, dim),
        "k_proj": _composed(layer, *latent, keys),
        "v_proj": _composed(layer, *latent, values),
        "o_proj": _output(layer, dim),
    }
    biased = {name for name, child in children.items() if getattr(child, "bias", None) is not None}
    arguments = common_arguments(layer) | {"head_dim": dim, "bias": biased, "rope": layer.rope}
    return rebuilt(Attention, arguments, children).train(layer.training)


def _queries(layer: MultiHeadLatentAttention, dim: int) -> nn.Module:
    name = "q_proj" if layer.q_lora_rank is None else "q_b_proj"
    weight, bias = weight_and_bias(layer, name)

    def arranged(rows: Tensor) -> Tensor:
        nope, rotary = rows.unflatten(0, (layer.num_heads, -1)).split(
            [layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=1
        )
        return _padded(torch.cat([rotary, nope], dim=1), dim)

    up = arranged(weight), None if bias is None else arranged(bias)
    if layer.q_lora_rank is None:
        return linear_of(*up)
    return _composed(layer, "q_a_proj", "q_a_layernorm", layer.q_lora_rank, up)


def _up_projections(layer: MultiHeadLatentAttention, dim: int) -> tuple[Parameters, Parameters]:
    """Keys and values from the latent and the rotary key, concatenated: both `[H*dim, R+Dr]`."""
    weight, bias = weight_and_bias(layer, "kv_b_proj")
    heads, width = layer.num_heads, layer.qk_rope_head_dim
    sizes = [layer.qk_nope_head_dim, layer.v_head_dim]
    nope, values = F.pad(weight, (0, width)).unflatten(0, (heads, -1)).split(sizes, dim=1)
    rotary = F.pad(torch.eye(width).to(weight), (layer.kv_lora_rank, 0)).expand(heads, -1, -1)
    keys = torch.cat([rotary, nope], dim=1)
    if bias is None:
        return (_padded(keys, dim), None), (_padded(values, dim), None)
    offsets, of_values = bias.unflatten(0, (heads, -1)).split(sizes, dim=1)
    of_keys = F.pad(offsets, (width, 0))
    return (_padded(keys, dim), _padded(of_keys, dim)), (
        _padded(values, dim),
        _padded(of_values, dim),
    )


def _composed(
    layer: MultiHeadLatentAttention, down: str, norm: str, width: int, up: Parameters
) -> nn.Module:
    """`down` and `up` composed: one linear layer, or `LowRank` with a norm between them."""
    between = layer.get_submodule(norm)
    if not isinstance(between, nn.Identity):
        return LowRank(layer.get_submodule(down), between, width, linear_of(*up))
    (weight, bias), (rows, offset) = weight_and_bias(layer, down), up
    product = (rows.double() @ weight.double()).to(weight.dtype)
    if bias is None:
        return linear_of(product, offset)
    through = rows.double() @ bias.double()
    whole = through if offset is None else through + offset
    return linear_of(product, whole.to(weight.dtype))


def _output(layer: MultiHeadLatentAttention, dim: int) -> nn.Module:
    if dim == layer.v_head_dim:
        return layer.o_proj
    weight, bias = weight_and_bias(layer, "o_proj")
    columns = weight.mT.unflatten(0, (layer.num_heads, layer.v_head_dim))
    return linear_of(_padded(columns, dim).mT.contiguous(), bias)


def _padded(heads: Float[Tensor, "H D *I"], dim: int) -> Float[Tensor, "HD *I"]:
    """Each head's rows padded with zeros to `dim` rows, heads concatenated."""
    rows = (0, dim - heads.shape[1])
    return F.pad(heads, rows if heads.ndim == 2 else (0, 0, *rows)).flatten(0, 1)
