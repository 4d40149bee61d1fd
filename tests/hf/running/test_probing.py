"""The probe notices another result, once a kind, and changes nothing."""

import inspect

import pytest
import torch
import transformers

import regard.hf
from regard.hf.families import recognising
from regard.hf.families.finding import find
from regard.hf.families.table import FAMILIES
from regard.hf.packages import cache_in
from regard.hf.running import heads, installing, probing
from zoo import ZOO

SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 9}


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setattr(probing, "_AGREED", set())
    monkeypatch.setattr(recognising, "_REFUSED", {})
    config = transformers.GraniteConfig(**SIZES, num_hidden_layers=1, intermediate_size=16)
    return transformers.GraniteForCausalLM(config).train().model.layers[0].self_attn


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_same_computation_agrees_and_is_tried_once(module, dtype):
    calls, module = [], module.to(dtype)

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
        ("a cache", lambda given: cache_in(given) is not None),
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


@pytest.mark.parametrize("name", ZOO)
def test_classes_of_the_table_are_tried_too(name, monkeypatch):
    """In every case: their own forwards can be called, and ours agree until they compute more."""
    alone = {"llama4": "other angles", "gemma3n": "other layers' keys", "gemma4": "the same"}
    monkeypatch.setattr(probing, "_AGREED", set())
    monkeypatch.setattr(recognising, "_REFUSED", {})
    cases, untried = [], []
    own_cases = probing._cases
    for module in find(ZOO[name].build()).known.values():
        family = recognising.family_of(module)
        forward = installing.forward_of(module)

        def called(family, module, seen=forward):
            for case, run in own_cases(family, module):
                try:
                    run(type(module).forward)
                    cases.append(case)
                except (AttributeError, KeyError):
                    untried.append(module)
                yield case, run

        monkeypatch.setattr(probing, "_cases", called)
        assert probing.disagreement(family, module, forward) is None

    assert {"no mask", "padding"} <= {*cases} or name == "llama4"
    assert not untried or name.split()[0] in alone


def test_a_named_class_whose_source_has_changed_is_run_by_its_own_forward(monkeypatch):
    """As in a release of transformers that changes what the class computes."""
    monkeypatch.setattr(probing, "_AGREED", set())
    monkeypatch.setattr(recognising, "_REFUSED", {})
    model = ZOO["llama"].build()
    kind = type(model.model.layers[0].self_attn)
    own = kind.forward

    def louder(self, hidden_states, *args, **given):
        out, weights = own(self, hidden_states, *args, **given)
        return 1.5 * out, weights

    louder.__signature__ = inspect.signature(own)
    monkeypatch.setattr(kind, "forward", louder)
    ids = torch.tensor([[3, 4, 5]])
    before = model(ids).logits
    with pytest.raises(ValueError, match="attention that regard does not know: LlamaAttention"):
        regard.hf.install(model)
    assert "its outputs differ with no mask, by 3.3e-01" in recognising.nearest(kind)
    assert model(ids).logits.equal(before)


@pytest.mark.parametrize("window", [3, 4, 5, 6])
def test_windows_shorter_than_the_tokens_of_the_probe_agree(window, monkeypatch):
    """The model passes the mask of a window: a module that is called without one shows all keys."""
    monkeypatch.setattr(probing, "_AGREED", set())
    monkeypatch.setattr(recognising, "_REFUSED", {})
    sizes = SIZES | {"num_hidden_layers": 1, "intermediate_size": 16}
    config = transformers.MistralConfig(**sizes, sliding_window=window)
    module = transformers.MistralForCausalLM(config).eval().model.layers[0].self_attn
    family = FAMILIES["MistralAttention"]
    assert probing.disagreement(family, module, heads.forward) is None

    def without_window(module, *args, **given):
        given["attention_mask"] = None
        return heads.forward(module, *args, **given)

    monkeypatch.setattr(probing, "_AGREED", set())
    why = probing.disagreement(family, module, without_window)
    assert "differ" in why


def test_an_attribute_that_is_missing_is_said(module):
    why = probing.disagreement(FAMILIES["LlamaAttention"], module, lambda *a, **given: a[0].cap)
    assert "no attribute 'cap'" in why


def test_weights_that_are_not_here_are_not_tried(module):
    assert probing.disagreement(FAMILIES["LlamaAttention"], module.to("meta"), None) is None
