"""The forward of an MLA module: cached are the latent and the rotary key; decoding absorbs.

regard's caches hold the two joined, as one stream. transformers' own hold them in two slots; then
the rotary product is a bias on the scores of the latents, and nothing is joined or copied.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.constants import accumulating_dtype
from regard.heads import merge_heads
from regard.hf.running.calls import (
    CachedKeys,
    appended,
    arrive,
    attended,
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
    streams: tuple[Tensor, ...] = latent, k_rope  # transformers' caches hold them in two slots
    if hasattr(cache, "append"):
        streams = (torch.cat(streams, dim=-1),)
    stored = appended(cache, self, *streams, pieces=(latent.shape[-1], k_rope.shape[-1]))
    at = visible_in(family, self, given, q_rope.shape[2], stored.num_keys)
    form, options = choose_form(self, at.span), options_of(family, self)
    q, keys, bias = _read(form, q_nope, q_rope, stored, at, options["scale"])
    options |= {"attending": stored.attending, "bias": bias}
    heads, weights, _ = attended(q, keys, at, given, **options)
    heads = family.gate(self, hidden_states, form.output(heads))
    return family.output(self, merge_heads(heads)), weights


def _read(
    form: Form, q_nope: Tensor, q_rope: Tensor, stored: CachedKeys, at: Visible, scale: float
) -> Read:
    if isinstance(form, Expanded):
        return Read(form.queries(q_nope, q_rope), stored.rebuilt(at, form.rebuild))
    rank, parts = form.layer.kv_lora_rank, stored.parts
    if len(parts[0].streams) == 1:
        return Read(form.queries(q_nope, q_rope), Keys.of(parts, rank))
    latent, k_rope = parts[0].streams
    wide = form.queries(q_nope, q_rope[..., :0])
    dtype = accumulating_dtype(q_rope.dtype)
    bias = (q_rope.to(dtype) * scale) @ k_rope.to(dtype).mT
    return Read(wide, Keys.of(CachedKeys.of(latent).parts, rank), bias)
