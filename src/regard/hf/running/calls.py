"""What every call of attention in a transformers model has in common, however keys are made."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.cache import Part
from regard.hf.families.recognising import family_of
from regard.hf.families.table import Family
from regard.hf.packages import cache_in
from regard.hf.running.masks import Visible, in_documents, visible
from regard.layers.attending import Attending, Keys
from regard.layers.query_scale import UNSCALED
from regard.ops.attend import prepare
from regard.ops.explain import weights_of
from regard.ops.parts import Make
from regard.ops.prepared import Prepared
from regard.tracing import is_autocast

PAGED = ("indices", "block_table")  # of attention functions over blocks of keys
# read from the module, or not read (MVP's prompts): as arguments they would be ignored
FROM_THE_MODULE = ("softcap", "s_aux", "attn_prompt")


def arrive(
    module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[Family, dict[str, Any]]:
    """The family of a module, and by their names the arguments that follow the hidden states.

    Raises:
        ValueError: if an argument would change the result and is not supported.
    """
    family = family_of(module)
    assert family is not None
    if args:
        names = list(inspect.signature(type(module).forward).parameters)[2:]
        given = {**dict(zip(names, args, strict=False)), **given}
    refuse(given, also=FROM_THE_MODULE)
    if family.cache not in given:
        given = {**given, family.cache: cache_in(given)}
    return family, given


def refuse(given: Mapping[str, Any], also: tuple[str, ...] = ()) -> None:
    """Raise for arguments that would change the result and are not supported."""
    for name in (*PAGED, *also):
        if given.get(name) is not None:
            raise ValueError(
                f"{name}= would change the result and is not supported by regard.hf; "
                "uninstall(model), or set another attn_implementation"
            )


def visible_in(
    family: Family,
    module: nn.Module,
    given: Mapping[str, Any],
    queries: int,
    keys: int,
    *,
    across: bool = False,
) -> Visible:
    """`visible` with the mask among the arguments of a call; `across` for cross-attention."""
    at = visible(
        module,
        given.get(family.context_mask if across else family.mask),
        queries,
        keys,
        window=family.window_of(module),
        is_causal=False if across else given.get("is_causal"),
    )
    return at if across else in_documents(module, at, given)


def positions_of_queries(
    x: Float[Tensor, "B L E"], given: Int[Tensor, "*B L"] | None, cache: Any, layer: int | None
) -> Int[Tensor, "*B L"]:
    """The positions of new tokens: those of the model, or else counted on from the cache."""
    if given is not None:
        return given
    past = 0 if cache is None else cache.get_seq_length(layer)
    return (torch.arange(x.shape[1], device=x.device) + past).unsqueeze(0)


def scaler_of(
    family: Family, module: Any, x: Float[Tensor, "B L E"], given: Mapping[str, Any]
) -> Callable[[Tensor], Tensor]:
    """The scaling of queries by their positions; made before the cache holds the new tokens."""
    scale = family.query_scale(module)
    if scale is UNSCALED:
        return lambda q: q
    positions = None if family.counts_positions else given.get("position_ids")
    cache, layer = given.get(family.cache), getattr(module, "layer_idx", None)
    return partial(scale, positions=positions_of_queries(x, positions, cache, layer))


def options_of(family: Family, module: nn.Module) -> dict[str, Any]:
    """The options of `prepare` that a module holds."""
    return {
        "scale": family.scale(module),
        "softcap": family.softcap(module),
        "sinks": family.sinks(module),
        "dropout": family.dropout(module) if module.training else 0.0,
        "precision": precision_of(module),
    }


def precision_of(module: nn.Module) -> str:
    """The attribute `precision`: `install` sets it, and layers of regard have it."""
    return str(getattr(module, "precision", "strict"))


def described(
    q: Tensor,
    keys: Keys,
    at: Visible,
    *,
    bias: Tensor | None = None,
    attending: Any = None,
    **options: Any,
) -> Prepared:
    """The description of a call, and the backend chosen for it.

    Args:
        q: queries.
        keys: keys and values.
        at: which keys are visible, and what the mask adds to the scores.
        bias: what is added to the scores besides.
        attending: the cache, if it attends itself.
        options: further options of `prepare`.
    """
    k, v = keys.outlines
    if at.bias is not None:
        bias = at.bias if bias is None else at.bias + bias
    if attending is not None:
        options |= {"sinks": None, "partial": True}
    return prepare(q, k, v, mask=at.mask, span=at.span, score_bias=bias, **options)


def keys_made_of(parts: tuple[Part, ...], at: Visible, make: Make, attending: Any = None) -> Keys:
    """Keys and values that are made of what a cache holds: of pages, one piece after another.

    Args:
        parts: what it holds.
        at: which keys are visible: others are not made.
        make: keys and values of some parts.
        attending: the cache, if it attends itself.
    """
    if attending is not None:
        return Keys.of(make(parts))
    return Keys.made(parts, make, at.mask, at.span)


def attended(
    call: Prepared,
    q: Tensor,
    keys: Keys,
    given: Mapping[str, Any],
    *,
    attending: Any = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention over the parts, `[B, H, L, Dv]`; and its weights, if the caller wants them.

    Raises:
        ValueError: if it wants them, and the cache attends itself, as it has not all keys.
    """
    if attending is not None:
        if weights_wanted(given):
            raise ValueError(
                f"attention weights are not returned with {type(attending).__name__}, which does "
                "not have all keys here; leave output_attentions out"
            )
        return attending.attend(call, q, keys.parts, sinks), None
    if not weights_wanted(given):
        return call.run(q, keys.parts), None
    parts = tuple(keys.parts)
    return call.run(q, parts), weights_of(call, q, parts)


