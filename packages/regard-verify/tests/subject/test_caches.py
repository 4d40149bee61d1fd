"""The ways in which layers of strangers take their caches are found out."""

import pytest
import torch

import positioned
import stores
from regard_verify import check, understand

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


def test_a_cache_is_judged_in_a_layer():
    report = check(stores.Memory)
    assert "name a module whose forward(x, cache=None) updates it" in report.problem


def no_layer():
    return stores.OneLayer()


@pytest.mark.parametrize(
    ("made_by", "declared", "way"),
    [
        (stores.WithOneLayer, {"new_cache": stores.OneLayer}, "cache, single"),
        (stores.WithOneLayer, {"new_cache": no_layer}, "cache, single"),
        (stores.WithMemory, {"new_cache": stores.Memory}, "store, object"),
    ],
)
def test_a_declared_cache_is_of_all_layers_if_it_is_given_a_layer(made_by, declared, way):
    report = check(made_by, declared, only=STEPS)
    assert report.inferred["cache"] == way
    assert report.failed == []


def test_a_cache_of_one_layer_that_is_declared_as_of_all_layers_is_shared():
    like = {"new_cache": stores.OneLayer, "cache_style": "object"}
    assert check(stores.WithOneLayer, like, only=STEPS).failed == ["one_past_two_layers"]


class FourRows(stores.Attention):
    """It has places for 4 rows of a batch, and writes them in every call."""

    def __init__(self, dim=32):
        super().__init__(dim, 4, 2)
        self.register_buffer("rows", torch.zeros(4, 2, 64, dim // 4))

    def forward(self, x):
        def write(k, v):
            self.rows[: len(x), :, : x.shape[1]] = k.detach()
            return k, v

        return self.attend(x, write)


def test_a_layer_with_places_for_four_rows_is_right():
    report = check(FourRows, quick=True)
    assert report.failed == []
    assert "batch_invariance" in {each.law for each in report.having("passed")}
