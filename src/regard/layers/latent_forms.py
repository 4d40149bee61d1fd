"""The two forms of MLA: expanded to the keys and values of every head, or absorbed.

A form belongs to any module with MLA's sizes and children under their usual names: a layer of
regard, or transformers' modules.
"""

from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.cache import Part
from regard.heads import split_heads
from regard.layers.attending import Keys, rebuild
from regard.layers.construct import normed
from regard.layers.inputs import Arrival
from regard.masks import Span
from regard.matrices import has_products, matrix_of, multiply, product_objection


@runtime_checkable
class Latent(Protocol):
    """The attributes of an MLA module that the forms read."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    qk_head_dim: int
    v_head_dim: int
    kv_b_proj: nn.Module


class Projections(Latent, Protocol):
    """The linear layers and norms of an MLA module, which has `q_proj` or, of a low rank, the three
    `q_a_proj`, `q_a_layernorm` and `q_b_proj`."""

    _modules: dict[str, nn.Module | None]
    q_proj: nn.Module
    q_a_proj: nn.Module
    q_a_layernorm: nn.Module
    q_b_proj: nn.Module
    kv_a_proj_with_mqa: nn.Module
    kv_a_layernorm: nn.Module


class Expanded(NamedTuple):
    """MLA as MHA: the keys and values of every head are rebuilt from the latents."""

    layer: Latent
    why: str  # the reason for this form, in words
    name: str = "expanded"

    def queries(self, q_nope: Tensor, q_rope: Tensor) -> Float[Tensor, "B H L D"]:
        """Queries of `qk_nope_head_dim + qk_rope_head_dim` channels."""
        return torch.cat([q_nope, q_rope], dim=-1)

    def keys(self, parts: tuple[Part, ...], at: Arrival) -> Keys:
        """The keys and values of every head, rebuilt when they are read."""
        return rebuild(parts, at, self.rebuild)

    def rebuild(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """The keys and values of every head, of latents and rotary keys in one stream or two."""
        layer, found = self.layer, []
        sizes = [layer.qk_nope_head_dim, layer.v_head_dim]
        for start, stop, streams in parts:
            if len(streams) == 1:
                streams = streams[0].split([layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
            latent, k_rope = streams
            heads = split_heads(layer.kv_b_proj(latent.squeeze(1)), sum(sizes))
            k_nope, v = heads.split(sizes, dim=-1)
            k_rope = k_rope.expand(-1, k_nope.shape[1], -1, -1).to(k_nope.dtype)
            found.append(Part(start, stop, (torch.cat([k_nope, k_rope], dim=-1), v)))
        return tuple(found)

    def output(self, out: Tensor) -> Float[Tensor, "B H L Dv"]:
        """The outputs of the heads: the result of attention itself, since values were rebuilt."""
        return out


class Absorbed(NamedTuple):
    """MLA as MQA: one wide key head of latent and rotary key; its first columns are the values."""

    layer: Latent
    why: str
    name: str = "absorbed"

    def queries(self, q_nope: Tensor, q_rope: Tensor) -> Float[Tensor, "B H L RDr"]:
        """Queries whose products with latents are scores: `kv_b_proj` of the keys is applied."""
        rows = q_nope.transpose(0, 1)  # heads first and the batch as rows: no weight is copied
        wide = multiply(rows.flatten(1, 2), up_weights(self.layer)[0])
        return torch.cat([wide.unflatten(1, rows.shape[1:3]).transpose(0, 1), q_rope], dim=-1)

    def keys(self, parts: tuple[Part, ...], at: Arrival) -> Keys:
        """The latents and rotary keys as they are stored, in one stream."""
        return Keys.of(parts, v_head_dim=self.layer.kv_lora_rank)

    def output(self, out: Float[Tensor, "B H L R"]) -> Float[Tensor, "B H L Dv"]:
        """The outputs of the heads, of latents: `kv_b_proj` of the values is applied."""
        rows = out.transpose(0, 1)
        heads = multiply(up_weights(self.layer)[1], rows.flatten(1, 2).mT).mT
        # without products in its dtype, o_proj takes longer for rows that are strided
        return heads.contiguous().unflatten(1, rows.shape[1:3]).transpose(0, 1)


Form = Expanded | Absorbed
FORMS: dict[str, type[Form]] = {"expanded": Expanded, "absorbed": Absorbed}
# Times as long: a product that rebuilds keys in a dtype without products, to one that absorbs a
# query in float32.
_LOOPED = 4
_THIN = 8  # tokens: overhead of absorbing in half precision, as if there were 8 queries more


def project_latent(
    module: Latent, x: Float[Tensor, "B L E"]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries of every head in two pieces, one latent `[B, 1, L, R]` and one rotary key
    `[B, 1, L, Dr]` for all of them; before rotation."""
    layer = cast(Projections, module)
    if layer._modules.get("q_proj") is not None:
        q = layer.q_proj(x)
    else:
        q = layer.q_b_proj(normed(layer.q_a_layernorm, layer.q_a_proj(x)))
    q_nope, q_rope = split_heads(q, layer.qk_head_dim).split(
        [layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1
    )
    latent, k_rope = (
        layer.kv_a_proj_with_mqa(x)
        .unsqueeze(1)
        .split([layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
    )
    return q_nope, q_rope, normed(layer.kv_a_layernorm, latent), k_rope


def choose_form(layer: Latent, span: Span, asked: str = "auto") -> Form:
    """The form for these numbers of queries and keys, which says why.

    Raises:
        ValueError: if `"absorbed"` is asked for and `kv_b_proj` is not a plain linear map.
    """
    objection = absorption_objection(layer.kv_b_proj)
    if asked == "absorbed" and objection is not None:
        raise ValueError(
            f"form='absorbed' reads kv_b_proj.weight, but {objection}; use form='auto'"
        )
    if asked != "auto":
        return FORMS[asked](layer, "asked for")
    if objection is not None:
        return Expanded(layer, objection)
    if torch.compiler.is_exporting():
        return Expanded(layer, "an exported program serves every length")
    queries, keys = span.num_queries, span.num_keys
    rank, nope, rotary = layer.kv_lora_rank, layer.qk_nope_head_dim, layer.qk_rope_head_dim
    both = nope + layer.v_head_dim
    weight = matrix_of(layer.kv_b_proj)
    looped = 1 if has_products(weight) else _LOOPED
    expanded = looped * keys * rank * both + queries * keys * (both + rotary)
    thin = _THIN if weight.dtype.itemsize < 4 and looped == 1 else 0
    absorbed = (queries + thin) * rank * both + queries * keys * (2 * rank + rotary)
    if absorbed <= 1.05 * expanded:
        return Absorbed(
            layer,
            "for so few queries, attention to the latents is less work than rebuilding the keys",
        )
    return Expanded(
        layer,
        "for so many queries, rebuilding the keys is less work than attention to the latents",
    )


def absorption_objection(up: nn.Module) -> str | None:
    """Why the module `kv_b_proj` cannot be read as a matrix; None if it can."""
    if (objection := product_objection(up)) is not None:
        return f"kv_b_proj {objection}"
    if type(matrix_of(up)) not in (nn.Parameter, Tensor) or up.bias is not None:
        return "kv_b_proj.weight is not a full tensor, or has a bias"
    return None


def up_weights(layer: Latent) -> tuple[Tensor, Tensor]:
    """`kv_b_proj` as matrices of each head: keys `[H, Dn, R]` and values `[H, Dv, R]`."""
    weight = matrix_of(layer.kv_b_proj)  # under functional_call this is a tensor, no parameter
    sizes = [layer.qk_nope_head_dim, layer.v_head_dim]
    keys, values = weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
    return keys, values
