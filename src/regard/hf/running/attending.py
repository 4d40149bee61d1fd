"""What `module(...)` computes once regard is installed: the module's own children, and `attend`."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.cache import Part
from regard.heads import merge_heads
from regard.hf.families.table import Family, family_of
from regard.hf.running.masks import visible
from regard.ops.attend import prepare
from regard.ops.explain import weights_of

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "indices", "block_table")
PRECISION = "_precision_of_regard"  # an attribute of modules
FROM_THE_MODULE = ("softcap", "s_aux")  # as arguments of a model, they would be overlooked


class Heads(NamedTuple):
    """Queries, and the keys and values they may look at: their own, and those of a past."""

    q: Tensor
    k: Tensor
    v: Tensor
    past: Any = 0


def forward(self: Any, hidden_states: Float[Tensor, "B L E"], *args: Any, **given: Any) -> Any:
    """What a module's own forward does, with `attend` in the middle."""
    family = known(self)
    given = named(self, args, given)
    refuse(given, also=FROM_THE_MODULE)
    across = bool(family.context) and given.get(family.context) is not None
    heads = (
        _across(family, self, hidden_states, given)
        if across
        else _along(family, self, hidden_states, given)
    )
    q, k, v, past = heads
    mask, added, span = visible(
        self,
        given.get(family.context_mask if across else family.mask),
        q.shape[2],
        k.shape[2],
        window=family.window_of(self),
        is_causal=False if across else given.get("is_causal"),
    )
    bias = family.bias(self, given, q.shape[2], k.shape[2], past)
    call = prepare(
        q,
        k,
        v,
        mask=mask,
        span=span,
        scale=family.scale(self),
        score_bias=total(added, bias),
        softcap=family.softcap(self),
        sinks=family.sinks(self),
        dropout=family.dropout(self) if self.training else 0.0,
        precision=precision_of(self),
    )
    parts = (Part(0, k.shape[2], (k, v)),)
    out = family.output(self, merge_heads(call.run(q, parts)))
    weights = weights_of(call, q, parts) if weights_wanted(given) else None
    return (out, bias, weights) if family.returns_bias else (out, weights)


def _along(family: Family, module: Any, x: Tensor, given: Mapping[str, Any]) -> Heads:
    """Self-attention: rotate, then join the past."""
    q, k, v = family.project.both(module, x)
    angles = given.get("position_embeddings")
    q, k = family.rotate(module, q, angles), family.rotate(module, k, angles)
    q, k, v = of_one_dtype(q, k, v)
    cache = given.get(family.cache)
    if cache is None:
        return Heads(q, k, v)
    cache = getattr(cache, "self_attention_cache", cache)
    past = cache.get_seq_length(module.layer_idx) if family.returns_bias else 0
    past = past.clone() if isinstance(past, Tensor) else past  # a static cache moves it in place
    k, v = cache.update(k, v, module.layer_idx)
    return Heads(q, k, v, past)


def _across(family: Family, module: Any, x: Tensor, given: Mapping[str, Any]) -> Heads:
    """Cross-attention: keys and values are made once, and kept if there is a cache."""
    queries, memory = family.project.queries, family.project.memory
    assert queries is not None
    assert memory is not None
    context, cache, layer = given[family.context], given.get(family.cache), module.layer_idx
    q = queries(module, x)
    if cache is None:
        return Heads(q, *memory(module, context))
    if not hasattr(cache, "cross_attention_cache"):
        raise ValueError(
            f"cross-attention keeps its keys in an EncoderDecoderCache, got {type(cache).__name__}"
        )
    held = cache.cross_attention_cache
    if cache.is_updated.get(layer):
        return Heads(q, held.layers[layer].keys, held.layers[layer].values)
    k, v = held.update(*memory(module, context), layer)
    cache.is_updated[layer] = True
    return Heads(q, k, v)


def of_one_dtype(*heads: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values, rounded to the narrowest of their dtypes under autocast: norms with
    float32 weights widen queries and keys there, and torch's own attention rounds all three."""
    kind = heads[0].device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return heads
    narrow = min((each.dtype for each in heads), key=lambda dtype: dtype.itemsize)
    return tuple(each.to(narrow) for each in heads)


def total(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum of what is there."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def precision_of(module: nn.Module) -> str:
    """What `install` was asked for."""
    return str(module.__dict__.get(PRECISION, "strict"))


def known(module: nn.Module) -> Family:
    """The family of a module that has been bound."""
    family = family_of(module)
    assert family is not None
    return family


def named(module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    """All arguments after the hidden states by the names that the module's own class gives them."""
    if not args:
        return given
    names = list(inspect.signature(type(module).forward).parameters)[2:]
    return {**dict(zip(names, args, strict=False)), **given}


def weights_wanted(given: Mapping[str, Any]) -> bool:
    """Whether the caller of the model asked for attention weights: models pass that on, or collect
    what their modules return."""
    from transformers.utils.output_capturing import _active_collector

    if given.get("output_attentions"):
        return True
    collected = _active_collector.get()
    return collected is not None and ("attentions" in collected or "cross_attentions" in collected)


def refuse(given: Mapping[str, Any], also: tuple[str, ...] = ()) -> None:
    """Raise for arguments that would change the result and are not honoured."""
    for name in (*PACKED, *also):
        if given.get(name) is not None:
            raise ValueError(
                f"{name}= would change the result and is not supported by regard.hf; "
                "uninstall(model), or set another attn_implementation"
            )
