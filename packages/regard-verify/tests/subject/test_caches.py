"""Caches of strangers, and the ways in which layers take them, are found out."""

import pytest
import torch

import positioned
import stores
from regard_verify import check, understand

KINDS = {
    stores.Memory: ("update", "crop(a length to keep)"),
    stores.Places: ("append", None),
    stores.ByPositions: ("update", None),
}
WAYS = {
    stores.WithMemory: "store, object",
    stores.WithOneLayer: "cache, single",
    stores.WithPast: "layer_past, tuple",
    stores.WithDictionary: "kv_cache, single",
    stores.WithStack: "prev_kv, tuple",
    stores.WithBuffers: "in the layer, internal",
    stores.WithAttributes: "in the layer, internal",
    positioned.CopiedAttention: "past_key_values, object",
    positioned.Complex: "in the layer, internal",
}
STEPS = ["chunked_prefill", "decode_equals_full", "one_past_two_layers"]


@pytest.mark.parametrize("made_by", KINDS)
def test_a_cache_needs_no_declaration(made_by):
    report = check(made_by, quick=True)
    assert report.kind == "cache"
    update, truncation = KINDS[made_by]
    assert report.inferred["methods"].split(", ")[0] == update
    assert report.inferred.get("truncation") == truncation
    assert report.failed == []
    assert len(report.having("passed")) >= 4


def test_a_cache_of_fixed_places_is_cut_to_those_in_use():
    assert understand(stores.Places).inferred["capacity"].startswith("128 places")


def test_a_truncation_that_keeps_too_much_is_noticed():
    report = check(stores.Cropped, only=["cache_state_machine"])
    assert report.failed == ["cache_state_machine"]
    assert "counts its tokens wrongly" in report.having("failed")[0].example.cause


@pytest.mark.parametrize("name", ["DynamicCache", "StaticCache"])
def test_caches_of_transformers(name):
    cache_utils = pytest.importorskip("transformers.cache_utils")
    report = check(getattr(cache_utils, name), only=["cache_state_machine", "cache_no_alias"])
    assert report.kind == "cache"
    assert report.failed == []
    assert len(report.having("passed")) == 2


@pytest.mark.parametrize("made_by", WAYS)
def test_how_a_layer_takes_its_cache(made_by):
    if made_by is positioned.CopiedAttention:
        pytest.importorskip("transformers")
    report = check(made_by, only=STEPS)
    assert report.inferred["cache"] == WAYS[made_by]
    assert report.failed == []
    assert {"chunked_prefill", "decode_equals_full"} <= {e.law for e in report.having("passed")}


def test_a_cache_that_is_not_used_is_none():
    assert understand(stores.Unused).inferred["cache"] == "none"


def test_a_cache_that_loses_a_token_is_noticed():
    report = check(stores.OffByOne, only=STEPS)
    assert report.inferred["cache"] == "kv_cache, single"
    assert "decode_equals_full" in report.failed


@pytest.mark.parametrize("made_by", [stores.WithBuffers, stores.WithAttributes])
def test_a_cache_in_the_layer_is_empty_again_for_each_sequence(made_by):
    stepper = understand(made_by).stepper
    x = torch.randn(2, 3, 32)
    first, _ = stepper.step(x, stepper.new())
    stepper.step(torch.randn(2, 3, 32), stepper.new())
    again, _ = stepper.step(x, stepper.new())
    assert torch.equal(first, again)
