"""condense: evict the tokens of a text that a model does not need to repeat it."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard import sparse
from regard.hf.generating.watching import argument_of
from regard.sparse.evicting import RECENT, SINKS

REPEATED = 1024  # tokens that are repeated at a time: memory for few beside those that are held


def condense(
    cache: Any,
    tokens: Int[Tensor, "B L"],
    budget: int | float = 0.5,
    *,
    attention_mask: Int[Tensor, "B L"] | None = None,
    sinks: int = SINKS,
    recent: int = RECENT,
) -> None:
    """Evict from a cache the tokens to which the model attends least while it repeats its text.

    For a cache of kind `"condensing"` and a model with regard installed. The key heads of all
    layers share the budget: `regard.sparse.condense`, after KVzip (Kim et al. 2025,
    arXiv:2505.23416). It takes longer than the prefill, as the text is read again over twice the
    keys, and is of use where a text is read once and asked about often. Later tokens are all held.

    Args:
        cache: from `regard.hf.cache(model, "condensing")`.
        tokens: those that it holds.
        budget: rows of each key head on average, a whole number, or a share of the tokens.
        attention_mask: 0 at padding, if there is any.
        sinks: tokens at the start of each row of the batch that every head keeps.
        recent: tokens at the end that it does.

    Raises:
        ValueError: if the tokens are not as many as those held, the cache is of another kind or its
            model has an encoder, or a number is out of its range. No layer is changed then.

    Examples:
        >>> import regard.hf, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=2, intermediate_size=16)
        >>> model, text = LlamaForCausalLM(config).eval(), torch.randint(20, (1, 100))
        >>> installed = regard.hf.install(model)
        >>> cache = regard.hf.cache(model, "condensing")
        >>> with torch.no_grad():
        ...     _ = model(text, past_key_values=cache)
        ...     regard.hf.condense(cache, text, budget=0.25)
        >>> cache.get_seq_length(), sum(sum(each.rows) for each in cache.caches)  # of 2 x 2 heads
        (100, 100)
    """
    held = cache.get_seq_length()
    if tokens.shape[-1] != held or not hasattr(cache, "undone"):
        raise ValueError(
            'condense() repeats the text of a cache that regard.hf.cache(model, "condensing") made '
            f"for a model without an encoder: {held} tokens are held, got {tokens.shape[-1]} and "
            f"a {type(cache).__name__}"
        )

    def repeat() -> None:
        for start in range(0, held, REPEATED):
            some = slice(start, start + REPEATED)
            given = {"input_ids": tokens[:, some]}
            if attention_mask is not None:
                given["attention_mask"] = torch.cat([attention_mask, attention_mask[:, some]], 1)
            with cache.undone() as model:
                model.base_model(**given, **argument_of(model, cache), use_cache=True)

    sparse.condense(cache.caches, repeat, budget, sinks=sinks, recent=recent)
