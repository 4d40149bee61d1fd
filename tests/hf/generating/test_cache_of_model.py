"""generate: under regard the same text, with transformers' caches and with regard's."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers

import regard
import regard.hf
from covering import covering, few
from regard.cache import KVCache, QuantizedCache, SlidingCache, StaticCache
from regard.cache.quantized import QuantizedWindow
from regard.compare.shapes import shape_of
from regard.hf.families.finding import find
from regard.hf.families.recognising import family_of
from regard.plan import STORAGES, ModelShape, cost_of
from session import LONG
from zoo import WRITERS, ZOO, inputs, tokens

STEPS = 64 if LONG else 28  # with the prompt beyond every window, and every length of training
FEWER = 64 if LONG else 12  # beyond every window
WITHOUT_WINDOWS = {  # transformers 5.17 cannot take tokens back from windows of its own
    "mistral": {"sliding_window": None},
    "gemma3": {"layer_types": ["full_attention"] * 3},
}
OPTIONS = {"static": {"max_length": 96}, "quantized": {"bits": 8, "group": 4}}
WINDOWED = ["mistral", "qwen2", "gemma3", "smollm3", "gpt-oss"]
OTHERS = WRITERS if LONG else WRITERS[1::2]  # that `few` leaves out of the other tests
LATENT = ["deepseek-v2", "deepseek-v3", "deepseek-v3 halves"]
NO_STATIC = ("falcon alibi",)  # transformers makes no ALiBi for it


def prompt(name, padding="left"):
    given = inputs(name, padding=padding, length=9)
    given.pop("decoder_input_ids", None)
    return given


def model_of(name, **changed):
    kind = ZOO[name]
    model = replace(kind, options={**kind.options, **changed}).build()
    model.generation_config.eos_token_id = None  # write to the end
    model.generation_config.pad_token_id = 0
    return model


def write(model, given, **options):
    settings = {"max_new_tokens": STEPS, "do_sample": False, "disable_compile": True, **options}
    return model.generate(**given, **settings)


@cache
def written(name):
    """What transformers writes alone."""
    return write(model_of(name), prompt(name))


@pytest.mark.parametrize("name", few(WRITERS, 2))
def test_the_same_text_with_transformers_caches(name):
    model, given, before = model_of(name), prompt(name), written(name)
    regard.hf.install(model)
    assert write(model, given).equal(before)
    if name not in NO_STATIC:
        static = write(model, given, cache_implementation="static", max_new_tokens=FEWER)
        assert static.equal(before[:, : static.shape[1]])


@pytest.mark.parametrize(
    ("name", "kind"), covering(OTHERS, ["growing", "static", "sliding"], together=1)
)
def test_the_same_text_with_our_caches(name, kind):
    model, given = model_of(name), prompt(name)
    if kind == "static" and name in NO_STATIC:
        pytest.skip("transformers makes no ALiBi for static caches")
    try:
        caches = [regard.hf.cache(model, kind, **OPTIONS.get(kind, {})) for _ in range(2)]
    except ValueError as reason:
        assert kind == "sliding"
        pytest.skip(str(reason))
    before = written(name)
    assert write(model, given, past_key_values=caches[0]).equal(before)
    regard.hf.install(model)
    assert write(model, given, past_key_values=caches[1]).equal(before)


@pytest.mark.parametrize("name", few(WRITERS, 2))
def test_the_same_text_with_a_quantised_cache(name):
    """What is rounded is the same, so what is written is the same; installed or not."""
    model, given = model_of(name), prompt(name)
    # installed layers of MLA cache latents, transformers' own the keys and values of heads: what is
    # rounded to 8 bits differs too little to be seen
    latent = any(family_of(module).latent for module in find(model).known.values())
    coarse = len(name) % 2 == 0 and not latent
    options = {"format": "K8V4"} if coarse else {"bits": 8, "group": 4}
    caches = [regard.hf.cache(model, "quantized", **options) for _ in range(2)]
    before = write(model, given, past_key_values=caches[0], max_new_tokens=FEWER)
    regard.hf.install(model)
    assert write(model, given, past_key_values=caches[1], max_new_tokens=FEWER).equal(before)


@pytest.mark.parametrize(
    ("name", "kind"),
    covering(
        ["mistral", "gemma3", "deepseek-v3", "bart", "gpt-oss"],
        ["growing", "static", "sliding"],
        together=1,
    ),
)
def test_beams(name, kind):
    model, given = model_of(name), prompt(name)
    if kind == "sliding" and name not in WINDOWED:
        pytest.skip("no windows")
    options = {"num_beams": 3, "max_new_tokens": 12}
    before = write(model, given, **options)
    regard.hf.install(model)
    cache = regard.hf.cache(model, kind, **OPTIONS.get(kind, {}))
    assert write(model, given, past_key_values=cache, **options).equal(before)


@pytest.mark.parametrize("kind", ["growing", "static", "sliding", "quantized"])
def test_sampling_draws_the_same(kind):
    model, given = model_of("qwen2"), prompt("qwen2")
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 12, "top_k": 5}
    texts = []
    for installed in (False, True):
        if installed:
            regard.hf.install(model)
        torch.manual_seed(3)
        cache = regard.hf.cache(model, kind, **OPTIONS.get(kind, {}))
        texts.append(write(model, given, past_key_values=cache, **options))
    assert texts[0].equal(texts[1])


@pytest.mark.parametrize(
    ("name", "kind"),
    covering(
        ["llama", "mistral", "gemma3", "deepseek-v3"],
        ["growing", "static", "sliding", "quantized"],
        together=1,
    ),
)
def test_rejected_tokens_of_an_assistant_are_removed(name, kind):
    model, assistant = model_of(name), model_of(name, **WITHOUT_WINDOWS.get(name, {}))
    if kind == "sliding" and name not in WINDOWED:
        pytest.skip("no windows")
    with torch.no_grad():  # near enough to be believed at times, and not always
        for parameter in assistant.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    given = {"input_ids": tokens(1, 9)}
    options = {"max_new_tokens": 32}
    plain = regard.hf.cache(model, kind, **OPTIONS.get(kind, {}))
    before = write(model, given, past_key_values=plain, **options)
    regard.hf.install(model)
    cache = regard.hf.cache(model, kind, **OPTIONS.get(kind, {}))
    cache.activate_past_recording()
    options["assistant_model"] = assistant
    assert write(model, given, past_key_values=cache, **options).equal(before)


@pytest.mark.parametrize("kind", ["growing", "static", "sliding", "quantized"])
def test_a_cache_goes_on_where_it_stopped(kind):
    """Chunks of a prompt, then a token at a time, are one forward."""
    model, ids = model_of("mistral"), tokens(2, 14)
    regard.hf.install(model)
    cache = regard.hf.cache(model, kind, **OPTIONS.get(kind, {}))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        pieces = ids.split([5, 1, 3, 1, 4], dim=1)
        parts = [model(piece, past_key_values=cache).logits for piece in pieces]
    bound = 0.5 if kind == "quantized" else 5e-5
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=bound)


@pytest.mark.parametrize("name", LATENT)
def test_our_caches_hold_the_joined_latent(name):
    model = model_of(name)
    regard.hf.install(model)
    cache = regard.hf.cache(model)
    write(model, prompt(name), past_key_values=cache, max_new_tokens=4)
    held = cache.layers[0].cache._held
    config = model.config
    assert [h.shape[-1] for h in held] == [config.kv_lora_rank + config.qk_rope_head_dim]
    layers, tokens_held = config.num_hidden_layers, 9 + 4 - 1
    assert cache.nbytes == layers * 2 * tokens_held * held[0].shape[-1] * 4


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("ours", [False, True])
def test_decoding_absorbs_with_either_cache(name, ours, monkeypatch):
    model, forms = model_of(name), []
    regard.hf.install(model)  # which tries the layers, too
    choose = regard.hf.running.latent.choose_form
    monkeypatch.setattr(
        regard.hf.running.latent,
        "choose_form",
        lambda *a: forms.append(choose(*a).name) or choose(*a),
    )
    options = {"past_key_values": regard.hf.cache(model)} if ours else {}
    write(model, prompt(name), max_new_tokens=3, **options)
    layers = model.config.num_hidden_layers
    assert forms == ["expanded"] * layers + ["absorbed"] * 2 * layers


def test_layers_get_the_caches_they_need():
    model = model_of("smollm3")

    def kinds(kind, **options):
        cache = regard.hf.cache(model, kind, **options)
        return [type(layer.cache) for layer in cache.layers]

    assert kinds("growing") == [KVCache] * 3
    assert kinds("static", max_length=9) == [StaticCache] * 3
    for name in ("quantized", "int8", "K8V4"):
        assert kinds(name) == [QuantizedWindow, QuantizedCache, QuantizedWindow]
    assert kinds("auto") == [SlidingCache, KVCache, SlidingCache]
    assert kinds(lambda: QuantizedCache(8)) == [QuantizedCache] * 3
    assert repr(regard.hf.cache(model, "K8V4", rollback=3).layers[0]) == (
        "QuantizedWindow(5, rollback=3, format='K8V4', group=64)"
    )
    assert kinds("sliding") == [SlidingCache, KVCache, SlidingCache]
    assert repr(regard.hf.cache(model, "sliding", rollback=3).layers[0]) == (
        "SlidingCache(5, rollback=3)"
    )
    assert regard.hf.cache(model, "static", max_length=9).get_max_length() == 9


@pytest.mark.parametrize("kind", [None, "int8", "K8V4"])
@torch.no_grad()
def test_a_model_with_windows_holds_no_more_than_transformers_does(kind):
    """Window layers hold their windows unless every token is asked for by name."""
    model, ids = model_of("gemma3"), tokens(1, 90)
    own = transformers.DynamicCache(config=model.config)
    model(ids, past_key_values=own)
    held = sum(2 * layer.keys.numel() * 4 for layer in own.layers)
    cache = regard.hf.cache(model) if kind is None else regard.hf.cache(model, kind)
    model(ids, past_key_values=cache)
    assert cache.nbytes <= held
    every = regard.hf.cache(model, "growing")
    model(ids, past_key_values=every)
    assert every.nbytes == sum(
        90 * 2 * layer.keys.shape[1] * layer.keys.shape[3] * 4 for layer in own.layers
    )
    shape = ModelShape(
        name="m",
        architecture="gemma3",
        layers=tuple(
            shape_of(regard.hf.attention_of(each))
            for each in regard.hf.attention_modules(model).values()
        ),
        hidden_size=model.config.hidden_size,
    )
    storage = STORAGES["plain" if kind is None else kind]
    planned = cost_of(shape, storage, context=90)
    windows = [layer for layer in cache.layers if layer.window]
    spare = sum(layer.cache.nbytes // (layer.cache.length - layer.cache.first) for layer in windows)
    assert cache.nbytes == planned.cache_bytes - spare  # the next token's own place


@pytest.mark.parametrize("kind", ["int8", "K8V4"])
@torch.no_grad()
def test_a_window_of_codes_is_saved_copied_and_taken_back(kind, tmp_path):
    model, ids = model_of("mistral"), tokens(1, 20)
    regard.hf.install(model)
    cache = regard.hf.cache(model, kind, rollback=4)
    whole = [model(ids[:, :16], past_key_values=cache).logits]
    cache.save(tmp_path / "cache.safetensors")
    fork, again = cache.fork(), regard.hf.cache(model, kind, rollback=4)
    again.load(tmp_path / "cache.safetensors")
    step = model(ids[:, 16:18], past_key_values=cache).logits
    cache.truncate(16)
    for each in (cache, fork, again):
        assert model(ids[:, 16:18], past_key_values=each).logits.equal(step), whole
    with pytest.raises(ValueError, match="were dropped"):
        cache.truncate(5)


def test_sliding_caches_drop_old_tokens():
    model = model_of("mistral")
    regard.hf.install(model)
    cache = regard.hf.cache(model)
    write(model, {"input_ids": tokens(1, 9)}, past_key_values=cache)
    assert cache.get_seq_length() == 9 + STEPS - 1
    assert all(layer.cache._held[0].shape[2] < 12 for layer in cache.layers)


def test_a_cache_is_reset_and_used_again():
    model, given = model_of("llama"), prompt("llama")
    regard.hf.install(model)
    cache = regard.hf.cache(model)
    first = write(model, given, past_key_values=cache, max_new_tokens=8)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert write(model, given, past_key_values=cache, max_new_tokens=8).equal(first)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "x",
            {},
            "kind='x' is not one of 'auto', 'growing', 'static', 'sliding', 'quantized', "
            "'evicting', 'condensing', 'paged'",
        ),
        ("static", {}, "kind='static' takes max_length=, got none"),
        ("growing", {"bits": 8}, "kind='growing' takes no options, got bits=8"),
        ("quantized", {"bits": 3}, "bits is 8 or 4, got 3"),
        ("sliding", {}, "no layer of LlamaForCausalLM has a window"),
        ("quantized", {"bits": 0}, "bits is 8 or 4, got 0"),
        ("evicting", {"bits": 0}, "bits is 8 or 4, got 0"),
        *[
            (kind, {"bits": 4, "format": "K8V8"}, "format='K8V8' has bits of its own, got bits=4;")
            for kind in ("quantized", "evicting")
        ],
        ("int4", {"format": "K8V8"}, "format='K8V8' has bits of its own, got bits=4;"),
        *[
            (kind, {"rollback": wrong}, "rollback is ")
            for kind in ("auto", "sliding", "quantized", "int8")
            for wrong in (-1, "x", 2.5)
        ],
    ],
)
def test_what_is_no_cache_is_a_sentence(kind, options, message):
    with pytest.raises(ValueError, match=message):
        regard.hf.cache(model_of("llama"), kind, **options)


@pytest.mark.parametrize("model", ["llama", None, 3, torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_a_sentence(model):
    for kind in ("auto", "paged", KVCache):
        with pytest.raises(TypeError, match=r"model is one of transformers, .* got (str|N|int|L)"):
            regard.hf.cache(model, kind)


@pytest.mark.parametrize("kind", [int, list, lambda: None, lambda: KVCache])
def test_a_function_that_makes_no_cache_is_refused(kind):
    with pytest.raises(TypeError, match="kind is a function that makes a cache of regard, got"):
        regard.hf.cache(model_of("llama"), kind)


def test_the_way_out_of_frequencies_that_change_is_an_option():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = model_of("llama", rope_parameters=rope)
    with pytest.raises(ValueError, match=r"or regard\.hf\.cache prefixes=False"):
        regard.hf.cache(model, "paged")
    regard.hf.cache(model, "paged", prefixes=False)


def test_layers_that_cache_something_else_are_refused():
    model = model_of("smollm3")
    model.config.layer_types = ["full_attention", "compressed_attention", "full_attention"]
    with pytest.raises(
        ValueError, match="layers of type compressed_attention, and regard's caches"
    ):
        regard.hf.cache(model)
    model.config.layer_types = ["full_attention", "indexed_attention", "full_attention"]
    for more in ({}, {"index_topk": 4, "index_kpool": 2}):  # as Qwen4-Exp and GLM-5-Next have
        vars(model.config).update(more)
        with pytest.raises(ValueError, match=r"indexed_attention \(not DeepSeek-V3.2's\), and"):
            regard.hf.cache(model)
    model.config.layer_types = ["linear_attention"] * 3
    with pytest.raises(ValueError, match="no layer of SmolLM3ForCausalLM caches keys"):
        regard.hf.cache(model)


def test_tokens_that_cannot_be_removed_are_refused():
    model = model_of("mistral")
    cache = regard.hf.cache(model, "sliding")
    assert not cache.is_croppable
    with torch.no_grad():
        model(tokens(1, 12), past_key_values=cache)
    with pytest.raises(ValueError, match="rollback=2"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="negative number, got 2"):
        cache.crop(2)


@pytest.mark.parametrize("kind", ["growing", "static", "quantized"])
def test_rows_of_different_lengths_are_refused_before_anything_is_stored(kind):
    """transformers' masks have one length for all rows, and stale tokens would be visible."""
    model, given = ZOO["llama"].build(), inputs("llama", padding="left")
    regard.hf.install(model)
    options = {"max_length": 40} if kind == "static" else {}
    cache = regard.hf.cache(model, kind, **options)
    with torch.no_grad():
        model(**given, past_key_values=cache)
        for layer in cache.layers:
            layer.cache.truncate(torch.tensor([3, 5]))
        token = given["input_ids"][:, :1]
        for mask in (None, torch.ones(2, given["input_ids"].shape[1] + 1, dtype=torch.int64)):
            with pytest.raises(ValueError, match=r"hold \[3, 5\] tokens, and transformers"):
                model(input_ids=token, attention_mask=mask, past_key_values=cache)
    assert all(layer.cache.length == 5 for layer in cache.layers)
    with pytest.raises(ValueError, match=r"crop takes one number for all rows, .* got \[-1, -2\]"):
        cache.crop(torch.tensor([-1, -2]))


