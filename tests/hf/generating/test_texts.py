"""Which calls of a model are about tokens alone, and which want the last logits only."""

import pytest
import torch

import regard.hf
from prompts import PAGE, model_of, paged, write
from regard.cache.paging.pool import PagePool
from zoo import inputs, tokens


@pytest.fixture
def pool():
    return PagePool(2000, PAGE)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_padded_rows_are_not_shared(name, pool):
    model, given = model_of(name), inputs(name, padding="left", length=17)
    expected = write(model, given, regard.hf.cache(model))
    for _ in range(2):
        cache = paged(model, pool)
        assert write(model, given, cache).equal(expected)
        assert cache.found == 0
    cache = paged(model, pool)  # the first row has no padding: it was stored
    write(model, given["input_ids"][:1], cache)
    assert cache.found == 16


def test_a_call_that_wants_all_logits_computes_all_tokens(pool):
    model, ids = model_of("llama"), tokens(1, 18)
    with torch.no_grad():
        whole = model(ids).logits
        for options in (
            {},
            {"logits_to_keep": 3},
            {"logits_to_keep": 3, "output_hidden_states": True},
        ):
            write(model, ids, paged(model, pool), max_new_tokens=1)
            cache = paged(model, pool)
            out = model(ids, past_key_values=cache, **options)
            keep = options.get("logits_to_keep", 18)
            torch.testing.assert_close(out.logits, whole[:, -keep:], rtol=0, atol=5e-5)
            assert cache.found == (12 if options == {"logits_to_keep": 3} else 0)
            assert cache.get_seq_length() == 18
        out = model(ids, past_key_values=paged(model, pool), output_hidden_states=True)
        assert out.hidden_states[0].shape[1] == 18


def test_arguments_by_position(pool):
    model, ids = model_of("llama"), tokens(1, 18)
    write(model, ids, paged(model, pool), max_new_tokens=1)
    cache = paged(model, pool)
    with torch.no_grad():
        out = model(ids, None, None, cache, logits_to_keep=1)
        torch.testing.assert_close(out.logits, model(ids).logits[:, -1:], rtol=0, atol=5e-5)
    assert cache.found == 16


def test_a_mask_that_hides_tokens_shares_nothing(pool):
    """Also without positions beside it."""
    model, ids = model_of("llama"), tokens(1, 18)
    write(model, ids, paged(model, pool), max_new_tokens=1)
    for hidden in (0, 1):
        mask, cache = torch.ones_like(ids), paged(model, pool)
        mask[:, :hidden] = 0
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1)
        assert cache.found == (0 if hidden else 16)


def test_positions_that_do_not_count_from_0_are_not_shared(pool):
    model, ids = model_of("llama"), tokens(1, 18)
    write(model, ids, paged(model, pool), max_new_tokens=1)
    for positions in (torch.arange(5, 23)[None], torch.arange(18)[None]):
        cache = paged(model, pool)
        with torch.no_grad():
            model(ids, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        assert cache.found == (0 if positions[0, 0] else 16)


def test_embeddings_and_dropout_are_not_shared(pool):
    model, ids = model_of("llama"), tokens(1, 18)
    cache = paged(model, pool)
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(ids), past_key_values=cache)
        model.train()
        model(ids, past_key_values=paged(model, pool))
        model.eval()
    cache = paged(model, pool)
    write(model, ids, cache, max_new_tokens=1)
    assert cache.found == 0
