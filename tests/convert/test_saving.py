"""A saved model loads unchanged, transformers alone refuses it, and an interrupted save leaves
nothing."""

import json
import random
import struct

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import regard.hf
from full_disk import files_of_at_most
from interpreters import run_python
from joined import joined, random_mla
from regard import NTK, Causal, LatentKVAttention, Llama3, LongRope, Rotary, Yarn
from regard.convert import as_latent, saving, spell_out
from regard.convert.exact.portable import to_deepseek_v3
from regard.convert.saving import check_free, save
from regard.hf import CheckpointError, attention_modules, attention_of
from regard.hf.loading.descriptions import described, layer_from
from regard.hf.placing.place import has_placed_layers, place
from regard.rope.scaling import Frequencies, LinearScaling
from tiny import tiny, tokens

CLOSE = {"atol": 1e-6, "rtol": 1e-6}
FORMS = {"latent kv": as_latent, "mla": joined}
TEXTS = {"card": "# A model\n", "report": {"perplexity": 1.5, "layers": [1, 2]}}


def layers_of(model):
    return [attention_of(module) for module in attention_modules(model).values()]


def placed(family="llama", form="latent kv"):
    model = tiny(family)
    return place(model, [FORMS[form](layer) for layer in layers_of(model)])


def logits(model, length=9):
    with torch.no_grad():
        return model(tokens(2, length)).logits


def tokenizer():
    words = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


def change(file, **entries):
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.fixture
def folder(tmp_path):
    return save(placed(), None, tmp_path / "out", **TEXTS)


SAVED = ["llama", "llama with biases", "llama 3 rope", "mistral", "qwen2"]


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *((family, form) for form in FORMS for family in SAVED),
        *((family, "latent kv") for family in ("qwen3", "gemma3", "olmo2")),
    ],
)
def test_a_saved_model_loads_unchanged(family, form, tmp_path):
    saved = placed(family, form)
    saved.generation_config.max_new_tokens = 7
    out = save(saved, tokenizer(), tmp_path / "out", **TEXTS)
    model, words = regard.hf.load(out)
    assert type(model) is type(saved)
    assert has_placed_layers(model) and not model.training
    before, after = saved.state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    assert all(after[name].equal(weight) for name, weight in before.items())
    torch.testing.assert_close(logits(model), logits(saved), **CLOSE)
    assert [repr(each) for each in attention_modules(model).values()] == [
        repr(each) for each in attention_modules(saved).values()
    ]
    assert model.generation_config.max_new_tokens == 7
    if not family.startswith(
        "qwen"
    ):  # whose tokenizer transformers makes of a vocabulary of its own
        assert words("one two")["input_ids"] == [1, 2]
    assert (out / "README.md").read_text() == TEXTS["card"]
    assert json.loads((out / "report.json").read_text()) == TEXTS["report"]


def test_without_a_card_and_a_report_it_has_a_title(tmp_path):
    out = save(placed(), None, tmp_path / "out")
    assert (out / "README.md").read_text().startswith("# LlamaForCausalLM\n")
    assert not (out / "report.json").exists()


def test_a_loaded_model_has_the_loss_of_its_class(folder):
    model, _ = regard.hf.load(folder)
    assert model.loss_type == "ForCausalLM"
    assert model(input_ids=tokens(2, 9), labels=tokens(2, 9)).loss.isfinite()


def test_it_is_saved_again_unchanged(folder):
    again = save(regard.hf.load(folder)[0], None, folder.parent / "again", **TEXTS)
    for file in folder.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_shards_and_another_dtype_come_back(tmp_path):
    saved = place(tiny("llama"), random_mla(tiny("llama"))).bfloat16()
    out = save(saved, None, tmp_path / "out", **TEXTS, max_shard_size="10KB")
    assert len(list(out.glob("regard-0*.safetensors"))) > 2
    model, _ = regard.hf.load(out, dtype=torch.bfloat16)
    assert all(model.state_dict()[name].equal(one) for name, one in saved.state_dict().items())
    assert {each.dtype for each in regard.hf.load(out)[0].parameters()} == {torch.float32}


