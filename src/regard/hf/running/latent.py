"""The forwards of modules that cache a latent of all heads: MLA, and a placed `LatentKVAttention`.

Of MLA, regard's caches hold the latent and the rotary key joined, as one stream. transformers' own
hold them in two slots; then the rotary product is a bias on the scores of the latents, and nothing
is joined or copied.

Of a joint latent of keys and values, keys are rebuilt, normed and rotated when they are read.
regard's caches hold the latent and its positions, exactly. transformers' own hold the latent where
keys go and nothing where values go; positions are then counted from the slots.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.constants import accumulating_dtype
from regard.heads import merge_heads
from regard.hf.families.table import Family
from regard.hf.running import latent_steps
from regard.hf.running.calls import (
    CachedKeys,
    appended,
    arrive,
    attended,
    options_of,
    positions_of_queries,
    scaler_of,
    visible_in,
)
from regard.hf.running.masks import Visible
from regard.layers.attending import Keys
from regard.layers.construct import normed_heads
from regard.layers.inputs import check_int32
from regard.layers.latent_forms import Expanded, Form, choose_form, project_latent
from regard.layers.latent_kv import as_stream


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
) -> tuple[Tensor, Keys, Tensor | None]:
    """Queries, the keys they attend to, and what is added to their scores."""
    if isinstance(form, Expanded):
        return form.queries(q_nope, q_rope), stored.rebuilt(at, form.rebuild), None
    rank, parts = form.layer.kv_lora_rank, stored.parts
    if len(parts[0].streams) == 1:
        return form.queries(q_nope, q_rope), Keys.of(parts, rank), None
    latent, k_rope = parts[0].streams
    dtype = accumulating_dtype(q_rope.dtype)
    bias = (q_rope.to(dtype) * scale) @ k_rope.to(dtype).mT
    keys = Keys.of(CachedKeys.of(latent).parts, rank)
    return form.queries(q_nope, q_rope[..., :0]), keys, bias


def forward_joint(self: Any, x: Float[Tensor, "B L E"], *args: Any, **given: Any) -> Any:
    """Attention over latents, called as transformers calls its attention."""
    family, given = arrive(self, args, given)
    merged, weights = merged_joint(family, self, x, (self.q_proj(x), self.kv_a_proj(x)), given)
    return family.output(self, merged), weights


def merged_joint(
    family: Family,
    self: Any,
    x: Float[Tensor, "B L E"],
    projected: tuple[Tensor, ...],
    given: Mapping[str, Any],
) -> tuple[Float[Tensor, "B L HD"], Tensor | None]:
    """The outputs of all heads, merged, of projected queries `[B, L, H D]` and latents; and the
    weights if the caller wants them."""
    if (out := latent_steps.repeated(family, self, x, projected, given)) is not None:
        return out, None
    (q, latent), cache, positions = projected, given.get(family.cache), given.get("position_ids")
    check_int32(positions)
    positions = positions_of_queries(x, positions, cache, self.layer_idx).to(torch.int32)
    q = normed_heads(self.q_norm, q, self.head_dim, width=self.norm_width)
    q = family.rotate(self, q, positions)
    stored = _stored(cache, self, latent, positions)
    at = visible_in(family, self, given, q.shape[2], stored.num_keys)
    form, options = self.choose(q.shape[2], stored.attending), options_of(family, self)
    options |= {"attending": stored.attending}
    heads, weights, call = attended(q, stored.rebuilt(at, form.rebuild), at, given, **options)
    latent_steps.record(family, self, x, given, call)
    return merge_heads(form.output(heads)), weights


def _stored(
    cache: Any, module: Any, latent: Float[Tensor, "B L R"], positions: Int[Tensor, "*B L"]
) -> CachedKeys:
    """All latents and their positions, with those of these tokens."""
    latent, rows = latent.unsqueeze(1), latent.shape[0]
    if hasattr(cache, "append"):
        return appended(cache, module, latent, as_stream(positions, rows))
    if cache is not None:
        positions = _positions_of_keys(positions, cache, module.layer_idx)
        latent, _ = cache.update(latent, latent[..., :0], module.layer_idx)
    return CachedKeys.of(latent, as_stream(positions, rows))


def _positions_of_keys(
    queries: Int[Tensor, "*B L"], cache: Any, layer: int | None
) -> Int[Tensor, "*B S"]:
    """The positions of the keys that a cache of transformers returns once these tokens are in it.

    Such a cache has slots, not positions. New keys have the positions of their queries. An older
    key is as far before the first query as its slot is: exact where positions go up by one.
    """
    new = queries.shape[-1]
    held, first = cache.get_mask_sizes(new, layer)
    after = torch.arange(held, device=queries.device) + first - cache.get_seq_length(layer)
    own = queries[:, after.clamp(0, new - 1)]
    return torch.where((after >= 0) & (after < new), own, queries[:, :1] + after)
