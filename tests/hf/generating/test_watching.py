"""The hooks on a model: there while caches of it are, inert in copies."""

import copy
import gc

import pytest
import torch

import regard.hf
from regard.hf.generating.watching import _after, _before, _named
from zoo import ZOO, tokens

LAYERS = 3


class Failure(Exception):
    pass


def failing(module):
    def fail(*_):
        raise Failure

    return module.register_forward_pre_hook(fail)


def lengths(cache):
    return [each.length for each in cache.caches]


def hooks(model):
    return (
        list(model._forward_pre_hooks.values()).count(_before),
        list(model._forward_hooks.values()).count(_after),
    )


def test_hooks_are_there_while_caches_are():
    model = ZOO["llama"].build()
    assert hooks(model) == (0, 0)
    caches = [regard.hf.cache(model), regard.hf.cache(model, "paged")]
    assert hooks(model) == (1, 1)
    caches.pop()
    gc.collect()
    assert hooks(model) == (1, 1)
    caches.pop()
    gc.collect()
    assert hooks(model) == (0, 0)
    assert not model._forward_hooks_always_called
    assert not model._forward_pre_hooks_with_kwargs


def test_copies_of_the_model_have_caches_of_their_own(tmp_path):
    model = ZOO["llama"].build()
    cache = regard.hf.cache(model)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        with torch.no_grad():
            other(tokens(1, 5), past_key_values=regard.hf.cache(model))
        own = regard.hf.cache(other)
        assert hooks(other) == (1, 1)
        handle = failing(other.lm_head)
        with pytest.raises(Failure), torch.no_grad():
            other(tokens(1, 5), past_key_values=own)
        handle.remove()
        assert lengths(own) == [0] * LAYERS
        del own
        gc.collect()
        assert hooks(other) == (0, 0)
    assert hooks(model) == (1, 1)
    del cache


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of its own code
def test_a_compiled_model_is_the_model_that_generate_calls():
    model = ZOO["llama"].build()
    compiled = torch.compile(model)
    cache = regard.hf.cache(compiled)
    assert cache.model is model
    compiled.generate(tokens(1, 5), past_key_values=cache, max_new_tokens=3, min_new_tokens=3)
    assert lengths(cache) == [7] * LAYERS


def test_a_deep_copy_is_watched_too():
    model = ZOO["llama"].build()
    cache = regard.hf.cache(model)
    with torch.no_grad():
        model(tokens(2, 14), past_key_values=cache)
    copied = copy.deepcopy(cache)
    del cache
    gc.collect()
    handle = failing(model.lm_head)
    with pytest.raises(Failure), torch.no_grad():
        model(tokens(2, 3), past_key_values=copied)
    handle.remove()
    assert lengths(copied) == [14] * LAYERS


def test_positional_arguments_have_the_names_of_the_forward_that_runs():
    module = ZOO["llama"].build()
    assert _named(module, (1, 2), {"use_cache": 3}) == {
        "input_ids": 1, "attention_mask": 2, "use_cache": 3
    }  # fmt: skip
    module.forward = lambda cache, ids: None
    assert _named(module, (1, 2), {}) == {"cache": 1, "ids": 2}
