"""The forward of a transformers attention module with keys and values for each head.

Its own children project, the model's angles rotate, transformers' caches store; `attend` runs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from regard.cache import Part
from regard.heads import merge_heads
from regard.hf.families.table import Family
from regard.hf.running.calls import (
    appended,
    arrive,
    attended,
    attending_cache,
    described,
    number_of_keys,
    of_one_dtype,
    one_part,
    options_of,
    scaler_of,
    visible_in,
)
from regard.hf.running.shared_keys import leave, take
from regard.hf.running.steps import Projected, record_step, repeated_step
from regard.layers.attending import Keys


class Heads(NamedTuple):
    """Queries, and all keys and values they may attend to; `past` is the number of cached keys, and
    `attending` the cache if it attends itself."""

    q: Tensor
    parts: tuple[Part, ...]
    past: Any = 0
    attending: Any = None


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
        q, parts, past, attending = _across(family, self, hidden_states, given)
    elif taken:
        q, parts, past, attending = _taken(family, self, hidden_states, given, taken)
    else:
        projected = projected or _projected(family, self, hidden_states, given)
        q, parts, past, attending = _along(family, self, projected, given)
    if left:
        leave(given, left, parts, attending)
    queries, count = q.shape[2], number_of_keys(parts, attending)
    at = visible_in(family, self, given, queries, count, across=across)
    bias = family.bias(self, given, queries, count, past)
    options = options_of(family, self)
    keys = Keys.of(parts)
    call = described(q, keys, at, bias=bias, attending=attending, **options)
    sinks = options["sinks"]
    heads, weights = attended(call, q, keys, given, attending=attending, sinks=sinks)
    record_step(family, self, hidden_states, given, call)
    out = output_of(family, self, hidden_states, heads)
    return (out, bias, weights) if family.returns_bias else (out, weights)


def _projected(family: Family, module: Any, x: Tensor, given: Mapping[str, Any]) -> Projected:
    """Queries, scaled by their positions, which commutes with rotation; keys and values."""
    q, k, v = family.project.both(module, x)
    return scaler_of(family, module, x, given)(q), k, v


def output_of(family: Family, module: Any, x: Tensor, heads: Tensor) -> Tensor:
    """Hidden states from the outputs of the heads."""
    return family.output(module, merge_heads(family.gate(module, x, heads)))


def _along(family: Family, module: Any, heads: Projected, given: Mapping[str, Any]) -> Heads:
    """Self-attention: queries and keys are rotated, then keys and values appended to the cache."""
    q, k, v = heads
    angles = given.get("position_embeddings")
    q, k = family.rotate(module, q, angles), family.rotate(module, k, angles)
    q, k, v = of_one_dtype(q, k, v)
    cache = given.get(family.cache)
    if cache is None:
        return Heads(q, one_part(k, v))
    cache = getattr(cache, "self_attention_cache", cache)
    past = cache.get_seq_length(module.layer_idx) if family.returns_bias else 0
    past = past.clone() if isinstance(past, Tensor) else past  # a static cache adds to it in place
    parts = appended(cache, module.layer_idx, k, v)
    return Heads(q, parts, past, attending_cache(cache, module))


def _taken(family: Family, module: Any, x: Tensor, given: Mapping[str, Any], name: str) -> Heads:
    """Attention to the keys of another layer, after that layer's norms and rotation."""
    assert family.project.queries is not None
    q = scaler_of(family, module, x, given)(family.project.queries(module, x))
    q = family.rotate(module, q, given.get("position_embeddings"))
    shared = take(given, name)
    q, _ = of_one_dtype(q, shared.parts[0].outlines[0])
    return Heads(q, shared.parts, 0, shared.attending)


def _across(family: Family, module: Any, x: Tensor, given: Mapping[str, Any]) -> Heads:
    """Cross-attention: keys and values are computed once, and cached if there is a cache."""
    queries, memory = family.project.queries, family.project.memory
    assert queries is not None
    assert memory is not None
    context, cache, layer = given[family.context], given.get(family.cache), module.layer_idx
    q = queries(module, x)
    if cache is None:
        return Heads(q, one_part(*memory(module, context)))
    if not hasattr(cache, "cross_attention_cache"):
        raise ValueError(
            "cross-attention stores its keys in an EncoderDecoderCache, "
            f"got {type(cache).__name__}; use regard.hf.cache(model)"
        )
    cached = cache.cross_attention_cache
    if cache.is_updated.get(layer):
        return Heads(q, one_part(cached.layers[layer].keys, cached.layers[layer].values))
    parts = appended(cached, layer, *memory(module, context))
    cache.is_updated[layer] = True
    return Heads(q, parts)
