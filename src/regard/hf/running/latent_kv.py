"""The forward of a placed `LatentKVAttention`: cached is a joint latent of keys and values.

Keys are rebuilt, normed and rotated when they are read. regard's caches hold the latent and its
positions, exactly. transformers' own hold the latent where keys go and nothing where values go;
positions are then counted from the slots.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.cache import Part
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
    positions_of_queries,
    visible_in,
)
from regard.layers.inputs import check_int32
from regard.layers.latent_kv import as_stream


def forward(self: Any, hidden_states: Float[Tensor, "B L E"], *args: Any, **given: Any) -> Any:
    """Attention over latents, called as transformers calls its attention."""
    family, given = arrive(self, args, given)
    cache, positions = given.get(family.cache), given.get("position_ids")
    check_int32(positions)
    positions = positions_of_queries(hidden_states, positions, cache, self.layer_idx)
    positions = positions.to(torch.int32)
    q = family.rotate(self, self.queries(hidden_states), positions)
    latent = self.kv_a_proj(hidden_states)
    parts = _stored(cache, self.layer_idx, latent, positions)
    attending = attending_cache(cache, self)
    keys = number_of_keys(parts, attending)
    at = visible_in(family, self, given, q.shape[2], keys)
    made, options = keys_made_of(parts, at, self.rebuild, attending), options_of(family, self)
    call = described(q, made, at, attending=attending, **options)
    heads, weights = attended(call, q, made, given, attending=attending, sinks=options["sinks"])
    return family.output(self, merge_heads(heads)), weights


def _stored(
    cache: Any, layer: int, latent: Float[Tensor, "B L R"], positions: Int[Tensor, "*B L"]
) -> tuple[Part, ...]:
    """All latents and their positions, with those of these tokens."""
    latent = latent.unsqueeze(1)
    if hasattr(cache, "append"):
        return appended(cache, layer, latent, as_stream(positions, latent.shape[0]))
    if cache is not None:
        positions = _positions_of_keys(positions, cache, layer)
        latent, _ = cache.update(latent, latent[..., :0], layer)
    return one_part(latent, as_stream(positions, latent.shape[0]))


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
