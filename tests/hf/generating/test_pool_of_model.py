"""Pools of a model: what prefixes depend on besides tokens, and options."""

import pytest
import torch

import regard.hf
from prompts import PAGE, model_of, paged, write
from regard.cache.paging.pool import PagePool
from zoo import tokens


@pytest.fixture
def pool():
    return PagePool(2000, PAGE)


def test_nothing_is_shared_between_names(pool):
    model, ids = model_of("llama"), tokens(1, 18)
    write(model, ids, paged(model, pool, name="a"), max_new_tokens=1)
    for options, found in [
        ({}, 0),
        ({"name": "b"}, 0),
        ({"name": "a"}, 16),
        ({}, 16),  # stored by the first of these
    ]:
        cache = paged(model, pool, **options)
        write(model, ids, cache, max_new_tokens=1)
        assert cache.found == found, options


def test_a_pool_of_another_model_is_refused(pool):
    model, other, ids = model_of("llama"), model_of("llama"), tokens(1, 18)
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight[0, 0] += 1
    write(model, ids, paged(model, pool), max_new_tokens=1)
    before = pool.nbytes, pool.pages_in_use
    with pytest.raises(ValueError, match="give each model a pool of its own"):
        paged(other, pool)
    assert (pool.nbytes, pool.pages_in_use) == before


def test_weights_that_change_are_not_mixed(pool):
    model, ids = model_of("llama"), tokens(1, 18)
    write(model, ids, paged(model, pool), max_new_tokens=1)
    late = paged(model, pool)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match="give each model a pool of its own"):
        write(model, ids, late)
    assert late.get_seq_length() == 0
    with pytest.raises(ValueError, match="give each model a pool of its own"):
        paged(model, pool)


@pytest.mark.parametrize("through", ["data", "numpy"])
def test_a_number_of_the_embedding_written_between_two_texts_is_noticed(through, pool):
    """One number of a table, through what no version counter counts."""
    model, ids = model_of("llama"), tokens(1, 18)
    write(model, ids, paged(model, pool), max_new_tokens=1)
    weight, row = model.get_input_embeddings().weight, int(ids[0, 3])
    if through == "data":
        weight.data[row, 1] = 1.0
    else:
        weight.detach().numpy()[row, 1] = 1.0
    with pytest.raises(ValueError, match="give each model a pool of its own"):
        paged(model, pool)
    cache = paged(model, PagePool(2000, PAGE))
    assert write(model, ids, cache).equal(write(model, ids, regard.hf.cache(model)))


def test_weights_that_change_during_a_text_store_no_more(pool):
    model, ids = model_of("llama"), tokens(1, 18)
    cache = paged(model, pool)
    write(model, ids, cache, max_new_tokens=1)
    weight = model.model.layers[1].self_attn.k_proj.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] += 1
        model(tokens(1, 9), past_key_values=cache)
        weight.copy_(before)
    again = paged(model, pool)
    write(model, torch.cat([ids, tokens(1, 9)], 1), again, max_new_tokens=1)
    assert again.found == 16


def test_latents_and_heads_of_one_model_are_not_mixed(pool):
    """Installed, MLA caches latents, else keys and values of each head."""
    model, ids = model_of("deepseek-v3"), tokens(1, 18)
    expected = write(model, ids, regard.hf.cache(model))
    write(model, ids, paged(model, pool))
    regard.hf.install(model)
    for found in (0, 16):
        cache = paged(model, pool)
        assert write(model, ids, cache).equal(expected)
        assert cache.found == found


def test_a_cache_without_a_pool_makes_one():
    model, ids = model_of("mistral"), tokens(1, 70)
    cache = regard.hf.cache(model, "paged")
    assert cache.pool.num_pages == 3 * 32 * 256 // 64
    assert repr(cache.layers[0]) == f"PagedCache({cache.pool!r}, window=5)"
    write(model, ids, cache)
    other = paged(model, cache.pool)
    write(model, ids, other)
    assert other.found == 64
    small = regard.hf.cache(model, "paged", tokens=10, page_size=4, format="K8V4")
    assert (small.pool.num_pages, small.pool.format.name) == (9, "K8V4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": 3}, "pool is a PagePool, got int"),
        ({"pool": PagePool(4, 4), "format": "K8V4"}, "format=.* is not that of pool=PagePool"),
        ({"pool": PagePool(4, 4), "page_size": 8}, "page_size=8 is not that of pool=PagePool"),
        ({"pool": PagePool(4, 4), "tokens": 8}, "tokens=8 is not that of pool=PagePool"),
        ({"format": "K9V9"}, "format='K9V9' is neither"),
        ({"tokens": 0}, "tokens is at least 1"),
        ({"bits": 8}, "kind='paged' takes pool=, format="),
    ],
)
def test_options_that_do_not_fit_are_a_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        regard.hf.cache(model_of("llama"), "paged", **options)


def test_under_autocast_pages_are_of_its_dtype(pool):
    model, ids = model_of("llama"), tokens(1, 18)
    write(model, ids, paged(model, pool), max_new_tokens=1)
    for found in (0, 16):
        cache = paged(model, pool)
        with torch.autocast("cpu", torch.bfloat16):
            write(model, ids, cache, max_new_tokens=3)
        assert cache.found == found


def steered(model):
    layer = model.model.layers[0]
    return layer.register_forward_hook(lambda *given: given[-1] + 1.0).remove


def replaced(model):
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: 3 * forward(x)
    return lambda: vars(mlp).pop("forward")


def replaced_after_install(model):
    attention = model.model.layers[0].self_attn
    regard.hf.install(model)
    ours = attention.forward

    def tripled(*args, **given):
        out, weights = ours(*args, **given)
        return 3 * out, weights

    def undo():
        attention.forward = ours
        regard.hf.uninstall(model)

    attention.forward = tripled
    return undo


def scaled(model):
    attention = model.model.layers[0].self_attn
    attention.scaling *= 4
    return lambda: setattr(attention, "scaling", attention.scaling / 4)


@pytest.mark.parametrize("change", [steered, replaced, replaced_after_install, scaled])
def test_what_is_changed_around_the_weights_is_not_mixed(change, pool):
    model, ids = model_of("llama"), tokens(1, 18)
    write(model, ids, paged(model, pool))
    for found in (0, 0) if change is not scaled else (0, 16):  # each hook is another one
        undo = change(model)
        expected, cache = write(model, ids, regard.hf.cache(model)), paged(model, pool)
        assert write(model, ids, cache).equal(expected)
        assert cache.found == found
        undo()
    cache = paged(model, pool)
    write(model, ids, cache)
    assert cache.found == 16


def test_an_empty_pool_may_be_of_other_weights(pool):
    model, ids = model_of("llama"), tokens(1, 18)
    cache = paged(model, pool)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] += 1
    write(model, ids, cache)
    again = paged(model, pool)
    write(model, ids, again)
    assert again.found == 16
