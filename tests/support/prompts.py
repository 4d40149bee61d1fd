"""Texts that tiny models write with caches in pages."""

import regard.hf
from zoo import ZOO

PAGE = 4  # tokens of a page
NEW = 9  # tokens that are written: two pages and one


def model_of(name):
    """A model of the zoo that writes to the end."""
    model = ZOO[name].build()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def write(model, ids, cache, **options):
    """The text that `generate` continues tokens, or other inputs, with."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "disable_compile": True, **options}
    given = ids if isinstance(ids, dict) else {"input_ids": ids}
    return model.generate(**given, past_key_values=cache, **settings)


def paged(model, pool, **options):
    """A cache in pages of a pool."""
    return regard.hf.cache(model, "paged", pool=pool, **options)
