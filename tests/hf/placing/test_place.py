"""A model with placed layers has their logits and generates their text, with any cache."""

import copy
import json
import re

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

import regard.hf
from joined import joined, random_mla
from regard import NO_CACHE, Alibi, Causal, LatentKVAttention, PositionScale, Rotary, SlidingWindow
from regard.convert import as_latent, spell_out
from regard.hf import attention_modules, attention_of
from regard.hf.loading.descriptions import described, layer_from
from regard.hf.placing.place import has_placed_layers, place
from regard.hf.placing.placed import PlacedLatentKV, PlacedMLA
from regard.hf.running import calls
from regard.layers.latent_kv import AbsorbedValues, RebuiltValues
from tiny import tiny, tokens

CLOSE = {"atol": 2e-5, "rtol": 2e-5}
FORMS = {"latent kv": as_latent, "mla": joined}
FAMILIES = ["llama", "llama with biases", "llama 3 rope", "mistral", "qwen2"]
NORMED = ["qwen3", "gemma3", "olmo2"]  # of each head, of each head by 1 + weight, of the width
PLACED = [(family, form) for form in FORMS for family in FAMILIES]
PLACED += [(family, "latent kv") for family in NORMED]  # MLA has no place for QK-norm
CACHES = {
    "growing": {},
    "static": {"max_length": 40},
    "sliding": {},
    "quantized": {"bits": 8, "group": 4},
}


def layers_of(model):
    return [attention_of(module) for module in attention_modules(model).values()]


def placed(family, form):
    """The model, and a copy of it with layers of regard placed in it."""
    model = tiny(family)
    model.generation_config.eos_token_id = None
    other = copy.deepcopy(model)
    return model, place(other, [FORMS[form](layer) for layer in layers_of(other)])


