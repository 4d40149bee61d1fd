"""Caches in pages for generate: the same text, and prompts that begin alike are computed once."""

import copy
import gc

import pytest
import torch

import regard.hf
from covering import covering
from prompts import NEW, PAGE, model_of, paged, write
from regard.cache.paging.pool import PagePool
from zoo import inputs, tokens

FAMILIES = ["llama", "mistral", "gemma3", "deepseek-v3", "gpt2", "falcon alibi"]


@pytest.fixture
def fed(monkeypatch):
    """A list of the numbers of tokens that calls of a model are fed."""
    lengths = []

    def count(model):
        embedding = model.get_input_embeddings()
        embedding.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
        return lengths

    return count


@pytest.fixture
def pool():
    return PagePool(2000, PAGE)


@pytest.mark.parametrize(("name", "installed"), covering(FAMILIES, [False, True], together=1))
def test_a_prompt_is_found_by_the_next_cache(name, installed, pool, fed):
    model, ids = model_of(name), tokens(1, 30)
    if installed:
        regard.hf.install(model)
    lengths, expected = fed(model), write(model, ids, regard.hf.cache(model))
    first, second = paged(model, pool), paged(model, pool)
    assert write(model, ids, first).equal(expected)
    assert first.found == 0
    lengths.clear()
    assert write(model, ids, second).equal(expected)
    assert second.found == 28  # whole pages, and not the last token
    assert lengths == [2] + [1] * (NEW - 1)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_prompt_that_leaves_another_at_any_page(name, pool):
    """Of a window too: its pages are stored with the prompt, though the text has gone on."""
    model, ids = model_of(name), tokens(1, 30)
    write(model, ids, paged(model, pool))
    for same, found in [(29, 28), (17, 16), (7, 4), (3, 0)]:
        other = torch.cat([ids[:, :same], (ids[:, same:] + 1) % 50 + 3], 1)
        expected = write(model, other, regard.hf.cache(model))
        cache = paged(model, pool)
        assert write(model, other, cache).equal(expected)
        assert cache.found == found


def test_what_was_generated_is_found_too(pool, fed):
    model = model_of("llama")
    lengths, ids = fed(model), tokens(1, 9)
    text = write(model, ids, paged(model, pool))
    turn = torch.cat([text, tokens(1, 6)], 1)
    expected = write(model, turn, regard.hf.cache(model))
    lengths.clear()
    cache = paged(model, pool)
    assert write(model, turn, cache).equal(expected)
    assert cache.found == 16  # of 17 that have been fed
    assert lengths[0] == 24 - 16


def test_a_cache_that_goes_on_stores_its_later_turns(pool):
    model, ids = model_of("llama"), tokens(1, 9)
    cache = paged(model, pool)
    text = write(model, ids, cache)
    turn = torch.cat([text, tokens(1, 6)], 1)
    text = write(model, turn, cache)
    other = paged(model, pool)
    assert write(model, turn, other).equal(text)
    assert other.found == 20


def test_rows_share_what_they_begin_with(pool):
    model, ids = model_of("llama"), tokens(1, 21)
    write(model, ids, paged(model, pool), max_new_tokens=1)
    batch = torch.cat([ids.expand(3, -1), tokens(3, 5)], 1)
    expected = write(model, batch, regard.hf.cache(model))
    cache = paged(model, pool)
    assert write(model, batch, cache).equal(expected)
    assert cache.found == 20
    first, *others = (row.pages for row in cache.layers[0].cache.rows)
    assert all(row[:5] == first[:5] for row in others)
    assert not any(set(row[5:]) & set(first[5:]) for row in others)


def test_the_shortest_match_of_all_rows_counts(pool):
    model = model_of("mistral")
    one, two = tokens(1, 25), tokens(1, 26)[:, :25]
    write(model, one, paged(model, pool), max_new_tokens=1)
    write(model, two[:, :14], paged(model, pool), max_new_tokens=1)
    batch = torch.cat([one, two])
    expected = write(model, batch, regard.hf.cache(model))
    cache = paged(model, pool)
    assert write(model, batch, cache).equal(expected)
    assert cache.found == 12


@pytest.mark.parametrize(
    ("name", "options"),
    covering(
        ["llama", "mistral", "deepseek-v3"],
        [
            {"num_beams": 3},
            {"do_sample": True, "num_return_sequences": 3, "top_k": 5},
            {"prefill_chunk_size": 7},
            {"return_dict_in_generate": True, "output_scores": True},
        ],
        together=1,
    ),
)
def test_ways_to_generate(name, options, pool):
    model, ids = model_of(name), tokens(2, 18)
    regard.hf.install(model)
    caches = [regard.hf.cache(model), paged(model, pool), paged(model, pool)]
    texts = []
    for cache in caches:
        torch.manual_seed(5)
        text = write(model, ids, cache, **options)
        texts.append(getattr(text, "sequences", text))
    assert texts[1].equal(texts[0])
    assert texts[2].equal(texts[0])
    assert caches[2].found == (4 if "prefill_chunk_size" in options else 16)


