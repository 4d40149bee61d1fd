"""load returns the model that was saved, of any kind, or raises with the reason."""

import json
import struct

import pytest
import torch
from transformers import LlamaConfig

import regard.hf
from checkpoints import KINDS, tiny, write_gguf
from regard.hf import CheckpointError
from regard.hf.loading.checkpoints import stored_dtype


@pytest.fixture
def folder(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    return tmp_path


def change(file, **entries):
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_comes_back(kind, tmp_path):
    saved = tiny(kind)
    saved.save_pretrained(tmp_path)
    model, tokenizer = regard.hf.load(tmp_path)
    assert type(model) is type(saved)
    assert tokenizer is None
    assert not model.training
    before, after = saved.state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    assert all(after[name].equal(weight) for name, weight in before.items())


def test_shards_come_back(tmp_path):
    saved = tiny("llama")
    saved.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model, _ = regard.hf.load(tmp_path)
    assert all(model.state_dict()[name].equal(one) for name, one in saved.state_dict().items())


def test_the_dtype_is_the_argument(folder):
    model, _ = regard.hf.load(folder, dtype=torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_of_a_checkpoint_is_known_without_its_weights(dtype, tmp_path):
    tiny("llama").to(dtype).save_pretrained(tmp_path)
    assert stored_dtype(tmp_path) == dtype
    values = json.loads((tmp_path / "config.json").read_text())
    del values["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert stored_dtype(tmp_path) == dtype  # that of most weights


def test_the_dtype_of_a_gguf_and_of_shards(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    assert stored_dtype(tmp_path / "tiny.gguf") == torch.float16
    tiny("llama").bfloat16().save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    change(tmp_path / "shards" / "config.json", dtype=None)
    assert stored_dtype(tmp_path / "shards") == torch.bfloat16


def test_a_gguf_comes_back(tmp_path):
    embedding = write_gguf(tmp_path / "tiny.gguf")
    model, tokenizer = regard.hf.load(tmp_path / "tiny.gguf")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert tokenizer is None
    assert model.get_input_embeddings().weight.equal(torch.from_numpy(embedding))


def test_a_cache_of_the_hub_is_read(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    blobs.mkdir()
    tiny("llama").save_pretrained(snapshot)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    model, _ = regard.hf.load(snapshot)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_what_sdpa_cannot_run_is_left_to_transformers(tmp_path):
    tiny("gpt-oss").save_pretrained(tmp_path)
    assert regard.hf.load(tmp_path)[0].config._attn_implementation == "eager"


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_a_file_that_is_not_found(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing.partition(".")[0]):
        regard.hf.load(folder)


def test_nothing_at_all_is_not_found(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"to fetch it from the Hub: hf download owner/name"
    ):
        regard.hf.load("owner/name")
    with pytest.raises(FileNotFoundError, match=r"does not exist; give a folder with config.json"):
        regard.hf.load(tmp_path / "nothing")


def test_a_missing_shard_is_not_found(tmp_path):
    tiny("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(FileNotFoundError, match="get the whole checkpoint"):
        regard.hf.load(tmp_path)


def test_a_pickle_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin, and pickles can run code"):
        regard.hf.load(folder)


def test_code_is_refused_and_not_run(folder):
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    code = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    change(folder / "config.json", auto_map=code)  # as published DeepSeek-V3 and Phi-3 have it
    assert type(regard.hf.load(folder)[0]).__module__.startswith("transformers.")
    change(folder / "config.json", auto_map=code, model_type="evil")
    with pytest.raises(CheckpointError, match="transformers must be able to read it"):
        regard.hf.load(folder)


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"vocab_size": 1 << 39}, "elements, and its configuration may ask for no more"),
        ({"vocab_size": 1 << 41}, "'vocab_size' may be at most 1099511627776, got 2199023255552"),
        ({"num_hidden_layers": 9_999}, "with 21 tensors, a model may have 2336 modules"),
        ({"num_hidden_layers": 10**6}, "'num_hidden_layers' may be at most 10000, got 1000000"),
        ({"num_hidden_layers": 3}, "every weight in its shape, got '9 missing keys: model.lay"),
        ({"hidden_size": 16}, r"embed_tokens.weight of \(61, 24\) for \(61, 16\)"),
        ({"num_labels": 10**9}, "'num_labels' may be at most 1048576"),
        ({"vocab_size": float("nan")}, "'vocab_size' must be finite, got nan"),
        ({"transformers_weights": "x.safetensors"}, "'transformers_weights' is not allowed"),
        ({"attn_implementation": "who/what"}, "may not name code from elsewhere, got 'who/what'"),
        ({"architectures": ["BertModel"]}, "BertModel does not fit a configuration of llama"),
        ({"model_type": "unheard-of"}, "transformers must be able to read it"),
        ({"a": [[[[]]] * 3]}, None),
        ({"architectures": ["UnheardOf"]}, None),
        ({"architectures": None}, None),
    ],
)
def test_a_configuration_is_held_against_the_files(folder, entries, sentence):
    change(folder / "config.json", **entries)
    if sentence is None:
        assert isinstance(regard.hf.load(folder)[0].config, LlamaConfig)
        return
    with pytest.raises(CheckpointError, match=sentence) as caught:
        regard.hf.load(folder)
    assert str(folder) in str(caught.value)
    assert ", got " in str(caught.value) and "; " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "its JSON must be an object, got \\[\\]"),
        ("{", "it must hold valid JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' comes twice"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "may be 64 levels deep"),
        ("[" * 100_000, "it must hold valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "it must hold valid JSON"),
        ('{"a": [' + "0," * (1 << 21) + "0]}", "may have 1048576 commas"),
        (" " * ((1 << 24) + 1), "it may have 16777216 bytes, got 16777217"),
    ],
)
def test_a_configuration_is_bounded(folder, text, sentence):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=sentence):
        regard.hf.load(folder)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "x.bin", "a\\x.safetensors"]
)
def test_an_index_stays_in_its_folder(tmp_path, name):
    tiny("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    index = tmp_path / "model.safetensors.index.json"
    change(index, weight_map={"model.norm.weight": name})
    with pytest.raises(CheckpointError, match=r"must be the name of a \*.safetensors file beside"):
        regard.hf.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_stays_in_its_folder(tmp_path, name):
    tiny("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "model" / name).symlink_to("../elsewhere")
    with pytest.raises(CheckpointError, match="a link may not lead out of its folder, got "):
        regard.hf.load(tmp_path / "model")


@pytest.mark.parametrize("gguf", [False, True])
def test_an_adapter_is_refused(folder, gguf):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    write_gguf(folder / "tiny.gguf")
    with pytest.raises(CheckpointError, match="an adapter is not read"):
        regard.hf.load(folder / "tiny.gguf" if gguf else folder)


def test_a_weight_that_is_not_there_is_not_made_up(folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length].replace(b'"model.norm.weight"', b'"model.nrom.weight"')
    file.write_bytes(data[:8] + header + data[8 + length :])
    with pytest.raises(CheckpointError, match=r"got '1 missing keys: model.norm.weight'"):
        regard.hf.load(folder)


def test_a_broken_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(CheckpointError, match="transformers must be able to read it"):
        regard.hf.load(folder)


def test_what_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"PK" * 20)
    with pytest.raises(CheckpointError, match="a GGUF file begins with b'GGUF', got b'PKPK'"):
        regard.hf.load(tmp_path / "tiny.gguf")