def padded(batch=2, length=9, pads=4):
    """Tokens whose first row begins later, and the mask that says so."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, :pads] = 0
    return {"input_ids": tokens(batch, length) * mask, "attention_mask": mask}


def logits(model, **given):
    with torch.no_grad():
        return model(**given).logits


def write(model, given, **options):
    settings = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True, **options}
    return model.generate(**given, **settings)


@pytest.mark.parametrize("form", FORMS)
def test_installing_sets_the_precision_of_placed_layers(form, monkeypatch):
    _, model = placed("llama", form)
    asked, prepared = [], calls.prepare
    monkeypatch.setattr(
        calls,
        "prepare",
        lambda *given, **named: asked.append(named["precision"]) or prepared(*given, **named),
    )
    for change in (
        lambda: regard.hf.install(model, precision="fast"),
        lambda: regard.hf.uninstall(model),
    ):
        change()
        logits(model, input_ids=tokens(1, 5))
    half = len(asked) // 2
    assert asked == ["fast"] * half + ["strict"] * half
    assert half == len(attention_modules(model))


@pytest.mark.parametrize("form", FORMS)
def test_placed_layers_have_the_precision_they_were_built_with(form):
    model = tiny("llama")
    layers = [FORMS[form](layer) for layer in layers_of(model)]
    for layer in layers:
        layer.precision = "fast"
    place(model, layers)
    modules = attention_modules(model).values()
    assert {module.precision for module in modules} == {"fast"}
    regard.hf.install(model)
    assert {module.precision for module in modules} == {"strict"}
    regard.hf.uninstall(model)
    assert {module.precision for module in modules} == {"fast"}


@pytest.mark.parametrize(("family", "form"), PLACED)
def test_an_exact_layer_leaves_the_logits_as_they_are(family, form):
    model, other = placed(family, form)
    ids = tokens(2, 11)
    torch.testing.assert_close(logits(other, input_ids=ids), logits(model, input_ids=ids), **CLOSE)
    given = padded()
    shown = given["attention_mask"].bool()
    after = logits(other, **given)[shown]
    torch.testing.assert_close(after, logits(model, **given)[shown], **CLOSE)


@pytest.mark.parametrize(("family", "form"), PLACED)
def test_the_same_text_with_transformers_caches(family, form):
    model, other = placed(family, form)
    given = padded()
    before = write(model, given)
    assert write(other, given).equal(before)
    assert write(other, given, cache_implementation="static").equal(before)
    beams = {"num_beams": 3}
    assert write(other, given, **beams).equal(write(model, given, **beams))


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_same_text_with_our_caches(family, form, kind):
    model, other = placed(family, form)
    given = padded()
    if kind == "sliding" and family != "mistral":
        with pytest.raises(ValueError, match=r"no layer of \w+ has a window"):
            regard.hf.cache(other, kind)
        return

    def cached(**options):
        cache = regard.hf.cache(other, kind, **CACHES[kind])
        return write(other, given, past_key_values=cache, **options)

    if kind == "quantized":  # rounding may change the text; the first token was never cached
        assert cached()[:, :10].equal(write(model, given)[:, :10])
        return
    assert cached().equal(write(model, given))
    assert cached(num_beams=3).equal(write(model, given, num_beams=3))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("form", FORMS)
def test_chunks_and_single_tokens_give_the_logits_of_a_whole(form, implementation):
    _, other = placed("mistral", form)
    other.set_attn_implementation(implementation)
    given = padded(length=12, pads=5)
    shown = given["attention_mask"].bool()
    whole = logits(other, **given)[shown]
    positions = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    for cache in (None, "sliding", StaticCache(other.config, max_cache_len=16)):
        held = regard.hf.cache(other, cache) if isinstance(cache, str) else cache
        pieces = []
        for start, stop in ((0, 3), (3, 9), (9, 10), (10, 12)):
            with torch.no_grad():
                out = other(
                    input_ids=given["input_ids"][:, start:stop],
                    attention_mask=given["attention_mask"][:, :stop],
                    position_ids=positions[:, start:stop],
                    past_key_values=held,
                    use_cache=True,
                )
            held = out.past_key_values
            pieces.append(out.logits)
        torch.testing.assert_close(torch.cat(pieces, 1)[shown], whole, **CLOSE)


def test_positions_of_the_new_keys_are_taken_as_they_are():
    """Two texts in one row: the second begins at 0 again."""
    model, other = placed("llama", "latent kv")
    given = {"input_ids": tokens(1, 8), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
    torch.testing.assert_close(logits(other, **given), logits(model, **given), **CLOSE)
    other.config._attn_implementation = model.config._attn_implementation = "eager"
    torch.testing.assert_close(logits(other, **given), logits(model, **given), **CLOSE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_without_positions_and_mask_they_are_its_own(family, form):
    _, other = placed(family, form)
    layer = other.model.layers[0].self_attn
    x = torch.randn(1, 7, 24)
    torch.testing.assert_close(layer(x)[0], FORMS[form](layers_of(tiny(family))[0])(x), **CLOSE)
    cache = regard.hf.cache(other)
    pieces = [layer(piece, past_key_values=cache)[0] for piece in x.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), layer(x)[0], **CLOSE)


def test_positions_that_the_cache_would_not_hold_are_refused():
    _, model = placed("llama", "latent kv")
    cache, layer = regard.hf.cache(model), model.model.layers[0].self_attn
    for where, error in (
        (torch.arange(5)[None] / 2, TypeError),
        (torch.arange(5)[None] + 2**31, ValueError),
    ):
        with pytest.raises(error, match="positions of a layer that caches them"):
            layer(torch.randn(1, 5, 24), position_ids=where, past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_what_the_caches_hold_is_the_latent():
    _, other = placed("llama", "latent kv")
    with torch.no_grad():
        held = other(tokens(1, 7), use_cache=True).past_key_values
    rank = other.model.layers[0].self_attn.kv_lora_rank
    assert held.layers[0].keys.shape == (1, 1, 7, rank)
    assert held.layers[0].values.numel() == 0
    ours = regard.hf.cache(other)
    logits(other, input_ids=tokens(1, 7), past_key_values=ours)
    assert ours.nbytes == 2 * 7 * (4 * rank + 4)  # and a position


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_attention_weights_of_placed_layers_are_returned(family, form):
    model, other = placed(family, form)
    model.set_attn_implementation("eager")
    given = padded()
    before = model(**given, output_attentions=True).attentions
    after = other(**given, output_attentions=True).attentions
    assert len(after) == len(before) == 2
    shown = given["attention_mask"].bool()[:, None, :, None].expand_as(before[0])
    for ours, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(ours[shown], theirs[shown], **CLOSE)


@pytest.mark.parametrize("form", FORMS)
def test_it_trains(form):
    model, other = placed("qwen2", form)
    ids = tokens(2, 7)
    for each in (model, other):
        each.train()
        each(ids, labels=ids).loss.backward()
    mine, theirs = (dict(each.named_parameters()) for each in (other, model))
    for name, parameter in theirs.items():
        if "self_attn" not in name:
            torch.testing.assert_close(mine[name].grad, parameter.grad, atol=1e-4, rtol=1e-3)
    attention = other.model.layers[0].self_attn
    assert all(p.grad is not None for p in attention.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_install_takes_it_as_it_is(form):
    _, other = placed("mistral", form)
    given = padded()
    before = logits(other, **given)
    report = regard.hf.install(other)
    assert logits(other, **given).equal(before)
    regard.hf.uninstall(other)
    assert logits(other, **given).equal(before)
    kind, width = {"latent kv": ("LatentKV", 24), "mla": ("MLA", 32)}[form]
    said = rf"{kind} 4 heads on 1 of {width}, window 5; prefill: (rebuilt|expanded) by \w+"
    assert re.search(said, str(report))
    assert not report.left_alone


def test_an_installed_model_takes_other_layers():
    model = tiny("llama")
    before = logits(model, input_ids=tokens(1, 9))
    regard.hf.install(model)
    place(model, [as_latent(layer) for layer in layers_of(model)])
    torch.testing.assert_close(logits(model, input_ids=tokens(1, 9)), before, **CLOSE)


def test_layers_share_their_numbers_with_the_model():
    model = tiny("llama")
    made = [as_latent(layer) for layer in layers_of(model)]
    place(model, made)
    stands = model.model.layers[1].self_attn
    assert stands.kv_a_proj.weight is made[1].kv_a_proj.weight
    assert isinstance(stands, PlacedLatentKV)
    assert has_placed_layers(model) and not has_placed_layers(tiny("llama"))
    assert repr(stands).startswith("PlacedLatentKV(24, 4, num_kv_heads=2, head_dim=8")
    copied = copy.deepcopy(model)
    assert copied.model.layers[1].self_attn.kv_a_proj.weight is not stands.kv_a_proj.weight
    assert copied.model.layers[1].self_attn.config is copied.config


OPTIONS = {
    "pairs": {"pairing": "pairs"},
    "halves": {"pairing": "halves"},
    "gate of heads, scaled queries": {"gate": "head", "query_scale": PositionScale(0.7, 2)},
    "gate of channels, sinks": {"gate": "channel", "sinks": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_a_latent_layer_that_is_not_exact_runs_as_it_does_alone(options):
    """Both forms of MLA against the layer itself, called by regard's own rules."""
    model = tiny("llama")
    layers = random_mla(model, **options)
    x = torch.randn(2, 6, 24)
    wanted = layers[0](x, cache=NO_CACHE)
    place(model, layers)
    stands = model.model.layers[0].self_attn
    assert isinstance(stands, PlacedMLA)
    torch.testing.assert_close(stands(x)[0], wanted, **CLOSE)
    for cache in (regard.hf.cache(model), StaticCache(model.config, max_cache_len=8)):
        pieces = [
            logits(model, input_ids=piece, past_key_values=cache)
            for piece in tokens(2, 6).split(2, 1)
        ]
        torch.testing.assert_close(
            torch.cat(pieces, 1), logits(model, input_ids=tokens(2, 6)), **CLOSE
        )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_a_description_builds_the_same_layer(options, tmp_path):
    layer = random_mla(tiny("llama"), **options)[0]
    entry = json.loads(json.dumps(described(layer)))
    again = layer_from(entry, tmp_path / "config.json")
    names = ("gate", "sinks", "query_scale", "rope", "mask", "scale")
    assert {name: again.arguments[name] for name in names} == {
        name: layer.arguments[name] for name in names
    }
    older = {name: entry[name] for name in entry if name not in ("gate", "sinks", "query_scale")}
    assert layer_from(older, tmp_path / "config.json").arguments["gate"] is None