def weights_wanted(given: Mapping[str, Any]) -> bool:
    """Whether the caller of the model asked for attention weights: models pass that on, or collect
    what their modules return."""
    from transformers.utils.output_capturing import _active_collector

    if given.get("output_attentions"):
        return True
    collected = _active_collector.get()
    return collected is not None and ("attentions" in collected or "cross_attentions" in collected)


def one_part(*streams: Tensor) -> tuple[Part, ...]:
    """Streams of all keys, as the one part of a cache."""
    return (Part(0, streams[0].shape[2], streams),)


def appended(cache: Any, layer: int, *streams: Tensor) -> tuple[Part, ...]:
    """All parts of a cache of transformers, or of `regard.hf.cache`, with these streams appended.

    They are numbered from the first key that is still held: so do the masks of transformers number
    a window's keys.
    """
    if not hasattr(cache, "append"):
        return one_part(*cache.update(*streams, layer))
    parts: tuple[Part, ...] = cache.append(layer, *streams)
    first = parts[0].kv_start
    if first == 0:
        return parts
    return tuple(Part(start - first, stop - first, each) for start, stop, each in parts)


def attending_cache(cache: Any, module: Any) -> Any:
    """The cache of a module in one of `regard.hf.cache` if it attends itself, as each rank stores a
    share of its tokens; else None.

    Raises:
        ValueError: if tensor parallelism has split the heads of the module over the same ranks.
    """
    held: Any = cache.layers[module.layer_idx].cache if hasattr(cache, "append") else None
    if not isinstance(held, Attending):
        return None
    held.check_layer(module)
    return held


def number_of_keys(parts: tuple[Part, ...], attending: Any) -> int:
    """All keys of a call, wherever they are."""
    keys: int = parts[-1].kv_stop if attending is None else attending.length
    return keys


def of_one_dtype(*heads: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values, rounded to the narrowest of their dtypes under autocast: norms with
    float32 weights widen queries and keys there, and torch's own attention rounds all three."""
    kind = heads[0].device.type
    if not is_autocast(kind):
        return heads
    narrow = min((each.dtype for each in heads), key=lambda dtype: dtype.itemsize)
    return tuple(each.to(narrow) for each in heads)