def test_layers_that_use_the_keys_of_others_have_no_cache():
    """Of Gemma 3n the last layers: the texts are those of transformers' own cache."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "head_dim": 8}
    config = transformers.Gemma3nTextConfig(
        **sizes,
        vocab_size=60,
        vocab_size_per_layer_input=60,
        hidden_size_per_layer_input=8,
        num_key_value_heads=2,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        altup_num_inputs=2,
        laurel_rank=4,
        sliding_window=8,
    )
    model = transformers.Gemma3nForCausalLM(config).eval()
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    pool, ids = regard.PagePool(99, 4), tokens(1, 18)
    expected = model.generate(ids, **options)
    for found in (0, 16):
        cache = regard.hf.cache(model, "paged", pool=pool)
        assert model.generate(ids, past_key_values=cache, **options).equal(expected)
        assert (len(cache.layers), cache.found) == (2, found)


def test_models_without_such_a_cache_are_refused():
    sizes = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
    model = transformers.XLNetLMHeadModel(transformers.XLNetConfig(vocab_size=9, **sizes))
    with pytest.raises(ValueError, match="XLNetLMHeadModel takes no past_key_values"):
        regard.hf.cache(model)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    more = {"num_hidden_layers": 2, "intermediate_size": 16, "pad_token_id": 0}
    config = transformers.MllamaTextConfig(
        vocab_size=9, cross_attention_layers=[1], **sizes, **more
    )
    model = transformers.MllamaForCausalLM(config)
    with pytest.raises(ValueError, match="layers of type cross_attention"):
        regard.hf.cache(model)
    config.cross_attention_layers = [3, 8]  # as of a larger model: this one has none of these
    assert len(regard.hf.cache(model).layers) == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int8", "QuantizedCache(bits=8, group=64)"),
        ("INT4", "QuantizedCache(bits=4, group=32)"),
        ("quantised", "QuantizedCache(bits=8, group=64)"),
        ("k8v4", "QuantizedCache(format='K8V4', group=64)"),
        ("K4V4", "QuantizedCache(format='K4V4', group=64)"),
        ("Growing", "KVCache()"),
    ],
)
def test_short_names_in_any_case(name, expected):
    assert repr(regard.hf.cache(model_of("llama"), name).layers[0]) == expected


def test_a_list_has_a_value_for_each_layer():
    cache = regard.hf.cache(model_of("llama"), "quantized", bits=[8, 4, 8], group=8)
    assert [each.bits for each in cache.caches] == [8, 4, 8]
    with pytest.raises(ValueError, match="bits has 2 values for 3 layers; give one for each"):
        regard.hf.cache(model_of("llama"), "quantized", bits=[8, 4])


def test_a_short_name_has_its_option():
    with pytest.raises(ValueError, match="kind='int8' has bits=8, got 4; leave it out, or give"):
        regard.hf.cache(model_of("llama"), "int8", bits=4)
    with pytest.raises(ValueError, match=r"kind='int7' is not one of .*; did you mean 'int"):
        regard.hf.cache(model_of("llama"), "int7")
    with pytest.raises(TypeError, match=r"kind is a name or a function .* got 8"):
        regard.hf.cache(model_of("llama"), 8)
