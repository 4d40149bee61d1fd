"""cache: one of regard's caches for each layer of a model, as `generate` takes them."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from regard.cache import Cache
from regard.hf.generating.watching import called_module
from regard.hf.packages import require
from regard.words import one_of


def cache(model: Any, kind: str | Callable[[], Cache] = "auto", **options: Any) -> Any:
    """A new cache for `model.generate(past_key_values=...)`; one for each text or batch.

    Args:
        model: a transformers model that generates.
        kind: `"auto"`, which holds the window of layers that have one (and `rollback=` tokens more,
            which can be taken back), and all tokens of others; `"growing"`, all tokens of every
            layer; `"static"`, the same in buffers for `max_length=` of them; `"sliding"`, as
            `"auto"`, and refused for a model without windows; `"quantized"`, as `"auto"` in codes,
            with `bits=8 | 4` and `group=64`, or `format="K8V4"`; for short `"int8"`, `"int4"`,
            `"K8V8"`, `"K8V4"`, `"K6V4"` or `"K4V4"`; `"evicting"`, a budget of tokens for each key
            head, for a model with regard installed, with the arguments of `EvictingCache`
            (`budget=0.5`) and `bits=` or `format=` for codes; `"condensing"`, all tokens until
            `regard.hf.condense`, as values or in codes of `format=`; `"paged"`, in pages; or a
            function that makes the cache of a layer, such as `lambda: ShardedCache(mesh)` for a
            model with regard installed, or `lambda: QuantizedCache(8)` for codes of all tokens.
            Upper and lower case are one, and so is "quantised".
        **options: of that kind; none of a function. A list has a value for each layer, but for
            `"paged"`: there they are `pool=`, a `PagePool`, or without it `format="plain"`,
            `page_size=64` and `tokens=`, the most of each layer for a new one; and `name=""`,
            prefixes of other names being left alone, or `prefixes=False` for none.

    A `"paged"` cache is for texts that begin alike. What a prompt has in common with earlier ones
    of its pool is not computed again, in whole pages: `generate` computes the rest. That is found
    by the tokens, the model's weights, and all else that keys and values depend on. For this all
    bytes of the weights are read at the beginning of a text and before later pages are stored.
    Rows that are padded, embeddings instead of tokens, images, and models with an encoder share
    nothing.

    An operation on the cache, or a call of the model that fails, changes all layers or none; for
    that the model has two hooks while a cache of it exists.

    In a hybrid model, layers with recurrent or convolutional states hold them as transformers does,
    in the same cache. Such a state cannot be cut: `truncate` returns to before the last call of the
    model (tokens of it that are kept are computed again), to a length at which `cache.mark()` was
    called, or to 0, and is refused elsewhere. `with cache.assisted():` lets `generate` use an
    assistant or look up the prompt, which transformers refuses for these models.

    Raises:
        ValueError: if the kind or an option is unknown, an option is missing, the kind is "sliding"
            and the model has no windows, layers of it cache something other than keys, the pool
            holds pages of other weights, or RoPE's frequencies change with the length of a call, so
            that no prefix can be shared.
        TypeError: if the model is none of transformers, or a function makes no cache.
        ImportError: if transformers is missing.

    Examples:
        >>> import regard.hf, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=2, intermediate_size=16, eos_token_id=None, pad_token_id=0)
        >>> model = LlamaForCausalLM(config).eval()
        >>> cache = regard.hf.cache(model, kind="quantized", bits=8, group=8)
        >>> text = model.generate(torch.tensor([[3, 4]]), past_key_values=cache, max_new_tokens=3)
        >>> text.shape, cache.get_seq_length()
        (torch.Size([1, 5]), 4)

        Two prompts with the same first 8 tokens, in pages of 4:

        >>> pool = regard.PagePool(num_pages=100, page_size=4)
        >>> for last in (11, 12):
        ...     cache = regard.hf.cache(model, "paged", pool=pool)
        ...     prompt = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, last]])
        ...     text = model.generate(prompt, past_key_values=cache, max_new_tokens=3)
        ...     print(cache.found)
        0
        8
    """
    require("transformers")
    from regard.hf.generating.caches import KINDS, PAGED, made
    from regard.hf.generating.generation_cache import GenerationCache
    from regard.hf.generating.layer_kinds import layer_kinds, layers_of
    from regard.hf.generating.pool_of_model import paged

    if isinstance(kind, str):
        kind, options = _named(kind, options)
    elif not callable(kind):
        raise TypeError(
            f"kind is a name or a function that makes the cache of a layer, got {kind!r:.80}"
        )
    kinds = layer_kinds(model)
    if kind == PAGED:
        whole = partial(paged, model, kinds)
        return paired(model, whole(**_checked(kind, whole, options)))
    maker: Any = KINDS[kind] if isinstance(kind, str) else partial(made, kind)
    checked = _checked(kind, maker, options)
    for name, value in checked.items():
        if isinstance(value, list) and len(value) != len(kinds):
            raise ValueError(
                f"{name} has {len(value)} values for {len(kinds)} layers; give one for each, or one"
            )
    makers = [  # an option that is a list has a value for each layer
        maker(**{name: x[index] if isinstance(x, list) else x for name, x in checked.items()})
        for index in range(len(kinds))
    ]
    if kind == "sliding" and not any(each.window for each in kinds):
        raise ValueError(
            f"no layer of {type(model).__name__} has a window, so no token may be dropped; "
            "kind='quantized' saves memory and holds every token"
        )
    return paired(model, GenerationCache(layers_of(kinds, makers), called_module(model)))


def _named(name: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind of cache with this name, and its options."""
    from regard.hf.generating.caches import NAMES

    name = one_of("kind", name, NAMES)
    kind, its = NAMES[name]
    twice = sorted(its.keys() & options.keys())
    if twice:
        raise ValueError(
            f"kind={name!r} has {twice[0]}={its[twice[0]]!r}, got {options[twice[0]]!r}; leave it "
            f"out, or give kind={kind!r}"
        )
    return kind, its | options


def paired(model: Any, held: Any) -> Any:
    """The cache that `generate` takes: with one for cross-attention where a model has that."""
    from transformers import DynamicCache, EncoderDecoderCache

    if not model.config.is_encoder_decoder:
        return held
    return EncoderDecoderCache(held, DynamicCache())


def _checked(kind: object, maker: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options, if they are those that the kind takes."""
    parameters = inspect.signature(maker).parameters
    unknown = [name for name in options if name not in parameters]
    missing = [
        n for n, each in parameters.items() if each.default is each.empty and n not in options
    ]
    if unknown or missing:
        takes = ", ".join(f"{name}=" for name in parameters) or "no options"
        got = ", ".join(f"{name}={value!r}" for name, value in options.items()) or "none"
        raise ValueError(f"kind={kind!r} takes {takes}, got {got}")
    return options
