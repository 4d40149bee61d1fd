"""The forward of a transformers attention module with keys and values for each head.

Its own children project, the model's angles rotate, transformers' caches store; `attend` runs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from regard.heads import merge_heads
from regard.hf.families.table import Family
from regard.hf.running.calls import (
    arrive,
    attended,
    of_one_dtype,
    one_part,
    options_of,
    visible_in,
)


class Heads(NamedTuple):
    """Queries, and all keys and values they may attend to; `past` is the number of cached keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    past: Any = 0


def forward(self: Any, hidden_states: Float[Tensor, "B L E"], *args: Any, **given: Any) -> Any:
    """What a module's own forward computes, by `attend`."""
    family, given = arrive(self, args, given)
    across = bool(family.context) and given.get(family.context) is not None
    heads_of = _across if across else _along
    q, k, v, past = heads_of(family, self, hidden_states, given)
    at = visible_in(family, self, given, q.shape[2], k.shape[2], across=across)
    bias = family.bias(self, given, q.shape[2], k.shape[2], past)
    heads, weights = attended(q, one_part(k, v), at, given, bias=bias, **options_of(family, self))
    out = family.output(self, merge_heads(heads))
    return (out, bias, weights) if family.returns_bias else (out, weights)


def _along(family: Family, module: Any, x: Tensor, given: Mapping[str, Any]) -> Heads:
    """Self-attention: rotated, then appended to the cache."""
    q, k, v = family.project.both(module, x)
    angles = given.get("position_embeddings")
    q, k = family.rotate(module, q, angles), family.rotate(module, k, angles)
    q, k, v = of_one_dtype(q, k, v)
    cache = given.get(family.cache)
    if cache is None:
        return Heads(q, k, v)
    cache = getattr(cache, "self_attention_cache", cache)
    past = cache.get_seq_length(module.layer_idx) if family.returns_bias else 0
    past = past.clone() if isinstance(past, Tensor) else past  # a static cache adds to it in place
    k, v = cache.update(k, v, module.layer_idx)
    return Heads(q, k, v, past)


def _across(family: Family, module: Any, x: Tensor, given: Mapping[str, Any]) -> Heads:
    """Cross-attention: keys and values are computed once, and cached if there is a cache."""
    queries, memory = family.project.queries, family.project.memory
    assert queries is not None
    assert memory is not None
    context, cache, layer = given[family.context], given.get(family.cache), module.layer_idx
    q = queries(module, x)
    if cache is None:
        return Heads(q, *memory(module, context))
    if not hasattr(cache, "cross_attention_cache"):
        raise ValueError(
            "cross-attention stores its keys in an EncoderDecoderCache, "
            f"got {type(cache).__name__}; use regard.hf.cache(model)"
        )
    cached = cache.cross_attention_cache
    if cache.is_updated.get(layer):
        return Heads(q, cached.layers[layer].keys, cached.layers[layer].values)
    k, v = cached.update(*memory(module, context), layer)
    cache.is_updated[layer] = True
    return Heads(q, k, v)
