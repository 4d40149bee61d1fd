"""Decoding steps of models with joint latents, in compiled code."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("numba")
pytest.importorskip("transformers")

import transformers

from regard import Causal, LatentKVAttention, Rotary, SlidingWindow, hf
from regard.hf.running import decoder_models, latent_steps
from regard.ops.kernels.model_stepping import ModelStep
from regard.rope import NO_ROPE

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
    "vocab_size": 50,
}
TOKENS = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(1))


def model_of(model=None, **options):
    """A model, by default a Llama, whose two layers have joint latents."""
    if model is None:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    settings = {"num_kv_heads": 2, "head_dim": 32, "kv_lora_rank": 48, "mask": Causal()}
    settings |= {"rope": Rotary(32)} | options
    layers = [LatentKVAttention(64, 4, **settings).eval() for _ in range(2)]
    return hf.place(model.eval(), layers)


@pytest.fixture(params=["layer by layer", "all layers in one call"])
def taken(request, monkeypatch):
    """Whether each call of a layer that might repeat a step did."""
    found, run, run_all = [], latent_steps._run, ModelStep.run

    def recorded(*given):
        out = run(*given)
        found.append(out is not None)
        return out

    def recorded_all(self, *given):
        out = run_all(self, *given)
        if out is not None:
            found.extend([True] * SIZES["num_hidden_layers"])
        return out

    monkeypatch.setattr(latent_steps, "_run", recorded)
    if request.param == "layer by layer":
        monkeypatch.setattr(decoder_models, "_states", lambda model, given: None)
    else:
        monkeypatch.setattr(ModelStep, "run", recorded_all)
    return found


def decoded(model, tokens=TOKENS, cache=None, **given):
    """The logits of a prompt of 5 tokens, then of one token after the other."""
    cache = hf.cache(model, "growing") if cache is None else cache
    with torch.no_grad():
        outs = [model(tokens[:, :5], past_key_values=cache, **given).logits]
        for i in range(5, tokens.shape[1]):
            outs.append(model(tokens[:, i : i + 1], past_key_values=cache, **given).logits)
    return torch.cat(outs, 1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"rope": NO_ROPE}, {"rope": Rotary(16)}, {"scale": 0.5}, {"kv_lora_rank": 64}],
    ids=str,
)
def test_logits_are_those_of_the_whole_text(options, batch, taken):
    model = model_of(**options)
    with torch.no_grad():
        wanted = model(TOKENS[:batch]).logits
    hf.install(model)
    torch.testing.assert_close(decoded(model, TOKENS[:batch]), wanted, atol=2e-5, rtol=1e-5)
    assert taken == [True] * 28  # two layers, all tokens after the prompt and the first


@pytest.mark.parametrize("kind", ["static", "int8", "paged"])
def test_other_caches_agree(kind, taken):
    model = model_of()
    hf.install(model)
    cache = hf.cache(model, kind, **({"max_length": 20} if kind == "static" else {}))
    out = decoded(model, cache=cache)
    assert taken == ([True] * 28 if kind == "static" else [])
    close = {"atol": 2e-5, "rtol": 1e-5} if kind != "int8" else {"atol": 0.02, "rtol": 0.0}
    torch.testing.assert_close(out, decoded(model), **close)


def test_a_window_ends_the_steps(taken):
    config = transformers.MistralConfig(**SIZES, sliding_window=12)
    model = model_of(transformers.MistralForCausalLM(config), mask=Causal() & SlidingWindow(12))
    with torch.no_grad():
        wanted = model(TOKENS).logits
    hf.install(model)
    torch.testing.assert_close(decoded(model), wanted, atol=2e-5, rtol=1e-5)
    assert 0 < sum(taken) <= 2 * 7


@pytest.mark.parametrize("options", [{"qk_norm": "head"}, {"softcap": 5.0}], ids=str)
def test_layers_that_compute_more_are_no_steps(options, taken):
    model = model_of(**options)
    with torch.no_grad():
        wanted = model(TOKENS).logits
    hf.install(model)
    torch.testing.assert_close(decoded(model), wanted, atol=2e-5, rtol=1e-5)
    assert not any(taken)


def stepping():
    """An installed model, the cache of a prompt and a step."""
    model = model_of()
    hf.install(model)
    cache = hf.cache(model, "growing")
    with torch.no_grad():
        model(TOKENS[:, :5], past_key_values=cache)
        model(TOKENS[:, 5:6], past_key_values=cache)
    return model, cache


def expected_of(model, cache, tokens):
    """The logits without a step: of two tokens at once."""
    with torch.no_grad():
        return model(tokens, past_key_values=copy.deepcopy(cache)).logits


def scaled(weight):
    weight.data.mul_(2)


def replaced(weight):
    weight.data = 2 * weight.data


@pytest.mark.parametrize("change", [scaled, replaced])
def test_weights_that_change_between_steps_are_read_anew(change, taken):
    model, cache = stepping()
    for layer in model.model.layers:
        change(layer.self_attn.kv_b_proj.weight)
    wanted = expected_of(model, cache, TOKENS[:, 6:8])
    with torch.no_grad():
        found = [model(TOKENS[:, i : i + 1], past_key_values=cache).logits for i in (6, 7)]
    torch.testing.assert_close(torch.cat(found, 1), wanted, atol=2e-5, rtol=1e-5)
    assert taken == [True] * 4


def with_other_rope(attention):
    attention.rope = Rotary(32, theta=10.0)


def of_weight(change, name):
    return lambda attention: change(attention.get_submodule(name).weight)


AFTER_A_STEP = {
    "rope": with_other_rope,
    **{
        f"{name}, {change.__name__}": of_weight(change, name)
        for name in ("kv_b_proj", "kv_a_proj", "o_proj")
        for change in (scaled, replaced)
    },
}


@pytest.mark.parametrize("change", AFTER_A_STEP.values(), ids=AFTER_A_STEP)
def test_what_changes_after_a_step_is_read_anew(change, taken):
    model, cache = stepping()
    with torch.no_grad():
        model(TOKENS[:, 6:7], past_key_values=cache)
        model(TOKENS[:, 7:8], past_key_values=cache)
    for layer in model.model.layers:
        change(layer.self_attn)
    wanted = expected_of(model, cache, TOKENS[:, 8:10])
    with torch.no_grad():
        found = [model(TOKENS[:, i : i + 1], past_key_values=cache).logits for i in (8, 9)]
    torch.testing.assert_close(torch.cat(found, 1), wanted, atol=2e-5, rtol=1e-5)
    assert sum(taken) == 8


def adapted(model):
    for layer in model.model.layers:
        plain, added = layer.self_attn.kv_b_proj, nn.Linear(48, 128)
        plain.register_forward_hook(lambda module, given, out, added=added: out + added(given[0]))


def moved(model, cache):
    for layer in cache.layers:
        for buffer in layer.cache.buffers:
            buffer.share_memory_()


def test_a_hook_on_the_weights_ends_the_steps(taken):
    model, cache = stepping()
    adapted(model)
    wanted = expected_of(model, cache, TOKENS[:, 6:8])
    with torch.no_grad():
        found = [model(TOKENS[:, i : i + 1], past_key_values=cache).logits for i in (6, 7)]
    torch.testing.assert_close(torch.cat(found, 1), wanted, atol=2e-5, rtol=1e-5)
    assert not any(taken)


def test_buffers_that_move_are_read_where_they_are(taken):
    model, cache = stepping()
    wanted = expected_of(model, cache, TOKENS[:, 6:8])
    moved(model, cache)
    with torch.no_grad():
        found = [model(TOKENS[:, i : i + 1], past_key_values=cache).logits for i in (6, 7)]
    torch.testing.assert_close(torch.cat(found, 1), wanted, atol=2e-5, rtol=1e-5)
    assert taken == [True] * 4


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_positions_of_the_caller_are_those_of_the_keys(dtype, taken):
    """Every second position: distances are twice as large, so the logits differ from the usual."""
    model = model_of()
    hf.install(model)
    places = 2 * torch.arange(20, dtype=dtype)[None]
    with torch.no_grad():
        wanted = model(TOKENS, position_ids=places).logits
        cache = hf.cache(model, "growing")
        outs = [model(TOKENS[:, :5], past_key_values=cache, position_ids=places[:, :5]).logits]
        for i in range(5, 20):
            step = {"past_key_values": cache, "position_ids": places[:, i : i + 1]}
            outs.append(model(TOKENS[:, i : i + 1], **step).logits)
    torch.testing.assert_close(torch.cat(outs, 1), wanted, atol=2e-5, rtol=1e-5)
    assert sum(taken) == 28
    assert not torch.allclose(decoded(model), wanted, atol=1e-2)


@pytest.mark.parametrize("default", [torch.device("meta"), torch.float64, torch.bfloat16], ids=str)
def test_defaults_change_no_logit(default, taken):
    model, cache = stepping()
    twin = copy.deepcopy(cache)
    layer = model.model.layers[0].self_attn
    x, given = torch.randn(2, 1, 64), {"attention_mask": None}
    before = torch.get_default_dtype()
    with torch.no_grad():
        layer(x, past_key_values=twin, **given)  # a copy repeats no step before its first call
        wanted = layer(x, past_key_values=twin, **given)[0]
        layer(x, past_key_values=cache, **given)
        try:
            if isinstance(default, torch.device):
                torch.set_default_device(default)
            else:
                torch.set_default_dtype(default)
            found = layer(x, past_key_values=cache, **given)[0]
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(before)
    assert taken == [True] * 3
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def test_positions_beyond_the_tables_are_no_steps(taken):
    model, cache = stepping()
    far = torch.tensor([[1 << 15]])
    with torch.no_grad():
        found = model(TOKENS[:, 6:7], past_key_values=cache, position_ids=far).logits
        again = model(TOKENS[:, 6:7], past_key_values=cache, position_ids=far + 1).logits
    assert taken == [False] * 4
    assert torch.isfinite(found).all() and torch.isfinite(again).all()
    with pytest.raises(ValueError, match="int32"), torch.no_grad():
        model(TOKENS[:, 6:7], past_key_values=cache, position_ids=torch.tensor([[1 << 40]]))
    assert cache.get_seq_length() == 8


def test_rows_may_have_positions_of_their_own(taken):
    model, cache = stepping()
    places = torch.tensor([[6, 7], [9, 10]])
    with torch.no_grad():
        whole = copy.deepcopy(cache)
        wanted = model(TOKENS[:, 6:8], past_key_values=whole, position_ids=places).logits
        found = [
            model(TOKENS[:, 6 + i : 7 + i], past_key_values=cache, position_ids=places[:, [i]])
            for i in range(2)
        ]
    found = torch.cat([each.logits for each in found], 1)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)
    assert taken == [True] * 4
    with pytest.raises(TypeError, match="integer"), torch.no_grad():
        model(TOKENS[:, 8:9], past_key_values=cache, position_ids=torch.tensor([[8.5]]))


@pytest.mark.parametrize("default", [torch.device("meta"), torch.float64], ids=str)
def test_defaults_change_no_logit_of_the_model(default, taken):
    model, cache = stepping()
    twin = copy.deepcopy(cache)
    before = torch.get_default_dtype()
    with torch.no_grad():
        model(TOKENS[:, 6:7], past_key_values=twin)
        wanted = model(TOKENS[:, 7:8], past_key_values=twin).logits
        model(TOKENS[:, 6:7], past_key_values=cache)
        place = torch.arange(7, 8)[None]  # transformers counts on the default device
        try:
            if isinstance(default, torch.device):
                torch.set_default_device(default)
            else:
                torch.set_default_dtype(default)
            found = model(TOKENS[:, 7:8], past_key_values=cache, position_ids=place).logits
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(before)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def test_a_cropped_cache_goes_on(taken):
    model, cache = stepping()
    with torch.no_grad():
        first = model(TOKENS[:, 6:7], past_key_values=cache).logits
        cache.crop(-1)
        again = model(TOKENS[:, 6:7], past_key_values=cache).logits
    assert first.equal(again)
    assert taken == [True] * 4


def test_rows_that_differ_in_length_and_left_padding_agree(taken):
    model = model_of()
    hf.install(model)
    model.generation_config.pad_token_id = 0
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), TOKENS[:1, :5]], 1)
    both = torch.cat([padded, TOKENS[1:, :8]])
    seen = torch.ones_like(both)
    seen[0, :3] = 0
    options = {"max_new_tokens": 6, "do_sample": False}
    cache = hf.cache(model, "growing")
    made = model.generate(both, attention_mask=seen, past_key_values=cache, **options)
    for row, text in enumerate((TOKENS[:1, :5], TOKENS[1:, :8])):
        alone = {"attention_mask": torch.ones_like(text)}
        alone["past_key_values"] = hf.cache(model, "growing")
        alone = model.generate(text, **alone, **options)
        assert alone[0, -6:].equal(made[row, -6:])


def test_bfloat16_is_as_near_as_the_whole_text(taken):
    model = model_of().double()
    with torch.no_grad():
        exact = model(TOKENS).logits
    model = model.bfloat16()
    with torch.no_grad():
        whole = (model(TOKENS).logits.double() - exact).abs().max()
    hf.install(model)
    assert (decoded(model).double() - exact).abs().max() < 2 * whole + 2**-8
    assert taken == [True] * 28
