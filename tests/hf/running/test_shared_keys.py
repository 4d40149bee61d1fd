"""Gemma 3n and 4 under install: layers that read the keys of others, and keys that are values."""

import pytest
import torch
from transformers import DynamicCache, cache_utils

import regard.hf
from regard.cache import Part
from regard.hf.running.calls import CachedKeys
from zoo import ZOO, tokens

SHARED, TIED = ["gemma3n", "gemma4"], "gemma4 tied"
OPTIONS = {
    "auto": {},
    "growing": {},
    "static": {"max_length": 40},
    "paged": {"page_size": 4, "tokens": 256},
    "quantized": {"bits": 8, "group": 8},
}
PIECES = ((0, 6), (6, 7), (7, 8), (8, 11), (11, 13))
IDS = tokens(2, 13)


def masked() -> torch.Tensor:
    mask = torch.ones_like(IDS)
    mask[1, :3] = 0
    return mask


@torch.no_grad()
def own_logits(name, dtype=torch.float64):
    model = ZOO[name].build().to(dtype)
    return model, model(input_ids=IDS, attention_mask=masked()).logits


@torch.no_grad()
def stepwise(model, cache):
    outs = [
        model(
            input_ids=IDS[:, start:stop],
            past_key_values=cache,
            attention_mask=masked()[:, :stop],
        ).logits
        for start, stop in PIECES
    ]
    return torch.cat(outs, 1)


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", [*SHARED, TIED])
def test_every_cache_gives_the_models_own_logits(name, kind):
    model, wanted = own_logits(name)
    regard.hf.install(model)
    out = stepwise(model, regard.hf.cache(model, kind, **OPTIONS[kind]))
    shown = masked().bool()
    bound = 0.1 if kind == "quantized" else 2e-5  # norms of float64 models are in float32
    largest = wanted[shown].abs().max()
    assert (out - wanted)[shown].abs().max() <= bound * largest


@pytest.mark.parametrize("name", [*SHARED, TIED])
def test_transformers_own_cache_works_too(name):
    model, wanted = own_logits(name)
    regard.hf.install(model)
    out = stepwise(model, DynamicCache(config=model.config))
    shown = masked().bool()
    torch.testing.assert_close(out[shown], wanted[shown], rtol=0, atol=1e-5)


def test_a_tied_layer_holds_one_stream_and_the_others_two():
    model, _ = own_logits(TIED)
    report = regard.hf.install(model)
    assert [each.rules for each in report.layers][1] == ("values cached as keys",)
    cache = regard.hf.cache(model, "growing")
    stepwise(model, cache)
    window, tied = (each.empty_streams for each in cache.caches[:2])
    assert [each.shape[-1] for each in window] == [8, 8]
    assert [each.shape[-1] for each in tied] == [16 + 4]  # a quarter of 16 channels is rotated


def test_shared_layers_hold_nothing_and_say_so():
    model, _ = own_logits("gemma4")
    report = regard.hf.install(model)
    assert ["keys of an earlier layer" in each.rules for each in report.layers] == [
        False,
        False,
        True,
        True,
    ]
    assert len(regard.hf.cache(model).caches) == 2


@pytest.mark.parametrize("name", [*SHARED, TIED])
def test_generation_with_beams_writes_the_models_own_text(name):
    model = ZOO[name].build().double()
    given = {"attention_mask": masked(), "max_new_tokens": 9, "do_sample": False, "num_beams": 3}
    before = model.generate(IDS, **given)
    regard.hf.install(model)
    for kind in ("auto", "paged"):
        cache = regard.hf.cache(model, kind, **OPTIONS[kind])
        assert torch.equal(model.generate(IDS, past_key_values=cache, **given), before)


@pytest.mark.skipif(not hasattr(cache_utils, "KVSharingDict"), reason="transformers is older")
def test_a_module_reads_pages_and_the_rest_of_transformers_reads_tensors():
    k, v = torch.randn(2, 1, 2, 5, 4).unbind()
    whole = (Part(0, 3, (k[:, :, :3], v[:, :, :3])), Part(3, 5, (k[:, :, 3:], v[:, :, 3:])))
    shared = cache_utils.KVSharingDict()
    shared["full_attention"] = CachedKeys(whole)
    assert shared["full_attention"].parts is whole
    assert all(map(torch.equal, shared["full_attention"], (k, v)))
    shared.to(torch.device("cpu"))  # as accelerate moves them: tensors then
    assert all(map(torch.equal, shared["full_attention"], (k, v)))
    assert not isinstance(shared["full_attention"], CachedKeys)


def test_a_joined_stream_is_one_tensor():
    latents = torch.randn(2, 1, 5, 4)
    (found,) = CachedKeys.of(latents)
    assert found.equal(latents)


def test_the_model_returns_what_it_shares_as_tensors():
    model = ZOO["gemma4"].build()
    regard.hf.install(model)
    with torch.no_grad():
        out = model(input_ids=IDS, return_shared_kv_states=True)
    keys, values = out.shared_kv_states["full_attention"]
    assert keys.shape == values.shape == (2, 2, 13, 16)


@pytest.mark.parametrize("kind", [None, "growing", "paged", "quantized"])
def test_keys_that_are_values_are_left_for_assistants_as_two_tensors(kind):
    """As from transformers 5.24 on, where models whose layers share nothing leave them, too."""
    model = ZOO[TIED].build().double()
    for layer in model.model.layers:
        layer.self_attn.store_full_length_kv = True
    given = {"input_ids": IDS, "return_shared_kv_states": True}
    with torch.no_grad():
        wanted = model(**given).shared_kv_states["full_attention"]
        assert "values cached as keys" in str(regard.hf.install(model))
        if kind is not None:
            given["past_key_values"] = regard.hf.cache(model, kind, **OPTIONS[kind])
        left = model(**given).shared_kv_states["full_attention"]
    # the model norms in float32; half a step of a code, which a rotation of 8 channels and its
    # inverse may widen by the root of 8 each
    near = 8 / 255 if kind == "quantized" else 4 * torch.finfo(torch.float32).eps
    for ours, theirs in zip(left, wanted, strict=True):
        assert (ours - theirs).abs().max() <= near * theirs.abs().max()
