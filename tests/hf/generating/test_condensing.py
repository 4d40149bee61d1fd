"""Caches of models whose text is condensed once it is read."""

from pydoc_data.topics import topics as TOPICS

import pytest
import torch
from torch.nn.functional import cross_entropy

import regard.hf
from regard.cache import SlidingCache
from regard.cache.quantized import QuantizedWindow
from regard.convert import windows_of
from regard.sparse import CondensingCache
from zoo import ZOO, inputs, tokens

SOME = ("llama", "gpt-oss", "gemma3", "deepseek-v3")  # plain, sinks and windows, norms, latents


def _model(name):
    model = ZOO[name].build()
    regard.hf.install(model)
    return model


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_a_budget_that_holds_all_changes_nothing(name):
    model, given = _model(name), inputs(name, padding="left", length=12)
    cache = regard.hf.cache(model, "condensing")
    model(**given, past_key_values=cache)
    mask = given["attention_mask"]
    regard.hf.condense(cache, given["input_ids"], 1.0, attention_mask=mask)
    assert cache.get_seq_length() == 12
    plain = regard.hf.cache(model)
    model(**given, past_key_values=plain)
    more = {"input_ids": tokens(len(mask), 3)}
    more["attention_mask"] = torch.cat([mask, torch.ones_like(more["input_ids"])], 1)
    got, want = (model(**more, past_key_values=each).logits for each in (cache, plain))
    assert (got - want).abs().max() < 1e-5


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_a_share_of_the_tokens_of_layers_without_a_window(name):
    model, text = _model(name), tokens(1, 60)
    cache = regard.hf.cache(model, "condensing", format="K8V8")
    model(text, past_key_values=cache)
    regard.hf.condense(cache, text, 0.5)
    own = [each for each in cache.caches if isinstance(each, CondensingCache)]
    heads = [rows for each in own for rows in each.rows]
    assert sum(heads) == 30 * len(heads)
    windows = [each for each in cache.caches if not isinstance(each, CondensingCache)]
    assert all(isinstance(each, SlidingCache | QuantizedWindow) for each in windows)
    assert model(text[:, :2], past_key_values=cache).logits.isfinite().all()
    assert cache.get_seq_length() == 62


def _weights(model, text, pieces):
    """The attention weights of the model's own eager forward, `[layers, H, L, S]`: of a text, and
    of each piece of it when that follows the text, over the tokens of the text."""
    found = []
    for piece in text.split(pieces, 1):
        every = model(torch.cat([text, piece], 1), output_attentions=True).attentions
        found.append(torch.cat(every)[:, :, text.shape[1] :, : text.shape[1]])
    return torch.cat(found, 2)


@pytest.mark.parametrize("pieces", [1024, 17, 1])
@torch.no_grad()
def test_tokens_are_kept_by_the_models_own_attention_to_them(pieces, monkeypatch):
    """Queries of a later piece see the text, and not the pieces before it."""
    monkeypatch.setattr("regard.hf.generating.condensing.REPEATED", pieces)
    model, text = ZOO["llama"].build(), tokens(1, 40)
    model.set_attn_implementation("eager")
    weights = _weights(model, text, pieces)
    regard.hf.install(model)
    cache = regard.hf.cache(model, "condensing")
    for some in text.split([37, 1, 1, 1], 1):
        model(some, past_key_values=cache)
    regard.hf.condense(cache, text, 0.5, sinks=2, recent=3)
    heads = len(cache.caches[0].rows)
    scores = weights.unflatten(1, (heads, -1)).mean(2).amax(2).flatten(0, 1)
    scores[:, :2] = scores[:, -3:] = torch.inf
    kept = torch.zeros(scores.numel()).index_fill_(0, scores.flatten().topk(20 * len(scores))[1], 1)
    want = [row.nonzero().flatten().tolist() for row in kept.view_as(scores)]
    assert [slots[0].tolist() for each in cache.caches for slots in each.slots] == want


@torch.no_grad()
def test_a_call_that_fails_changes_no_layer():
    model, text = _model("llama"), tokens(1, 40)
    cache = regard.hf.cache(model, "condensing")
    model(text, past_key_values=cache)
    rows = [each.rows for each in cache.caches]
    broken, model.model.norm.forward = model.model.norm.forward, None
    with pytest.raises(TypeError):
        regard.hf.condense(cache, text, 0.5)
    model.model.norm.forward = broken
    assert (cache.get_seq_length(), [each.rows for each in cache.caches]) == (40, rows)
    assert model(text[:, :2], past_key_values=cache).logits.isfinite().all()


@torch.no_grad()
def test_other_texts_and_caches_are_refused():
    model, text = _model("llama"), tokens(1, 40)
    cache = regard.hf.cache(model, "condensing")
    model(text, past_key_values=cache)
    with pytest.raises(ValueError, match="40 tokens are held, got 39"):
        regard.hf.condense(cache, text[:, 1:])
    plain = regard.hf.cache(model)
    model(text, past_key_values=plain)
    with pytest.raises(ValueError, match="no cache is a CondensingCache"):
        regard.hf.condense(plain, text)
    with pytest.raises(ValueError, match="takes format="):
        regard.hf.cache(model, "condensing", budget=0.5)


@pytest.mark.long
@torch.no_grad()
def test_a_model_still_knows_a_text_of_which_it_keeps_half():
    """Its loss on a second reading is near that with the whole text, which streaming loses."""
    try:
        model, tokenizer = regard.hf.smollm2()
    except OSError:
        pytest.skip("SmolLM2-135M-Instruct is not here, and cannot be fetched")
    text = windows_of(tokenizer, [TOPICS["assert"]], length=256, most=1)
    losses = {}
    streaming = {"budget": 0.5, "score": regard.sparse.Streaming()}
    regard.hf.install(model)
    for name, options in {"growing": {}, "condensing": {}, "evicting": streaming}.items():
        cache = regard.hf.cache(model, name, **options)
        model(text, past_key_values=cache)
        if name == "condensing":
            regard.hf.condense(cache, text, 0.5)
        logits = model(text, past_key_values=cache).logits[0]
        losses[name] = float(cross_entropy(logits[:-1], text[0, 1:]))
    assert losses["condensing"] < losses["growing"] + 0.1
    assert losses["evicting"] > losses["growing"] + 0.3
