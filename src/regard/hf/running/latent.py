"""The forward of an MLA module: cached are the latent and the rotary key; decoding absorbs.

regard's caches hold the two joined, as one stream. transformers' own hold them in two slots; then
the rotary product is a bias on the scores of the latents, and nothing is joined or copied.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.cache import Part
from regard.constants import accumulating_dtype
from regard.heads import merge_heads
from regard.hf.running.calls import (
    Made,
    appended,
    arrive,
    attended,
    described,
    made_of,
    number_of_keys,
    one_part,
    options_of,
    sharded_cache,
    visible_in,
)
from regard.hf.running.masks import Visible
from regard.layers.cache_use import announce_pieces
from regard.layers.latent_forms import Form, absorb_queries, choose_form, project_latent


class Read(NamedTuple):
    """Queries, the parts they attend to, and what is added to their scores."""

    q: Tensor
    made: Made
    bias: Tensor | None = None


def forward(self: Any, hidden_states: Float[Tensor, "B L E"], *args: Any, **given: Any) -> Any:
    """What a DeepSeek module's own forward computes, in the form that is less work."""
    family, given = arrive(self, args, given)
    q_nope, q_rope, latent, k_rope = project_latent(self, hidden_states)
    angles = given["position_embeddings"]  # a placed layer passes positions here
    q_rope, k_rope = (family.rotate(self, x, angles) for x in (q_rope, k_rope))
    if getattr(self, "head_split", None) is not None:  # each rank reads both for its heads
        joined = self.head_split.shared(torch.cat([latent, k_rope], dim=-1))
        latent, k_rope = joined.split([latent.shape[-1], k_rope.shape[-1]], dim=-1)
    cache: Any = given.get(family.cache)
    if hasattr(cache, "append"):
        held = cache.layers[self.layer_idx].cache
        announce_pieces(held, self.kv_lora_rank, self.qk_rope_head_dim)
    parts = _stored(cache, self.layer_idx, latent, k_rope)
    sharded = sharded_cache(cache, self)
    keys = number_of_keys(parts, sharded)
    at = visible_in(family, self, given, q_rope.shape[2], keys)
    form, _ = choose_form(self, at.span)
    options = options_of(family, self)
    q, made, bias = _read(self, form, q_nope, q_rope, parts, at, options["scale"], sharded)
    options["v_head_dim"] = self.kv_lora_rank
    call = described(q, made.first, at, bias=bias, sharded=sharded, **options)
    heads, weights = attended(call, q, made.parts, given, sharded=sharded, sinks=options["sinks"])
    return family.output(self, merge_heads(form.read(self, heads))), weights


def _stored(cache: Any, layer: int, latent: Tensor, k_rope: Tensor) -> tuple[Part, ...]:
    """All latents and rotary keys, with the new ones: joined in regard's caches, else apart."""
    if hasattr(cache, "append"):
        announce_pieces(cache.layers[layer].cache, latent.shape[-1], k_rope.shape[-1])
        return appended(cache, layer, torch.cat([latent, k_rope], dim=-1))
    if cache is not None:
        return appended(cache, layer, latent, k_rope)
    return one_part(latent, k_rope)


def _read(
    module: Any,
    form: Form,
    q_nope: Tensor,
    q_rope: Tensor,
    parts: tuple[Part, ...],
    at: Visible,
    scale: float,
    sharded: Any,
) -> Read:
    if (make := form.make(module)) is not None:
        return Read(form.queries(module, q_nope, q_rope), made_of(parts, at, make, sharded))
    if len(parts[0].streams) == 1:
        return Read(form.queries(module, q_nope, q_rope), Made(parts, parts))
    latent, k_rope = parts[0].streams
    wide = absorb_queries(module, q_nope, q_rope[..., :0])
    dtype = accumulating_dtype(q_rope.dtype)
    bias = (q_rope.to(dtype) * scale) @ k_rope.to(dtype).mT
    whole = one_part(latent)
    return Read(wide, Made(whole, whole), bias)
