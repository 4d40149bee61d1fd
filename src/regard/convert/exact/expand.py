"""MLA written out as MHA: every head gets the keys and values that it rebuilds from the latent.

The rotary key of all heads is copied for each, and comes first, where `Attention` turns channels.
Keys and values must be of one size there, so the narrower ones are padded with zeros, which add
nothing to a score and nothing to an output. Nothing is lost but the small cache.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.convert.linear import linear_of, numbers_of
from regard.layers.attention import Attention
from regard.layers.construct import normed
from regard.layers.latent import MultiHeadLatentAttention

Numbers = tuple[Tensor, Tensor | None]  # a weight and a bias


class LowRank(nn.Module):
    """A projection through something narrow: down, a norm of its first channels, and up.

    `down` and `norm` may be shared with others, as MLA's keys and values share theirs.
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
    """The same attention as MHA of `max(qk_head_dim, v_head_dim)` channels a head, exactly.

    Where latents are not normed, projections are multiplied out into plain linear layers; where
    they are, they stay in two steps (`LowRank`) and share the layer's parameters.

    Raises:
        ValueError: if a projection is not a plain linear layer.

    >>> from regard import Causal, Rotary
    >>> mla = MultiHeadLatentAttention(16, 2, kv_lora_rank=6, qk_nope_head_dim=5, rope=Rotary(4),
    ...     qk_rope_head_dim=4, v_head_dim=3, mask=Causal())
    >>> mha, x = expand(mla), torch.randn(1, 7, 16)
    >>> mha.kind, mha.head_dim, torch.allclose(mha(x), mla(x), atol=1e-5)
    ('MHA', 9, True)
    """
    dim = max(layer.qk_head_dim, layer.v_head_dim)
    children = {
        "q_proj": _queries(layer, dim),
        "k_proj": _through_latent(layer, _key_rows(layer, dim)),
        "v_proj": _through_latent(layer, _value_rows(layer, dim)),
        "o_proj": _output(layer, dim),
    }
    with torch.device("meta"):  # all of it is replaced
        mha = Attention(
            layer.hidden_size,
            layer.num_heads,
            head_dim=dim,
            bias={
                name for name, child in children.items() if getattr(child, "bias", None) is not None
            },
            dropout=layer.dropout,
            rope=layer.rope,
            mask=layer.mask,
            scale=layer.scale,
            score_bias=layer.score_bias,
            backend=layer.backend,
            precision=layer.precision,
        )
    for name, child in children.items():
        setattr(mha, name, child)
    return mha.train(layer.training)


def _queries(layer: MultiHeadLatentAttention, dim: int) -> nn.Module:
    name = "q_proj" if layer.q_lora_rank is None else "q_b_proj"
    weight, bias = numbers_of(layer, name)

    def arranged(rows: Tensor) -> Tensor:
        nope, rotary = rows.unflatten(0, (layer.num_heads, -1)).split(
            [layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=1
        )
        return _padded(torch.cat([rotary, nope], dim=1), dim)

    up = arranged(weight), None if bias is None else arranged(bias)
    if layer.q_lora_rank is None:
        return linear_of(*up)
    return _composed(layer, "q_a_proj", "q_a_layernorm", layer.q_lora_rank, up)


def _key_rows(layer: MultiHeadLatentAttention, dim: int) -> Numbers:
    """Up from the latent and the rotary key, joined: `[H * dim, R + Dr]`."""
    weight, bias = numbers_of(layer, "kv_b_proj")
    heads, width = layer.num_heads, layer.qk_rope_head_dim
    nope = weight.unflatten(0, (heads, -1))[:, : layer.qk_nope_head_dim]
    rotary = torch.eye(width, dtype=weight.dtype, device=weight.device).expand(heads, -1, -1)
    rows = torch.cat(
        [
            torch.cat([weight.new_zeros(heads, width, layer.kv_lora_rank), rotary], dim=2),
            torch.cat([nope, weight.new_zeros(*nope.shape[:2], width)], dim=2),
        ],
        dim=1,
    )
    if bias is None:
        return _padded(rows, dim), None
    offsets = bias.unflatten(0, (heads, -1))[:, : layer.qk_nope_head_dim]
    return _padded(rows, dim), _padded(torch.cat([bias.new_zeros(heads, width), offsets], 1), dim)


def _value_rows(layer: MultiHeadLatentAttention, dim: int) -> Numbers:
    """Likewise: nothing of the rotary key goes into values."""
    weight, bias = numbers_of(layer, "kv_b_proj")

    def values(rows: Tensor) -> Tensor:
        return _padded(rows.unflatten(0, (layer.num_heads, -1))[:, layer.qk_nope_head_dim :], dim)

    rows = values(weight)
    wide = torch.cat([rows, rows.new_zeros(len(rows), layer.qk_rope_head_dim)], dim=1)
    return wide, None if bias is None else values(bias)


def _through_latent(layer: MultiHeadLatentAttention, up: Numbers) -> nn.Module:
    return _composed(layer, "kv_a_proj_with_mqa", "kv_a_layernorm", layer.kv_lora_rank, up)


def _composed(
    layer: MultiHeadLatentAttention, down: str, norm: str, width: int, up: Numbers
) -> nn.Module:
    """Up after down: one linear layer where nothing stands between, the two of them where a norm
    does."""
    between = layer.get_submodule(norm)
    if not isinstance(between, nn.Identity):
        return LowRank(layer.get_submodule(down), between, width, linear_of(*up))
    (weight, bias), (rows, offset) = numbers_of(layer, down), up
    product = (rows.double() @ weight.double()).to(weight.dtype)
    if bias is None:
        return linear_of(product, offset)
    through = rows.double() @ bias.double()
    whole = through if offset is None else through + offset
    return linear_of(product, whole.to(weight.dtype))


def _output(layer: MultiHeadLatentAttention, dim: int) -> nn.Module:
    if dim == layer.v_head_dim:
        return layer.o_proj
    weight, bias = numbers_of(layer, "o_proj")
    columns = weight.mT.unflatten(0, (layer.num_heads, layer.v_head_dim))
    return linear_of(_padded(columns, dim).mT.contiguous(), bias)


def _padded(heads: Float[Tensor, "H D *I"], dim: int) -> Float[Tensor, "HD *I"]:
    """Every head with zeros after its own rows, up to `dim` of them, one after the other."""
    missing = dim - heads.shape[1]
    zeros = heads.new_zeros(heads.shape[0], missing, *heads.shape[2:])
    return torch.cat([heads, zeros], dim=1).flatten(0, 1)
