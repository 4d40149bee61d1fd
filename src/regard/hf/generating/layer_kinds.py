"""The kinds of layers of a model's cache: keys and values, states, keys of an indexer."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from regard.cache import Cache
from regard.hf.families.finding import find
from regard.hf.families.recognising import family_of
from regard.hf.generating.caches import CacheLayer, IndexedLayer
from regard.hf.generating.states import EmptyLayer, HybridLayer, StateLayer
from regard.hf.generating.watching import called_module
from regard.hf.packages import cache_argument

FULL, WINDOWED, INDEXED = "full_attention", "sliding_attention", "indexed_attention"


class LayerKind(NamedTuple):
    """The contents of one layer's cache: keys and values, of a window or of all tokens; states; the
    keys by which an indexer selects."""

    has_keys: bool = True
    window: int | None = None
    states: int = 0
    has_index: bool = False


_KINDS = {  # by transformers' layer types; the numbers are those of the config
    FULL: LayerKind(),
    WINDOWED: LayerKind(window=1),
    "chunked_attention": LayerKind(),
    INDEXED: LayerKind(has_index=True),
    "linear_attention": LayerKind(has_keys=False, states=1),
    "conv": LayerKind(has_keys=False, states=1),
    "hybrid": LayerKind(states=1),
    "hybrid_sliding": LayerKind(window=1, states=1),
    **dict.fromkeys(("moe", "mlp", "dummy"), LayerKind(has_keys=False)),
}


def layer_kinds(model: Any) -> list[LayerKind]:
    """The kind of each decoder layer that a cache has, as the config and the modules say.

    A ValueError is raised if the model takes no cache, no layer caches keys, or a layer caches
    something other than keys, values and states.
    """
    module: Any = called_module(model)
    if not hasattr(getattr(module, "config", None), "get_text_config"):
        got = type(module).__name__
        raise TypeError(f"model is one of transformers, as regard.hf.load returns, got {got}")
    takes = inspect.signature(module.forward).parameters
    if "input_ids" in takes and not cache_argument(module.forward):
        raise ValueError(
            f"{type(module).__name__} takes no past_key_values: it has no cache of keys and "
            "values; leave the cache out"
        )
    config = model.config.get_text_config(decoder=True)
    types = _types_of(model, config)
    if not any(_KINDS[each].has_keys for each in types):
        raise ValueError(
            f"no layer of {type(model).__name__} caches keys; use transformers' own cache"
        )
    known: dict[Any, int | None] = {
        module.layer_idx: family.window_of(module)
        for module in find(model).known.values()
        if (family := family_of(module)) and getattr(module, "layer_idx", None) is not None
    }
    window = getattr(config, "sliding_window", None)
    states = getattr(config, "number_of_conv_states", None) or 1
    return [
        kind._replace(
            window=known.get(index) or (kind.window and window), states=kind.states and states
        )
        for index, kind in enumerate(_indexed(config, [_KINDS[each] for each in types]))
    ]


def _indexed(config: Any, kinds: list[LayerKind]) -> list[LayerKind]:
    """The kinds of layers with an indexer, where some take the keys or the selection of another."""
    modes = getattr(config, "kv_sharing_modes", [None] * len(kinds))
    indexers = getattr(config, "indexer_types", None) or ["full"] * len(kinds)
    found = list(kinds)
    for index in [index for index, kind in enumerate(kinds) if kind.has_index]:
        own, selects = not str(modes[index]).startswith("reuse"), indexers[index] != "shared"
        found[index] = kinds[index]._replace(has_keys=own, has_index=selects)
    return found


def _types_of(model: Any, config: Any) -> list[str]:
    """The type of each decoder layer that does not read the keys of another one."""
    counts = ("decoder_layers", "num_decoder_layers") * model.config.is_encoder_decoder
    counted = (getattr(config, each, None) for each in (*counts, "num_hidden_layers"))
    types = list(getattr(config, "layer_types", None) or [FULL] * next(filter(None, counted)))
    crossing = getattr(config, "cross_attention_layers", None) or ()  # or beyond the last layer
    types = ["cross_attention" if at in crossing else each for at, each in enumerate(types)]
    if not hasattr(config, "index_topk") or hasattr(config, "index_kpool"):
        # it caches more than a key of each token: pools (GLM-5-Next), positions (Qwen4-Exp)
        types = [each.replace(INDEXED, f"{INDEXED} (not DeepSeek-V3.2's)") for each in types]
    other = sorted({each for each in types if each not in _KINDS})
    if other:
        raise ValueError(
            f"{type(model).__name__} has layers of type {', '.join(other)}, and regard's caches "
            f"serve {', '.join(_KINDS)}; use transformers' own cache"
        )
    return types[: len(types) - (getattr(config, "num_kv_shared_layers", None) or 0)]


def layers_of(kinds: list[LayerKind], makers: list[Callable[[int | None], Cache]]) -> list[Any]:
    """A layer of each kind: with a cache that its maker makes, states, or neither."""

    def layer(kind: LayerKind, make: Callable[[int | None], Cache]) -> Any:
        if kind.has_index:
            return IndexedLayer(partial(make, kind.window), kind.has_keys)
        if not kind.has_keys:
            return StateLayer(kind.states) if kind.states else EmptyLayer()
        own = partial(make, kind.window)
        return HybridLayer(own, kind.states) if kind.states else CacheLayer(own)

    return [layer(*each) for each in zip(kinds, makers, strict=True)]
