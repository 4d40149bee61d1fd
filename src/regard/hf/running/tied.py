"""The forward of a module whose keys are its values, scaled and partly rotated (Gemma 4).

regard's caches hold one stream: the values and the rotated channels of the keys. Without a cache,
and with transformers' own, keys and values are two.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from regard.cache.stored import Stored
from regard.hf.running import heads
from regard.hf.running.calls import (
    appended,
    arrive,
    attended,
    attending_cache,
    described,
    keys_made_of,
    number_of_keys,
    of_one_dtype,
    options_of,
    visible_in,
)
from regard.layers.forms.tied_kv import TiedKeys


def forward(self: Any, hidden_states: Float[Tensor, "B L E"], *args: Any, **given: Any) -> Any:
    """What a module's own forward computes, over one stream for each key head."""
    family, given = arrive(self, args, given)
    cache: Any = given.get(family.cache)
    if not hasattr(cache, "append"):
        return heads.forward(self, hidden_states, **given)
    tied = TiedKeys(self.k_norm.weight, family.tied(self))
    q, k, v = family.project.both(self, hidden_states)
    angles = given["position_embeddings"]
    q, k = family.rotate(self, q, angles), family.rotate(self, k, angles)
    q, k, v = of_one_dtype(q, k, v)
    held = cache.layers[self.layer_idx].cache
    if isinstance(held, Stored):
        held.pieces = tied.pieces
    parts = appended(cache, self.layer_idx, tied.join(v, k))
    attending = attending_cache(cache, self)
    keys = number_of_keys(parts, attending)
    at = visible_in(family, self, given, q.shape[2], keys)
    q, made = tied.read(q, parts, lambda parts: keys_made_of(parts, at, tied.rebuild, attending))
    options = options_of(family, self)
    call = described(q, made, at, attending=attending, **options)
    out, weights = attended(call, q, made, given, attending=attending, sinks=options["sinks"])
    return heads.output_of(family, self, hidden_states, out), weights
