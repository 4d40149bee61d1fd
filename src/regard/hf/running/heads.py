"""The forward of a transformers attention module with keys and values for each head.

Its own children project, the model's angles rotate, transformers' caches store; `attend` runs.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from regard.heads import merge_heads
from regard.hf.families.table import Family
from regard.hf.running.calls import (
    CachedKeys,
    appended,
    arrive,
    attended,
    of_one_dtype,
    options_of,
    scaler_of,
    visible_in,
)
from regard.hf.running.steps import Projected, record_step, repeated_step
from regard.layers.attending import Keys
from regard.layers.forms.tied_kv import TiedKeys

SHARED = "shared_kv_states"  # the dictionary that a model passes to each of its layers
# queries, all keys and values they may attend to, and the number of cached keys
Heads = tuple[Tensor, CachedKeys, Any]


def forward(self: Any, hidden_states: Float[Tensor, "B L E"], *args: Any, **given: Any) -> Any:
    """What a module's own forward computes, by `attend`."""
    family, given = arrive(self, args, given)
    projected = None
    if (same := repeated_step(family, self, hidden_states, given)) is not None:
        projected = _projected(family, self, hidden_states, given)
        if (stepped := same.run(family, self, projected, given)) is not None:
            return output_of(family, self, hidden_states, stepped), None
    across = bool(family.context) and given.get(family.context) is not None
    taken, left = family.sharing(self)
    if across:
        q, stored, past = _across(family, self, hidden_states, given)
    elif taken:
        q, stored, past = _taken(family, self, hidden_states, given, taken)
    else:
        projected = projected or _projected(family, self, hidden_states, given)
        q, stored, past = _along(family, self, projected, given)
    if left:
        given[SHARED][left] = stored
    at = visible_in(family, self, given, q.shape[2], stored.num_keys, across=across)
    bias = family.bias(self, given, q.shape[2], stored.num_keys, past)
    options = options_of(family, self) | {"attending": stored.attending, "bias": bias}
    heads, weights, call = attended(q, Keys.of(stored.parts), at, given, **options)
    record_step(family, self, hidden_states, given, call)
    out = output_of(family, self, hidden_states, heads)
    return (out, bias, weights) if family.returns_bias else (out, weights)


def forward_tied(self: Any, hidden_states: Float[Tensor, "B L E"], *args: Any, **given: Any) -> Any:
    """The same of a module whose keys are its values, scaled and partly rotated (Gemma 4).

    regard's caches hold one stream for each key head: the values and the rotated channels of the
    keys. Without a cache, and with transformers' own, keys and values are two.
    """
    family, given = arrive(self, args, given)
    cache = given.get(family.cache)
    if not hasattr(cache, "append"):
        return forward(self, hidden_states, **given)
    tied = TiedKeys(self.k_norm.weight, family.tied(self))
    q, k, v = _rotated(family, self, family.project.both(self, hidden_states), given)
    stored = appended(cache, self, tied.join(v, k), pieces=tied.pieces)
    at = visible_in(family, self, given, q.shape[2], stored.num_keys)
    q, keys = tied.read(q, stored.parts, lambda parts: stored.rebuilt(at, tied.rebuild))
    if left := family.sharing(self)[1]:  # for a model that assists this one
        given[SHARED][left] = CachedKeys(stored.parts, stored.attending, tied.rebuild)
    options = options_of(family, self) | {"attending": stored.attending}
    heads, weights, _ = attended(q, keys, at, given, **options)
    return output_of(family, self, hidden_states, heads), weights


def _projected(family: Family, module: Any, x: Tensor, given: Mapping[str, Any]) -> Projected:
    """Queries, scaled by their positions, which commutes with rotation; keys and values."""
    q, k, v = family.project.both(module, x)
    return scaler_of(family, module, x, given)(q), k, v


def output_of(family: Family, module: Any, x: Tensor, heads: Tensor) -> Tensor:
    """Hidden states from the outputs of the heads."""
    return family.output(module, merge_heads(family.gate(module, x, heads)))


def _rotated(
    family: Family, module: Any, heads: Projected, given: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """Queries and keys rotated by the model's angles; values."""
    q, k, v = heads
    angles = given.get("position_embeddings")
    return of_one_dtype(family.rotate(module, q, angles), family.rotate(module, k, angles), v)


def _along(family: Family, module: Any, heads: Projected, given: Mapping[str, Any]) -> Heads:
    """Self-attention: queries and keys are rotated, then keys and values appended to the cache."""
    q, k, v = _rotated(family, module, heads, given)
    cache: Any = given.get(family.cache)
    cache = getattr(cache, "self_attention_cache", cache)
    counts = family.returns_bias and cache is not None
    past = cache.get_seq_length(module.layer_idx) if counts else 0
    past = past.clone() if isinstance(past, Tensor) else past  # a static cache adds to it in place
    return q, appended(cache, module, k, v), past


def _taken(family: Family, module: Any, x: Tensor, given: Mapping[str, Any], name: str) -> Heads:
    """Attention to the keys of another layer, after that layer's norms and rotation. Tensors that
    the model moved to another device, or that its caller gave, are one part."""
    assert family.project.queries is not None
    q = scaler_of(family, module, x, given)(family.project.queries(module, x))
    q = family.rotate(module, q, given.get("position_embeddings"))
    left = given[SHARED][name]
    if not isinstance(left, CachedKeys) or left.make is not None:
        left = CachedKeys.of(*left)
    q, _ = of_one_dtype(q, left.parts[0].outlines[0])
    return q, left, 0


def _across(family: Family, module: Any, x: Tensor, given: Mapping[str, Any]) -> Heads:
    """Cross-attention: keys and values are computed once, and cached if there is a cache."""
    queries, memory = family.project.queries, family.project.memory
    assert queries is not None and memory is not None
    context, cache, layer = given[family.context], given.get(family.cache), module.layer_idx
    q = queries(module, x)
    if cache is None:
        return q, CachedKeys.of(*memory(module, context)), 0
    if not hasattr(cache, "cross_attention_cache"):
        raise ValueError(
            "cross-attention stores its keys in an EncoderDecoderCache, "
            f"got {type(cache).__name__}; use regard.hf.cache(model)"
        )
    cached = cache.cross_attention_cache
    if cache.is_updated.get(layer):
        return q, CachedKeys.of(cached.layers[layer].keys, cached.layers[layer].values), 0
    stored = appended(cached, module, *memory(module, context))
    cache.is_updated[layer] = True
    return q, stored, 0
