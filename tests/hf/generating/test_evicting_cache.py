"""generate with caches that keep a budget of tokens."""

import pytest
import torch

import regard.hf
from covering import covering
from regard.cache import SlidingCache
from regard.cache.quantized import QuantizedWindow
from regard.sparse import H2O, EvictingCache, QuantizedEvicting, SnapKV, Streaming
from zoo import ZOO, inputs, tokens

SOME = ("llama", "gpt-oss", "gemma3", "deepseek-v3")  # plain, sinks and windows, norms, latents
STEPS = 20


def _model(name):
    model = ZOO[name].build()
    model.generation_config.eos_token_id = None  # write to the end
    model.generation_config.pad_token_id = 0
    regard.hf.install(model)
    return model


def _write(model, given, **options):
    settings = {"max_new_tokens": STEPS, "do_sample": False, "disable_compile": True, **options}
    return model.generate(**given, **settings)


@pytest.mark.parametrize("name", SOME)
def test_a_budget_that_holds_all_writes_the_same_text(name):
    model, given = _model(name), inputs(name, padding="left", length=9)
    cache = regard.hf.cache(model, "evicting", budget=1.0)
    assert _write(model, given, past_key_values=cache).equal(_write(model, given))


@pytest.mark.parametrize(
    ("name", "score"), covering(SOME, [Streaming(), SnapKV(4, 3), H2O()], together=1), ids=repr
)
def test_rows_of_a_padded_batch_write_what_they_write_alone(name, score):
    """So slots and positions are those of each row's own tokens, and padding takes no room."""
    model, given = _model(name), inputs(name, padding="left", length=9)
    settings = {"budget": 12, "sinks": 2, "recent": 3, "score": score}
    cache = regard.hf.cache(model, "evicting", **settings)
    together = _write(model, given, past_key_values=cache)
    held = [each.rows for each in cache.caches if isinstance(each, EvictingCache)]
    assert held
    assert set(held) == {12}
    assert cache.get_seq_length() == 9 + STEPS - 1
    for row, valid in enumerate(given["attention_mask"].bool()):
        alone = {"input_ids": given["input_ids"][row, valid][None]}
        alone["attention_mask"] = torch.ones_like(alone["input_ids"])
        its = regard.hf.cache(model, "evicting", **settings)
        text = _write(model, alone, past_key_values=its)
        assert text[0, -STEPS:].equal(together[row, -STEPS:])


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
@torch.no_grad()
def test_layers_that_share_keys_attend_to_all_before_any_are_evicted(name):
    model, ids = _model(name), tokens(2, 14)
    cache = regard.hf.cache(model, "evicting", budget=9, sinks=2, recent=3)
    got = [model(some, past_key_values=cache).logits for some in ids.split([8, 6], 1)]
    assert (torch.cat(got, 1) - model(ids, use_cache=False).logits).abs().max() < 5e-5
    assert [each.rows for each in cache.caches if isinstance(each, EvictingCache)] == [9]


def test_beams_and_chunks_of_a_prompt():
    model = _model("llama")
    ids = tokens(2, 17)
    settings = {"budget": 14, "sinks": 2, "recent": 3, "score": Streaming()}
    for options in ({"num_beams": 3}, {"prefill_chunk_size": 5}):
        cache = regard.hf.cache(model, "evicting", **settings)
        text = _write(model, {"input_ids": ids}, past_key_values=cache, **options)
        assert text.shape[1] == 17 + STEPS
        assert {each.rows for each in cache.caches} == {14}


def test_layers_with_a_window_hold_it_and_formats_are_those_of_codes():
    model = _model("gemma3")
    cache = regard.hf.cache(model, "evicting", budget=0.5)
    assert [type(each) for each in cache.caches] == [SlidingCache, EvictingCache, SlidingCache]
    cache = regard.hf.cache(model, "evicting", budget=0.5, format="K8V4")
    kinds = [QuantizedWindow, QuantizedEvicting, QuantizedWindow]
    assert [type(each) for each in cache.caches] == kinds
    assert _write(model, {"input_ids": tokens(1, 40)}, past_key_values=cache).shape == (1, 60)
    share = cache.caches[1].rows / cache.get_seq_length()
    assert 0.4 < share <= 0.5


def test_one_value_for_each_layer():
    model = _model("llama")
    cache = regard.hf.cache(model, "evicting", budget=[40, 30, 0.5], score=[Streaming()] * 3)
    assert [each.budget for each in cache.caches] == [40, 30, 0.5]
    with pytest.raises(ValueError, match="budget has 2 values for 3 layers"):
        regard.hf.cache(model, "evicting", budget=[40, 30])


def test_refusals():
    model = ZOO["llama"].build()
    cache = regard.hf.cache(model, "evicting", budget=0.5)
    with pytest.raises(ValueError, match=r"regard\.hf\.install\(model\)"):
        model(tokens(1, 30), past_key_values=cache)
    assert cache.get_seq_length() == 0
    installed = _model("llama")
    cache = regard.hf.cache(installed, "evicting", budget=24, sinks=2, recent=3)
    with torch.no_grad():
        installed(tokens(1, 40), past_key_values=cache)
    with pytest.raises(ValueError, match="rows were evicted when 40 tokens"):
        cache.truncate(39)
    biased = _model("falcon alibi")
    cache = regard.hf.cache(biased, "evicting")
    with pytest.raises(ValueError, match="without a score bias"), torch.no_grad():
        biased(tokens(1, 30), past_key_values=cache)


@pytest.mark.long
def test_smollm2_writes_the_same_sentence_from_most_of_its_prompt():
    try:
        model, tokenizer = regard.hf.smollm2()
    except OSError as reason:
        pytest.skip(str(reason))
    regard.hf.install(model)
    prompt = "The capital of France is Paris. " * 12 + "The capital of France is"
    given = tokenizer(prompt, return_tensors="pt")
    texts = []
    for options in ({"budget": 1.0}, {"budget": 0.5}, {"budget": 0.5, "format": "K8V4"}):
        cache = regard.hf.cache(model, "evicting", **options)
        out = model.generate(**given, past_key_values=cache, max_new_tokens=6, do_sample=False)
        texts.append(tokenizer.decode(out[0, given["input_ids"].shape[1] :]))
    assert "Paris" in texts[0]
    assert texts == texts[:1] * 3