def test_tied_embeddings_are_written_once(tmp_path):
    model = tiny("llama")
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    place(model, [as_latent(layer) for layer in layers_of(model)])
    out = save(model, None, tmp_path / "out", **TEXTS)
    assert b"lm_head" not in (out / "regard.safetensors").read_bytes()
    again, _ = regard.hf.load(out)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    torch.testing.assert_close(logits(again), logits(model), **CLOSE)


def test_layers_that_share_tensors_are_written_separately(tmp_path):
    model = tiny("llama")
    place(model, [as_latent(layers_of(model)[0])] * 2)
    again, _ = regard.hf.load(save(model, None, tmp_path / "out", **TEXTS))
    torch.testing.assert_close(logits(again), logits(model), **CLOSE)


def test_stock_models_are_loaded_by_transformers(tmp_path):
    model = tiny("llama")
    place(model, [spell_out(layer) for layer in layers_of(model)])
    stock = to_deepseek_v3(model, random_mla(model))
    for name, each in {"mha": model, "mla": stock}.items():
        out = save(each, tokenizer(), tmp_path / name, **TEXTS)
        again = AutoModelForCausalLM.from_pretrained(out)
        assert type(again) is type(each)
        torch.testing.assert_close(logits(again), logits(each), **CLOSE)
        assert AutoTokenizer.from_pretrained(out)("two")["input_ids"] == [2]
        assert regard.hf.load(out)[1]("two")["input_ids"] == [2]
        assert "# A model" in (out / "README.md").read_text()


@pytest.mark.parametrize("made_by", [AutoModel, AutoModelForCausalLM, LlamaForCausalLM])
@pytest.mark.parametrize("size", ["5GB", "10KB"])
def test_transformers_alone_refuses_it(made_by, size, tmp_path):
    out = save(placed(), None, tmp_path / "out", **TEXTS, max_shard_size=size)
    with pytest.raises((ValueError, OSError), match=r"model type `regard`|no file named"):
        made_by.from_pretrained(out)


def test_a_card_is_the_only_readme(tmp_path):
    out = save(placed(), tokenizer(), tmp_path / "out", **TEXTS)
    names = {file.name for file in out.iterdir()}
    assert {"config.json", "regard.safetensors", "README.md", "report.json"} <= names
    assert not any(name.startswith("model") for name in names)


