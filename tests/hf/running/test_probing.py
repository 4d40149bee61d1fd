"""The probe notices another result, once a kind, and changes nothing."""

import pytest
import torch
import transformers

from regard.hf.families import recognising
from regard.hf.families.table import FAMILIES
from regard.hf.running import heads, probing

SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 9}


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setattr(probing, "_AGREED", set())
    monkeypatch.setattr(recognising, "_REFUSED", {})
    config = transformers.GraniteConfig(**SIZES, num_hidden_layers=1, intermediate_size=16)
    return transformers.GraniteForCausalLM(config).train().model.layers[0].self_attn


def test_the_same_computation_agrees_and_is_tried_once(module):
    calls = []

    def counted(*args, **given):
        calls.append(1)
        return heads.forward(*args, **given)

    state = torch.get_rng_state()
    for _ in range(2):
        assert probing.disagreement(FAMILIES["LlamaAttention"], module, counted) is None
        assert len(calls) == 5  # without a mask, with padding, three calls with a cache
    assert module.training
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        ("no mask", lambda given: True),
        ("padding", lambda given: given.get("attention_mask") is not None),
        ("a cache", lambda given: given.get("past_key_values") is not None),
    ],
    ids=["no mask", "padding", "a cache"],
)
def test_another_result_is_refused_with_the_case(module, case, wrong):
    def forward(*args, **given):
        out, weights = heads.forward(*args, **given)
        return out * 1.01 if wrong(given) else out, weights

    why = probing.disagreement(FAMILIES["LlamaAttention"], module, forward)
    assert f"differ with {case}" in why
    assert recognising._REFUSED[type(module)] == why


def test_an_attribute_that_is_missing_is_said(module):
    why = probing.disagreement(FAMILIES["LlamaAttention"], module, lambda *a, **given: a[0].cap)
    assert "no attribute 'cap'" in why


def test_weights_that_are_not_here_are_not_tried(module):
    assert probing.disagreement(FAMILIES["LlamaAttention"], module.to("meta"), None) is None