def test_beams_and_samples_of_one_prompt_share_its_pages(pool):
    model = model_of("llama")
    cache = paged(model, pool)
    write(model, tokens(1, 18), cache, num_return_sequences=4, do_sample=True, max_new_tokens=1)
    rows = cache.layers[1].cache.rows
    assert len(rows) == 4
    assert (
        len({page for row in rows for page in row.pages}) == 4 + 4
    )  # sealed once, open four times


@pytest.mark.parametrize("name", ["mistral", "deepseek-v3"])
def test_rejected_tokens_of_an_assistant_are_removed(name, pool):
    model, assistant = model_of(name), model_of("llama")
    regard.hf.install(model)
    ids = tokens(1, 9)
    before = write(model, ids, regard.hf.cache(model))
    for _ in range(2):
        cache = paged(model, pool)
        assert write(model, ids, cache, assistant_model=assistant).equal(before)
    assert cache.found == 8


@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_decoders_of_pairs_have_pages_and_no_prefixes(name, pool):
    model, given = model_of(name), inputs(name, length=9)
    given.pop("decoder_input_ids", None)
    expected = write(model, given, regard.hf.cache(model))
    for _ in range(2):
        cache = paged(model, pool)
        assert write(model, given, cache).equal(expected)
        assert cache.self_attention_cache.found == 0
    assert pool.weights is None


def test_exhaustion_in_a_late_layer_leaves_all_layers_and_the_pool(pool):
    model, ids = model_of("llama"), tokens(1, 18)
    pool = PagePool(3 * 5 + 2, PAGE)
    cache = paged(model, pool)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        pages = pool.pages_in_use
        with pytest.raises(ValueError, match="larger PagePool"):
            model(tokens(1, 7), past_key_values=cache)
        assert [each.length for each in cache.caches] == [18] * 3
        assert pool.pages_in_use == pages
        want = model(torch.cat([ids, ids[:, :2]], 1)).logits[:, -2:]
        got = model(ids[:, :2], past_key_values=cache).logits
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5)


def test_a_failed_first_call_gives_what_it_found_back(pool):
    model, ids = model_of("llama"), tokens(1, 18)
    write(model, ids, paged(model, pool), max_new_tokens=1)
    before, cache = pool.pages_in_use, paged(model, pool)
    handle = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(model, ids, cache)
    handle.remove()
    gc.collect()
    assert (cache.get_seq_length(), pool.pages_in_use, pool.nbytes.held) == (0, before, 0)
    assert write(model, ids, cache).equal(write(model, ids, regard.hf.cache(model)))
    assert cache.found == 16


def test_reordering_needs_room_for_all_layers():
    model, ids = model_of("llama"), tokens(2, 6)
    pool = PagePool(3 * 4 + 2, PAGE)
    cache = paged(model, pool, prefixes=False)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="larger PagePool"):
        cache.reorder(torch.tensor([0, 1, 1]))
    assert [len(each.rows) for each in cache.caches] == [2] * 3
    cache.reorder(torch.tensor([1, 1]))
    assert [len(each.rows) for each in cache.caches] == [2] * 3


def test_truncation_and_forks_need_room_for_all_layers():
    model, pool = model_of("llama"), PagePool(3 * 5 + 2, PAGE)
    cache = paged(model, pool)
    with torch.no_grad():
        model(tokens(1, 20), past_key_values=cache)
    with pytest.raises(ValueError, match="larger PagePool"):  # for copies of pages that are stored
        cache.truncate(19)
    assert [each.length for each in cache.caches] == [20] * 3
    cache.truncate(13)
    assert [each.length for each in cache.caches] == [13] * 3
    small = PagePool(3 * 4 + 2, PAGE)
    cache = paged(model, small)
    with torch.no_grad():
        model(tokens(1, 13), past_key_values=cache)
    with pytest.raises(ValueError, match="larger PagePool"):
        cache.fork()
    gc.collect()
    assert small.pages_in_use == 12


def test_forks_go_on_by_themselves(pool):
    model, ids = model_of("mistral"), tokens(1, 18)
    cache = paged(model, pool)
    write(model, ids, cache, max_new_tokens=1)
    forks = [cache.fork(), copy.deepcopy(cache)]
    assert all(fork.pool is pool for fork in forks)
    with torch.no_grad():
        for number, each in enumerate([cache, *forks]):
            more = tokens(1, 5 + number)
            want = model(torch.cat([ids, more], 1)).logits[:, -1:]
            got = model(more, past_key_values=each).logits[:, -1:]
            torch.testing.assert_close(got, want, rtol=0, atol=5e-5)
    found = paged(model, pool)
    write(model, torch.cat([ids, tokens(1, 7)], 1), found, max_new_tokens=1)
    assert found.found == 24


def test_when_every_cache_is_gone_no_page_is_held(pool):
    model = model_of("gemma3")
    caches = [paged(model, pool) for _ in range(3)]
    for number, cache in enumerate(caches):
        write(model, tokens(2, 9 + number), cache, num_beams=2)
    caches[0].reset()
    del cache, caches
    gc.collect()
    assert pool.nbytes.held == 0
    pool.evict()
    assert pool.pages_in_use == 0