@pytest.mark.parametrize("at", ["_write_placed", "_write_weights", "_flush", "attention_modules"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_save_leaves_nothing(at, error, tmp_path, monkeypatch):
    def interrupted(*given):
        raise error("now")

    monkeypatch.setattr(saving, at, interrupted)
    (tmp_path / "out").mkdir()
    for out in ("out", "other"):
        with pytest.raises(error, match="now"):
            save(placed(), tokenizer(), tmp_path / out, **TEXTS)
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    assert not any((tmp_path / "out").iterdir())


KILLED = """
import os, sys
from pathlib import Path
from torch import nn
from regard.convert import saving

class Model(nn.Module):
    def save_pretrained(self, folder, **options):
        (Path(folder) / "config.json").write_text("{}")

saving._flush = lambda path: os._exit(9)
saving.save(Model(), None, sys.argv[1], card="", report={})
"""


def test_a_killed_save_leaves_no_folder_of_that_name(tmp_path):
    assert run_python("-c", KILLED, tmp_path / "out").returncode == 9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.") and left.name.endswith(".partial")
    save(placed(), None, tmp_path / "out", **TEXTS)


def test_an_empty_folder_is_filled(tmp_path):
    out = save(placed(), None, tmp_path, **TEXTS)
    assert out == tmp_path and (out / "config.json").is_file()


def test_an_existing_path_is_not_overwritten(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for out in (tmp_path, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(FileExistsError, match="give another folder, or remove it"):
            check_free(out)
        with pytest.raises(FileExistsError, match="is not empty"):
            save(None, None, out, **TEXTS)
    with pytest.raises(FileNotFoundError, match="is not a folder; make it"):
        save(None, None, tmp_path / "no" / "out", **TEXTS)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.parametrize("value", [float("nan"), {1, 2}])
def test_a_report_that_json_cannot_hold_is_refused_first(value, tmp_path):
    with pytest.raises((ValueError, TypeError), match="JSON"):
        save(None, None, tmp_path / "out", card="", report={"value": value})


ROPES = [
    Rotary(8, pairing="pairs"),
    Rotary(6, theta=3e5, scaling=Frequencies((1.0, 0.5, 0.0))),
    Rotary(8, scaling=LinearScaling(2)),
    Rotary(8, scaling=NTK(2.0, 64)),
    Rotary(8, scaling=Yarn(4, original_max_position=64, truncate=False, mscale=0.5)),
    Rotary(8, scaling=Llama3(8)),
    Rotary(8, scaling=LongRope([1] * 4, [2.0] * 4, original_max_position=64, factor=4)),
]


@pytest.mark.parametrize("rope", ROPES, ids=repr)
def test_every_rope_is_described(rope, tmp_path):
    layer = LatentKVAttention(
        8, 2, num_kv_heads=1, head_dim=8, kv_lora_rank=4, rope=rope, mask=Causal()
    )
    entry = json.loads(json.dumps(described(layer)))
    again = layer_from(entry, tmp_path)
    assert again.rope == layer.rope and repr(again.rope) == repr(rope)


def one_layer(**entries):
    """What the first layer's entry becomes."""

    def spoil(config):
        config["layers"][0] |= entries
        return config

    return spoil


def base(**entries):
    def spoil(config):
        config["base"] |= entries
        return config

    return spoil


def top(**entries):
    return lambda config: config | entries


ROPE = {"dim": 8, "theta": 10_000.0, "pairing": "halves", "scaling": None}
HOSTILE = {
    "another format": (top(format=2), "'format' must be 1, got 2; a newer regard"),
    "an entry more": (top(auto_map={}), "it must have architectures, base, format, layers"),
    "no base": (top(base=None), "'base' must be the configuration of a model"),
    "an unknown base": (base(model_type="evil"), "'base' must be the configuration of a model"),
    "itself as base": (base(model_type="regard"), "'base' must be the configuration of a model"),
    "a quantised base": (base(quantization_config={"bits": 4}), "'base' may not be quantised"),
    "another architecture": (base(architectures=["BertModel"]), "BertModel does not fit"),
    "a huge vocabulary": (base(vocab_size=1 << 39), "may ask for no more"),
    "a huge number": (base(vocab_size=1 << 41), "may be at most 1099511627776"),
    "another width": (base(hidden_size=16), "hidden_size=24, the model has 16"),
    "more layers": (base(num_hidden_layers=3), "has 3 attention modules, got 2 layers"),
    "a million layers": (base(num_hidden_layers=10**6), "'num_hidden_layers' may be at most 10000"),
    "many layers": (base(num_hidden_layers=9999), "a model may have"),
    "kernels from elsewhere": (base(attn_implementation="who/what"), "may not name code"),
    "no list of layers": (top(layers={}), "'layers' must be a list"),
    "too many entries": (
        top(layers=[{}] * 3),
        "'layers' must have one entry for each layer, got 3",
    ),
    "entries that are none": (top(layers=[1, 2]), "a layer must have a kind out of LatentKV, MLA"),
    "an unknown kind": (one_layer(kind="Evil"), "a layer must have a kind out of LatentKV, MLA"),
    "a kind that is none": (one_layer(kind=["MLA"]), "a layer must have a kind out of"),
    "another kind": (one_layer(kind="MLA"), "a layer of kind 'MLA' must have"),
    "an argument more": (one_layer(score_bias=1), "a layer of kind 'LatentKV' must have"),
    "a huge rank": (one_layer(kv_lora_rank=1 << 30), "'kv_lora_rank' of a layer must be a whole"),
    "a wide rank": (one_layer(kv_lora_rank=1 << 19), "may ask for no more"),
    "another rank": (one_layer(kv_lora_rank=23), "every weight in its shape, got '2 mismatched"),
    "a rank of true": (one_layer(kv_lora_rank=True), "must be a whole number up to"),
    "a rank of nothing": (one_layer(kv_lora_rank=0), "a layer must be one that can be built"),
    "heads that do not divide": (
        one_layer(num_kv_heads=3),
        "a layer must be one that can be built",
    ),
    "a scale of words": (one_layer(scale="1"), "'scale' of a layer must be a finite number"),
    "an endless scale": (one_layer(scale=float("inf")), "'scale' of a layer must be a finite"),
    "a dropout of two": (one_layer(dropout=2.0), "a layer must be one that can be built"),
    "a bias of one": (one_layer(bias=1), "'bias' of a layer must be true or false"),
    "a bias that is not there": (one_layer(bias=True), "got '2 missing keys: model.layers.0"),
    "a window": (one_layer(window=3), "has window 3, the model's masks have None"),
    "a window of none": (one_layer(window=0), "SlidingWindow"),
    "a norm of words": (one_layer(qk_norm="evil"), "'qk_norm' of a layer must be null, 'head' or"),
    "a norm of lists": (one_layer(qk_norm=["head"]), "'qk_norm' of a layer must be null, 'head'"),
    "a norm that is not there": (one_layer(qk_norm="head"), "got '2 missing keys: model.layers.0"),
    "an endless epsilon": (one_layer(norm_eps=float("inf")), "'norm_eps' of a layer must be a fin"),
    "a rope of words": (one_layer(rope="evil"), "'rope' of a layer must be null or a rotary"),
    "a rope of parts": (one_layer(rope={"dim": 8}), "'rope' of a layer must be null or a rotary"),
    "a long rope": (
        one_layer(rope=ROPE | {"dim": 1 << 20, "scaling": {"kind": "LinearScaling", "factor": 2}}),
        "'rope' of a layer must be null or a rotary embedding, got 'dim=1048576'",
    ),
    "a rope too wide": (one_layer(rope=ROPE | {"dim": 16}), "one that can be built, got 'rope="),
    "an odd rope": (one_layer(rope=ROPE | {"dim": 7}), "dim must be even"),
    "an unknown scaling": (one_layer(rope=ROPE | {"scaling": {"kind": "eval"}}), "'rope' of a lay"),
    "frequencies of words": (
        one_layer(rope=ROPE | {"scaling": {"kind": "Frequencies", "values": ["1"] * 4}}),
        "'rope' of a layer must be",
    ),
    "endless frequencies": (
        one_layer(rope=ROPE | {"scaling": {"kind": "Frequencies", "values": [float("nan")] * 4}}),
        "'rope' of a layer must be",
    ),
    "too few frequencies": (
        one_layer(rope=ROPE | {"scaling": {"kind": "Frequencies", "values": [1.0]}}),
        "there are 1 values",
    ),
    "a scaling of lists": (
        one_layer(rope=ROPE | {"scaling": {"kind": "LinearScaling", "factor": [1.0]}}),
        "'rope' of a layer must be",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_configuration_is_checked_against_the_files(name, folder):
    spoil, sentence = HOSTILE[name]
    file = folder / "config.json"
    file.write_text(json.dumps(spoil(json.loads(file.read_text()))))
    with pytest.raises(CheckpointError, match=sentence) as caught:
        regard.hf.load(folder)
    assert str(folder) in str(caught.value)


def spoiled(value, numbers):
    """The value with one entry, however deep, dropped or become something else."""
    copied = json.loads(json.dumps(value))
    holder = copied
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = numbers.choice(keys)
        inner = holder[key]
        if not (isinstance(inner, dict | list) and inner) or numbers.random() < 0.1:
            break
        holder = inner
    if numbers.random() < 0.2:
        del holder[key]
    else:
        holder[key] = numbers.choice(STRANGE)
    return copied


STRANGE = (None, True, 0, 1, -1, 7, 1 << 19, 1 << 31, 1 << 40, 10**30, 0.5, -1e308, float("nan"))
STRANGE += (float("inf"), "", "llama", "\0", "x" * 5000, [], [0], [[]] * 50, {}, {"a": {"b": []}})


@pytest.mark.parametrize("seed", range(2))
def test_a_spoiled_configuration_loads_or_is_refused(seed, tmp_path):
    model = place(tiny("llama 3 rope"), random_mla(tiny("llama")))
    out = save(model, None, tmp_path / "out", **TEXTS)
    sound = json.loads((out / "config.json").read_text())
    numbers, refusals = random.Random(seed), 0
    for _ in range(40):
        part = numbers.choice(("layers", "layers", "base"))
        said = sound | {part: spoiled(sound[part], numbers)}
        (out / "config.json").write_text(json.dumps(said))
        try:
            regard.hf.load(out)
        except CheckpointError:
            refusals += 1
    assert refusals > 10


def test_weights_are_checked(folder):
    file = folder / "regard.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    renamed = data[8 : 8 + length].replace(b'"model.norm.weight"', b'"model.nrom.weight"')
    for spoiled, message in (
        (data[:-1], "safetensors must be able to read it"),
        (data[:8] + renamed + data[8 + length :], "got '1 missing keys: model.norm.weight'"),
        (b"", "it must begin with a header"),
    ):
        file.write_bytes(spoiled)
        with pytest.raises(CheckpointError, match=message):
            regard.hf.load(folder)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"weights in regard.safetensors or regard.index"):
        regard.hf.load(folder)


def test_an_index_and_links_stay_in_their_folder(tmp_path):
    out = save(placed(), None, tmp_path / "out", **TEXTS, max_shard_size="10KB")
    change(out / "regard.index.json", weight_map={"model.norm.weight": "../x.safetensors"})
    with pytest.raises(CheckpointError, match=r"must be the name of a \*.safetensors file beside"):
        regard.hf.load(out)
    (out / "config.json").rename(tmp_path / "elsewhere.json")
    (out / "config.json").symlink_to("../elsewhere.json")
    with pytest.raises(CheckpointError, match="a link may not lead out of its folder"):
        regard.hf.load(out)


def test_a_folder_without_entries_for_norms_has_none(folder):
    """As they were written before a joint latent could have them."""
    file = folder / "config.json"
    said = json.loads(file.read_text())
    for entry in said["layers"]:
        assert entry.pop("qk_norm") is None and entry.pop("norm_eps") == 1e-6
    wanted = logits(regard.hf.load(folder)[0])
    file.write_text(json.dumps(said))
    assert logits(regard.hf.load(folder)[0]).equal(wanted)


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_a_norm_that_cannot_be_described_is_refused(name, tmp_path):
    model = placed("qwen3")
    setattr(model.model.layers[1].self_attn, name, torch.nn.LayerNorm(8))
    with pytest.raises(ValueError, match=rf"{name} is LayerNorm.*only an nn.RMSNorm with a weight"):
        save(model, None, tmp_path / "out", **TEXTS)
    assert not any(tmp_path.iterdir())


def test_a_norm_comes_back_with_its_epsilon(tmp_path):
    model = tiny("qwen3")
    layers = [as_latent(layer) for layer in layers_of(model)]
    layers[0].k_norm.eps = layers[0].q_norm.eps = 0.5
    layers[1].k_norm.eps = layers[1].q_norm.eps = None  # torch's own for the dtype
    saved = place(model, layers)
    again, _ = regard.hf.load(save(saved, None, tmp_path / "out", **TEXTS))
    torch.testing.assert_close(logits(again), logits(saved), **CLOSE)
    eps = [each.k_norm.eps for each in attention_modules(again).values()]
    assert eps == [0.5, torch.finfo(torch.float32).eps]


def test_an_unknown_scaling_is_refused(tmp_path):
    class Own(LinearScaling):
        pass

    model = tiny("llama")
    layers = [as_latent(layer) for layer in layers_of(model)]
    layers[1].rope = Rotary(8, scaling=Own(2))
    place(model, layers)
    with pytest.raises(ValueError, match=r"scaling=.* cannot be saved; Frequencies, LinearScaling"):
        save(model, None, tmp_path / "out", **TEXTS)
    assert not any(tmp_path.iterdir())


def test_a_full_disk_is_an_os_error_and_leaves_nothing(tmp_path):
    with files_of_at_most(4096), pytest.raises(OSError, match=r"not written|too large"):
        save(tiny("llama"), None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
