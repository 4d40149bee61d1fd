"""The two forms of MLA: expanded to the keys and values of every head, or absorbed.

These are functions of any module with MLA's sizes and children under their usual names: a layer of
regard, or transformers' modules.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.cache import Part
from regard.heads import split_heads
from regard.layers.construct import local_objection, matrix_of, normed
from regard.masks import Span
from regard.ops.parts import Make


@runtime_checkable
class Latent(Protocol):
    """The attributes of an MLA module that the forms read."""

    num_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    qk_head_dim: int
    v_head_dim: int
    kv_b_proj: nn.Module


class Form(NamedTuple):
    """The functions that make up a form.

    The streams of a part are latents and rotary keys, concatenated or separate; `outline` and
    `parts` of `ABSORBED` take them concatenated.

    Attributes:
        queries: queries as this form scores them, of `q_nope` and rotated `q_rope`.
        outline: tensors with the shapes that keys and values will have.
        parts: keys and values of the cached parts.
        read: the outputs of the heads, of what attention returned.
    """

    name: str
    queries: Callable[[Any, Tensor, Tensor], Tensor]
    outline: Callable[[Any, Tensor], tuple[Tensor, Tensor]]
    parts: Callable[[Any, tuple[Part, ...]], tuple[Part, ...]]
    read: Callable[[Any, Tensor], Tensor]

    def make(self, layer: Any) -> Make | None:
        """What makes keys and values of parts; None where attention reads them as they are."""
        return None if self.name == "absorbed" else partial(self.parts, layer)


def project_latent(layer: Any, x: Float[Tensor, "B L E"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries of every head in two pieces, one latent `[B, 1, L, R]` and one rotary key
    `[B, 1, L, Dr]` for all of them; before rotation."""
    if layer.q_lora_rank is None:
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


_THIN = 8  # tokens: overhead of absorbing in half precision, as if there were 8 queries more


def choose_form(layer: Any, span: Span, asked: str = "auto") -> tuple[Form, str]:
    """The form for these numbers of queries and keys, and why.

    Raises:
        ValueError: if `"absorbed"` is asked for and `kv_b_proj` is not a plain linear map.
    """
    objection = absorption_objection(layer)
    if asked == "absorbed" and objection is not None:
        raise ValueError(
            f"form='absorbed' reads kv_b_proj.weight, but {objection}; use form='auto'"
        )
    if asked != "auto":
        return FORMS[asked], "asked for"
    if objection is not None:
        return EXPANDED, objection
    if torch.compiler.is_exporting():
        return EXPANDED, "an exported program serves every length"
    queries, keys = span.num_queries, span.num_keys
    rank, nope, rotary = layer.kv_lora_rank, layer.qk_nope_head_dim, layer.qk_rope_head_dim
    both = nope + layer.v_head_dim
    expanded = keys * rank * both + queries * keys * (both + rotary)
    thin = _THIN if layer.kv_b_proj.weight.dtype.itemsize < 4 else 0
    absorbed = (queries + thin) * rank * both + queries * keys * (2 * rank + rotary)
    if absorbed <= 1.05 * expanded:
        return (
            ABSORBED,
            "for so few queries, attention to the latents is less work than rebuilding the keys",
        )
    return (
        EXPANDED,
        "for so many queries, rebuilding the keys is less work than attention to the latents",
    )


def absorption_objection(layer: Any) -> str | None:
    """Why `kv_b_proj` cannot be read as a matrix; None if it can."""
    up = layer.kv_b_proj
    if (objection := local_objection(up)) is not None:
        return f"kv_b_proj {objection}"
    if type(matrix_of(up)) not in (nn.Parameter, Tensor) or up.bias is not None:
        return "kv_b_proj.weight is not a full tensor, or has a bias"
    return None


def up_weights(layer: Any) -> tuple[Tensor, Tensor]:
    """`kv_b_proj` as matrices of each head: keys `[H, Dn, R]` and values `[H, Dv, R]`."""
    weight = matrix_of(layer.kv_b_proj)  # under functional_call this is a tensor, no parameter
    keys, values = weight.unflatten(0, (_local_heads(layer), -1)).split(
        [layer.qk_nope_head_dim, layer.v_head_dim], dim=1
    )
    return keys, values


def _local_heads(layer: Any) -> int:
    """Heads that a module computes here: all, or those of this rank."""
    split = getattr(layer, "head_split", None)  # transformers' modules have none
    heads: int = layer.num_heads if split is None else split.local_heads
    return heads


def _expand_queries(layer: Latent, q_nope: Tensor, q_rope: Tensor) -> Tensor:
    return torch.cat([q_nope, q_rope], dim=-1)


def _expand_outline(layer: Latent, joined: Tensor) -> tuple[Tensor, Tensor]:
    """Placeholders with the shapes of the keys and values: their elements are never read."""
    batch, _, length, _ = joined.shape
    like = joined[:, :, :, :1].expand(batch, _local_heads(layer), length, 1)
    return like.expand(-1, -1, -1, layer.qk_head_dim), like.expand(-1, -1, -1, layer.v_head_dim)


def _expand_parts(layer: Latent, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The keys and values of every head, as in MHA."""
    rebuilt = []
    for start, stop, streams in parts:
        latent, k_rope = separate(layer, streams)
        heads = split_heads(
            layer.kv_b_proj(latent.squeeze(1)), layer.qk_nope_head_dim + layer.v_head_dim
        )
        k_nope, v = heads.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=-1)
        k_rope = k_rope.expand(-1, k_nope.shape[1], -1, -1).to(k_nope.dtype)
        rebuilt.append(Part(start, stop, (torch.cat([k_nope, k_rope], dim=-1), v)))
    return tuple(rebuilt)


def separate(layer: Latent, streams: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Latents and rotary keys, which may be stored in one stream or two."""
    if len(streams) == 2:
        return streams[0], streams[1]
    latent, k_rope = streams[0].split([layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
    return latent, k_rope


def absorb_queries(layer: Latent, q_nope: Tensor, q_rope: Tensor) -> Tensor:
    """Apply the up-projection of the keys to the queries, whose products with latents are then
    scores: `[B, H, L, Dn] -> [B, H, L, R + Dr]`."""
    rows = q_nope.transpose(0, 1)  # heads first and the batch as rows, so that no weight is copied
    wide = rows.flatten(1, 2) @ up_weights(layer)[0]
    return torch.cat([wide.unflatten(1, rows.shape[1:3]).transpose(0, 1), q_rope], dim=-1)


def _absorb_outline(layer: Latent, joined: Tensor) -> tuple[Tensor, Tensor]:
    return joined, joined[..., : layer.kv_lora_rank]


def _absorb_read(layer: Latent, out: Tensor) -> Tensor:
    """Apply the up-projection of the values to the outputs: `[B, H, L, R] -> [B, H, L, Dv]`."""
    rows = out.transpose(0, 1)
    heads = (up_weights(layer)[1] @ rows.flatten(1, 2).mT).mT
    return heads.unflatten(1, rows.shape[1:3]).transpose(0, 1)


EXPANDED = Form("expanded", _expand_queries, _expand_outline, _expand_parts, lambda layer, out: out)
ABSORBED = Form(
    "absorbed", absorb_queries, _absorb_outline, lambda layer, parts: parts, _absorb_read
)
FORMS = {"expanded": EXPANDED, "absorbed": ABSORBED}
