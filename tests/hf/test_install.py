"""install changes who computes, and nothing else: logits, texts, classes, weights, hooks stay."""

import copy
import re

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, StaticCache

import regard.hf
from regard.hf.visible import visible
from tiny import FAMILIES, tiny, tokens

CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture(params=FAMILIES)
def model(request):
    return tiny(request.param)


def logits(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_logits_are_the_models_own(model, implementation):
    model.set_attn_implementation(implementation)
    ids = tokens(2, 13)
    before = logits(model, input_ids=ids)
    report = regard.hf.install(model)
    torch.testing.assert_close(logits(model, input_ids=ids), before, **CLOSE)
    assert len(report.layers) == model.config.num_hidden_layers


def test_every_attention_runs_on_regard(model, monkeypatch):
    calls = []
    prepare = regard.hf.installing.prepare
    monkeypatch.setattr(
        regard.hf.installing, "prepare", lambda *a, **o: calls.append(a) or prepare(*a, **o)
    )
    regard.hf.install(model)
    calls.clear()
    logits(model, input_ids=tokens(1, 5))
    assert len(calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_left_padding_is_not_seen(model, implementation):
    model.set_attn_implementation(implementation)
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[0, :4], mask[1, :1] = 0, 0
    before = logits(model, input_ids=ids, attention_mask=mask)
    regard.hf.install(model)
    after = logits(model, input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(after[mask.bool()], before[mask.bool()], **CLOSE)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}, {"num_beams": 2}])
def test_generate_writes_the_same_text(model, how, padded):
    ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0 if padded else 1
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, **how}
    options["disable_compile"] = True
    before = model.generate(ids, **options)
    regard.hf.install(model)
    assert model.generate(ids, **options).equal(before)


def test_a_static_cache_prefills_in_chunks(model):
    ids = tokens(1, 8)
    regard.hf.install(model)
    whole = logits(model, input_ids=ids)
    cache = StaticCache(config=model.config, max_cache_len=11)
    parts = [logits(model, input_ids=part, past_key_values=cache) for part in ids.split(3, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)


def test_gradients_are_the_models_own(model):
    ids = tokens(2, 6)

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    before = gradients()
    regard.hf.install(model)
    for after, other in zip(gradients(), before, strict=True):
        torch.testing.assert_close(after, other, atol=1e-5, rtol=1e-4)


def test_uninstalling_restores_to_the_bit(model):
    ids = tokens(2, 8)
    before, state = logits(model, input_ids=ids), dict(model.state_dict())
    modules = [(name, type(module)) for name, module in model.named_modules()]
    regard.hf.install(model)
    assert [(name, type(module)) for name, module in model.named_modules()] == modules
    assert all(
        state[name] is value or state[name].equal(value)
        for name, value in model.state_dict().items()
    )
    regard.hf.install(model)  # twice is once
    regard.hf.uninstall(model)
    regard.hf.uninstall(model)
    assert logits(model, input_ids=ids).equal(before)
    for module in model.modules():
        assert "forward" not in vars(module)


def test_a_forward_that_someone_else_bound_comes_back(model):
    attention = next(iter(regard.hf.attention_modules(model).values()))
    theirs = attention.forward
    attention.forward = theirs
    regard.hf.install(model)
    assert attention.forward is not theirs
    regard.hf.uninstall(model)
    assert attention.forward is theirs


def test_hooks_still_run(model):
    seen = []
    attention = next(iter(regard.hf.attention_modules(model).values()))
    attention.register_forward_hook(lambda module, given, out: seen.append(out[0].shape))
    regard.hf.install(model)
    logits(model, input_ids=tokens(1, 4))
    assert seen == [torch.Size([1, 4, model.config.hidden_size])]


def test_a_copy_runs_on_its_own_weights(model):
    regard.hf.install(model)
    other = copy.deepcopy(model)
    ids = tokens(1, 5)
    before = logits(model, input_ids=ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert logits(other, input_ids=ids).equal(before)


def test_the_report_says_what_runs():
    text = str(regard.hf.install(tiny("mistral")))
    assert text.startswith("MistralForCausalLM: 2 attention layers run on regard\n")
    assert "layers.0.self_attn .. " in text
    assert "GQA 4 heads on 2 of 8, window 5; prefill: " in text


def test_unknown_attention_is_refused_by_its_name():
    config = Gemma2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    with pytest.raises(ValueError, match=re.escape("Gemma2Attention (2 modules); what is missing")):
        regard.hf.install(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="no attention module that regard knows"):
        regard.hf.install(nn.Linear(2, 2))


def test_masks_that_are_not_tensors_are_refused():
    model = tiny("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="set_attn_implementation"):
        regard.hf.install(model)
    module = next(iter(regard.hf.attention_modules(model).values()))
    with pytest.raises(TypeError, match="regard reads None, bool and additive"):
        visible(module, object(), 2, 2)
    with pytest.raises(ValueError, match=r"must be \[B, H, L, S\]"):
        visible(module, torch.ones(2, 2), 2, 2)


@pytest.mark.parametrize(
    "option", [{"softcap": 5.0}, {"s_aux": torch.zeros(2)}, {"output_attentions": True}]
)
def test_what_would_change_the_result_is_refused(option):
    model = tiny("llama")
    regard.hf.install(model)
    with pytest.raises(ValueError, match=next(iter(option))):
        model(input_ids=tokens(1, 3), **option)


@pytest.mark.parametrize(
    ("given", "causal", "seen"),
    [
        (None, True, [[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
        (None, False, [[1, 1, 1]] * 3),
        (torch.eye(3).bool()[None, None], True, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        ((1 - torch.eye(3))[None, None] * torch.finfo(torch.float32).min, True, torch.eye(3)),
    ],
)
def test_masks_mean_what_transformers_means(given, causal, seen):
    module = nn.Module()
    module.is_causal = causal
    mask, bias, span = visible(module, given, 3, 3)
    assert bias is None
    assert mask.dense(span).expand(1, 1, 3, 3)[0, 0].equal(torch.as_tensor(seen).bool())


def test_without_a_mask_the_window_still_holds():
    module = nn.Module()
    several, one = visible(module, None, 3, 3, window=2), visible(module, None, 1, 4, window=2)
    assert several[0].dense(several[2]).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert one[0].dense(one[2]).int().tolist() == [[0, 0, 1, 1]]


def test_without_a_mask_eager_hides_nothing():
    module = tiny("llama").base_model.layers[0].self_attn
    module.config._attn_implementation = "eager"
    mask, _, span = visible(module, None, 3, 3, window=2)
    assert mask.dense(span).all()


def test_the_modules_own_scale_is_used():
    model = tiny("llama")
    for module in regard.hf.attention_modules(model).values():
        module.scaling = 0.7
    before = logits(model, input_ids=tokens(1, 6))
    regard.hf.install(model)
    torch.testing.assert_close(logits(model, input_ids=tokens(1, 6)), before, **CLOSE)