@pytest.mark.parametrize("family", ["llama", "llama with biases", "mistral", "qwen2", "qwen3"])
def test_more_key_heads_make_a_stock_model(family, tmp_path):
    model = tiny(family)
    given = padded()
    shown = given["attention_mask"].bool()
    before = logits(model, **given)[shown]
    modules = list(attention_modules(model).values())
    place(model, [spell_out(layer) for layer in layers_of(model)])
    assert list(attention_modules(model).values()) == modules  # so their hooks stay
    assert model.config.num_key_value_heads == 4
    torch.testing.assert_close(logits(model, **given)[shown], before, **CLOSE)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    torch.testing.assert_close(logits(again, **given)[shown], before, **CLOSE)
    assert "MHA 4 heads on 4 of 8" in str(regard.hf.install(again))
    torch.testing.assert_close(logits(again, **given)[shown], before, **CLOSE)


def test_a_bias_that_only_the_class_has_is_zero():
    model = tiny("qwen2")
    layers = layers_of(model)
    for layer in layers:
        layer.k_proj.bias = None
    place(model, layers)
    assert model.model.layers[0].self_attn.k_proj.bias.eq(0).all()


def test_a_placed_layer_can_be_replaced_but_is_no_attention():
    model, other = placed("llama", "latent kv")
    before = list(attention_modules(other).values())
    with pytest.raises(ValueError, match="this LatentKV layer is regard's own already"):
        attention_of(before[0])
    with pytest.raises(ValueError, match="regard's own already"):
        place(other, layers_of(model))
    assert list(attention_modules(other).values()) == before
    place(other, [joined(layer) for layer in layers_of(model)])
    ids = tokens(1, 9)
    torch.testing.assert_close(logits(other, input_ids=ids), logits(model, input_ids=ids), **CLOSE)
    again = place(copy.deepcopy(model), before)
    torch.testing.assert_close(logits(again, input_ids=ids), logits(model, input_ids=ids), **CLOSE)


