"""The forward of an MLA module: cached are the latent and the rotary key; decoding absorbs.

regard's caches hold the two joined, as one stream. transformers' own hold them in two slots; then
the rotary product is a bias on the scores of the latents, and nothing is joined or copied.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.cache import Part
from regard.cache.stored import Stored
from regard.constants import accumulating_dtype
from regard.heads import merge_heads
from regard.hf.running.calls import (
    appended,
    arrive,
    attended,
    attending_cache,
    described,
    keys_made_of,
    number_of_keys,
    one_part,
    options_of,
    scaler_of,
    visible_in,
)
from regard.hf.running.masks import Visible
from regard.layers.attending import Keys
from regard.layers.latent_forms import Expanded, Form, choose_form, project_latent


class Read(NamedTuple):
    """Queries, the keys they attend to, and what is added to their scores."""

    q: Tensor
    keys: Keys
    bias: Tensor | None = None


def forward(self: Any, hidden_states: Float[Tensor, "B L E"], *args: Any, **given: Any) -> Any:
    """What a DeepSeek module's own forward computes, in the form that is less work."""
    family, given = arrive(self, args, given)
    q_nope, q_rope, latent, k_rope = project_latent(self, hidden_states)
    angles = given.get("position_embeddings")  # a placed layer passes positions here
    q_nope, q_rope = map(scaler_of(family, self, hidden_states, given), (q_nope, q_rope))
    q_rope, k_rope = (family.rotate(self, x, angles) for x in (q_rope, k_rope))
    if getattr(self, "head_split", None) is not None:  # each rank reads both for its heads
        joined = self.head_split.shared(torch.cat([latent, k_rope], dim=-1))
        latent, k_rope = joined.split([latent.shape[-1], k_rope.shape[-1]], dim=-1)
    cache: Any = given.get(family.cache)
    parts = _stored(cache, self.layer_idx, latent, k_rope)
    attending = attending_cache(cache, self)
    keys = number_of_keys(parts, attending)
    at = visible_in(family, self, given, q_rope.shape[2], keys)
    form, options = choose_form(self, at.span), options_of(family, self)
    q, made, bias = _read(form, q_nope, q_rope, parts, at, options["scale"], attending)
    call = described(q, made, at, bias=bias, attending=attending, **options)
    heads, weights = attended(call, q, made, given, attending=attending, sinks=options["sinks"])
    heads = family.gate(self, hidden_states, form.output(heads))
    return family.output(self, merge_heads(heads)), weights


def _stored(cache: Any, layer: int, latent: Tensor, k_rope: Tensor) -> tuple[Part, ...]:
    """All latents and rotary keys, with the new ones: joined in regard's caches, else apart."""
    if hasattr(cache, "append"):
        held = cache.layers[layer].cache
        if isinstance(held, Stored):
            held.pieces = latent.shape[-1], k_rope.shape[-1]
        return appended(cache, layer, torch.cat([latent, k_rope], dim=-1))
    if cache is not None:
        return appended(cache, layer, latent, k_rope)
    return one_part(latent, k_rope)


def _read(
    form: Form,
    q_nope: Tensor,
    q_rope: Tensor,
    parts: tuple[Part, ...],
    at: Visible,
    scale: float,
    attending: Any,
) -> Read:
    if isinstance(form, Expanded):
        return Read(form.queries(q_nope, q_rope), keys_made_of(parts, at, form.rebuild, attending))
    rank = form.layer.kv_lora_rank
    if len(parts[0].streams) == 1:
        return Read(form.queries(q_nope, q_rope), Keys.of(parts, rank))
    latent, k_rope = parts[0].streams
    wide = form.queries(q_nope, q_rope[..., :0])
    dtype = accumulating_dtype(q_rope.dtype)
    bias = (q_rope.to(dtype) * scale) @ k_rope.to(dtype).mT
    return Read(wide, Keys.of(one_part(latent), rank), bias)
