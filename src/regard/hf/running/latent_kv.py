"""The forward of a placed `LatentKVAttention`: cached is a joint latent of keys and values.

Keys are rebuilt, normed and rotated when they are read. regard's caches hold the latent and its
positions, exactly. transformers' own hold the latent where keys go and nothing where values go;
positions are then counted from the slots.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.heads import merge_heads
from regard.hf.running.calls import (
    CachedKeys,
    appended,
    arrive,
    attended,
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
    stored = _stored(cache, self, latent, positions)
    at = visible_in(family, self, given, q.shape[2], stored.num_keys)
    keys, options = stored.rebuilt(at, self.rebuild), options_of(family, self)
    options |= {"attending": stored.attending}
    heads, weights, _ = attended(q, keys, at, given, **options)
    return family.output(self, merge_heads(heads)), weights


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