def test_save_pretrained_does_not_write_what_it_cannot_describe(tmp_path):
    _, other = placed("llama", "mla")
    with pytest.raises(ValueError, match=r"use regard\.convert\.save"):
        other.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def changed(layer, **attributes):
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def other_width():
    return LatentKVAttention(
        16, 2, num_kv_heads=1, head_dim=8, kv_lora_rank=4, rope=Rotary(8), mask=Causal()
    )


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda own: own[:1], "has 2 attention modules, got 1 layers"),
        (lambda own: [spell_out(own[0]), own[1]], r"layers have \[2, 4\] key heads"),
        (lambda own: [own[0], as_latent(own[1])], "is GQA and others are latent"),
        (lambda own: [as_latent(own[0]), other_width()], "has hidden_size=16, the model has 24"),
        (lambda own: [changed(own[0], scale=1.0), own[1]], "scale=1.0 instead of 0.35355"),
        (lambda own: [changed(own[0], softcap=3.0), own[1]], "softcap=3.0 instead of None"),
        (lambda own: [changed(own[0], score_bias=Alibi((1.0,) * 4)), own[1]], "a score_bias"),
        (
            lambda own: [changed(own[0], rope=Rotary(8, theta=5.0)), own[1]],
            r"rope=Rotary\(8, theta=5.0\) instead of",
        ),
        (
            lambda own: [as_latent(changed(own[0], mask=Causal() & SlidingWindow(3))), own[1]],
            "GQA and others|has window 3, the model's masks have None",
        ),
        (
            lambda own: [as_latent(changed(each, mask=SlidingWindow(3))) for each in own],
            "has window 3, the model's masks have None",
        ),
        (
            lambda own: [as_latent(changed(each, mask=~Causal())) for each in own],
            r"has mask=Causal\(\), or Causal\(\) & SlidingWindow\(size\), got",
        ),
        (
            lambda own: [as_latent(changed(each, score_bias=Alibi((1.0,) * 4))) for each in own],
            "has no score_bias",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(layers, message):
    model = tiny("llama")
    before, modules = logits(model, input_ids=tokens(1, 5)), list(model.modules())
    with pytest.raises(ValueError, match=message):
        place(model, layers(layers_of(model)))
    assert list(model.modules()) == modules
    assert model.config.num_key_value_heads == 2
    assert logits(model, input_ids=tokens(1, 5)).equal(before)


def test_a_parameter_that_the_class_does_not_have_is_refused():
    model = tiny("llama")
    other = layers_of(tiny("llama with biases"))
    with pytest.raises(ValueError, match=r"got k_proj.bias, which the model's class does not have"):
        place(model, other)


@pytest.mark.usefixtures("unchecked")
def test_other_modules_are_refused():
    with pytest.raises(TypeError, match="got Linear"):
        place(tiny("llama"), [torch.nn.Linear(2, 2)] * 2)


def test_weights_of_keys_are_trained_through_a_step():
    """Of all parameters they alone want gradients, and the texts are long enough for the kernel."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = LlamaConfig(**sizes, vocab_size=40, num_hidden_layers=1, intermediate_size=32)
    torch.manual_seed(0)
    model, gradients = LlamaForCausalLM(config), []
    place(model, [as_latent(layer) for layer in layers_of(model)])
    attention = model.requires_grad_(False).model.layers[0].self_attn
    weight = attention.kv_b_proj.requires_grad_(True).weight
    for form in (AbsorbedValues, RebuiltValues):
        attention.choose = lambda queries, cache, form=form: form(attention)
        weight.grad, cache = None, DynamicCache(config=config)
        logits(model, input_ids=tokens(1, 1500) % 40, past_key_values=cache)
        last = model(torch.tensor([[3]]), past_key_values=cache).logits
        last.square().sum().backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients, **CLOSE)
    assert all(half.abs().max() > 1e-3 for half in gradients[0].chunk(2))  # of keys, of values
