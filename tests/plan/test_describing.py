"""Paths to describe, published figures, and files that are damaged or hostile."""

import copy
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from covering import few
from gguf_headers import plain_block, write_header
from published_configs import LLAMA_3_1_8B, PUBLISHED
from regard.convert import as_latent, save
from regard.hf import attention_modules, attention_of, place
from regard.hf.loading.untrusted import CheckpointError
from regard.plan.describing import describe
from regard.plan.modules import shape_of
from regard.plan.shapes import DTYPE_BYTES, LayerShape, ModelShape

VALUES: list[Any] = [
    *(None, True, False, "", "6", "\x1b[31m", "<script>", [], {}, [[]], {"a": {}}),
    *(0, -1, 1, 3, 7, 10**9, 10**40, 2.5, -0.0, 1e308, float("nan"), float("inf")),
    *([1] * 5, [None], ["full_attention"] * 3, ["no_attention"] * 32, [0.5] * 48),
]
NAMES = ("num_kv_cache_heads", "sliding_window", "kv_lora_rank", "layer_types", "rope_scaling")
SECONDS = 4.0  # of this process for one file, with the import of its model; most take 0.1


def folder_of(tmp_path: Path, config: Any, name: str = "model") -> Path:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def cached(layer: LayerShape, dtype: str) -> int:
    """Bytes that a token adds to a layer's cache, from the papers."""
    numbers = layer.num_kv_heads * (layer.head_dim + layer.v_head_dim)
    if layer.kv_lora_rank is not None:
        numbers = layer.kv_lora_rank + layer.qk_rope_head_dim
    return numbers * DTYPE_BYTES[dtype]


def test_a_folder_and_its_file_say_the_same(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LLAMA_3_1_8B)
    model = describe(folder)
    assert model == describe(folder / "config.json") == describe(str(folder))
    assert (model.name, model.architecture, model.dtype) == ("model", "llama", "bfloat16")
    assert model.max_positions == 131072 and model.weight_bytes is None


def test_bytes_of_weights(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LLAMA_3_1_8B)
    for name, size in (("model-1.safetensors", 30), ("model-2.safetensors", 12)):
        (folder / name).write_bytes(b"x" * size)
    (folder / "consolidated.safetensors").write_bytes(b"x" * 99)
    assert describe(folder).weight_bytes == 42


@pytest.mark.parametrize(
    ("name", "bytes_a_token"),
    [
        ("Llama-3.1-8B", 131_072),  # 2 x 8 x 128 x 2 bytes x 32 layers
        ("DeepSeek-V3", 70_272),  # (512 + 64) x 2 bytes x 61 layers
        ("Qwen3-0.6B", 114_688),
        ("falcon-7b", 8_192),
        ("gemma-3-4b", 139_264),
    ],
)
def test_published_caches(tmp_path: Path, name: str, bytes_a_token: int) -> None:
    model = describe(folder_of(tmp_path, PUBLISHED[name]))
    assert sum(cached(layer, model.dtype) for layer in model.layers) == bytes_a_token


def test_deepseek_v2_caches_93_percent_less(tmp_path: Path) -> None:
    """Of DeepSeek 67B, as the paper says (arXiv:2405.04434): 95 layers of 8 key heads of 128."""
    model = describe(folder_of(tmp_path, PUBLISHED["DeepSeek-V2"]))
    own = sum(cached(layer, "bfloat16") for layer in model.layers)
    assert own == 60 * 1152
    assert round(100 * (1 - own * 6 / 16 / (95 * 2 * 8 * 128 * 2)), 1) == 93.3  # at 6 bits


def test_every_published_model_is_described(tmp_path: Path) -> None:
    for name, config in PUBLISHED.items():
        model = describe(folder_of(tmp_path, config, name))
        assert model.name == name
        assert len({index for at in model.distinct().values() for index in at}) == len(model.layers)


def test_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist: give a folder"):
        describe(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"does not exist: give a folder"):
        describe(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("", "valid JSON"),
        ("{", "valid JSON"),
        ("[]", "must be an object"),
        ("null", "must be an object"),
        ('{"model_type": "llama", "model_type": "llama"}', "comes twice"),
        ("{}", "'model_type' must name the architecture"),
        ('{"model_type": ["llama"]}', "'model_type' must name"),
        ('{"model_type": "t5"}', "cross-attention"),
        ('{"model_type": "unheard_of"}', "'model_type' cannot be described: .*, got 'unheard_of'"),
        ('{"model_type": "llama"}', "'hidden_size' must be a whole number"),
        (
            '{"model_type": "llava", "text_config": {"model_type": "nothing"}}',
            "cannot be described",
        ),
        ('{"model_type": "llava", "text_config": [1]}', "cannot be described"),
        ('{"a":' * 2000 + "1" + "}" * 2000, "valid JSON|levels deep"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: str, rule: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=rule) as refusal:
        describe(tmp_path)
    assert len(str(refusal.value)) < 1500


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"num_hidden_layers": 10**9}, "may be at most 10000"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "'num_hidden_layers' must be a whole number"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"hidden_size": 4095}, "not a multiple of the number of attention heads"),
        ({"num_key_value_heads": 5}, "5 key heads do not divide 32 query heads"),
        ({"num_key_value_heads": 24}, "24 key heads do not divide 32 query heads"),
        ({"max_position_embeddings": 0}, "'max_position_embeddings' must be a whole number of 1"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"rope_theta": "x"}, "cannot be described"),
        ({"rope_scaling": [8.0]}, "cannot be described"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "cannot be described"),
        ({"rope_scaling": {"rope_type": "linear"}}, "KeyError"),
        ({"torch_dtype": "int3"}, "'dtype' must be one of"),
    ],
)
def test_entries_that_are_refused(tmp_path: Path, changed: Any, rule: str) -> None:
    with pytest.raises(CheckpointError, match=rule):
        describe(folder_of(tmp_path, LLAMA_3_1_8B | changed))


def test_unknown_kinds_of_layers_are_refused_by_name(tmp_path: Path) -> None:
    kinds = ["full_attention"] * 27 + ["moonlight_attention"]
    config = PUBLISHED["Qwen3-0.6B"] | {"layer_types": kinds}
    with pytest.raises(CheckpointError, match=r"moonlight_att|layer_types"):
        describe(folder_of(tmp_path, config))


def test_links_and_what_is_no_file(tmp_path: Path) -> None:
    outside = folder_of(tmp_path, LLAMA_3_1_8B, "outside")
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "config.json").symlink_to(outside / "config.json")
    with pytest.raises(CheckpointError, match="may not lead out of its folder"):
        describe(folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(CheckpointError, match="must be a file"):
        describe(folder)
    with pytest.raises(CheckpointError, match="must be a file"):
        describe(folder / "config.json")
    os.mkfifo(folder / "model.gguf")
    with pytest.raises(CheckpointError, match="must be a file"):
        describe(folder / "model.gguf")
    (folder / "model.gguf").unlink()
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(FileNotFoundError):
        describe(folder)


def damaged(config: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The entries with one to three changed, removed, added or nested."""
    spoilt = copy.deepcopy(config)
    for _ in range(draw.randint(1, 3)):
        holder = spoilt
        inner = [each for each in holder.values() if isinstance(each, dict) and each]
        if inner and draw.random() < 0.5:
            holder = draw.choice(inner)
        key = draw.choice([*holder, *NAMES])
        if draw.random() < 0.2:
            holder.pop(key, None)
        else:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
    return spoilt


def outcome(path: Path) -> ModelShape | str:
    """The description, or the text of the error; other errors than a refusal are raised."""
    try:
        return describe(path)
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("part", few(range(5), 5))
def test_500_damaged_configurations(tmp_path: Path, part: int) -> None:
    """Each is described, or refused in one clear error, in little time."""
    described = 0
    describe(folder_of(tmp_path, LLAMA_3_1_8B))  # imports transformers
    for seed in range(100 * part, 100 * part + 100):
        draw = random.Random(seed)
        config = damaged(draw.choice(list(PUBLISHED.values())), draw)
        folder = folder_of(tmp_path, config)
        start = time.process_time()
        found = outcome(folder)
        if isinstance(found, str):
            assert found.startswith(str(folder)) and ", got " in found, (seed, found)
            assert "\x1b" not in found and len(found) < 1500, seed
        else:
            described += 1
            assert 1 <= len(found.layers) <= 10_000, seed
        assert time.process_time() - start < SECONDS, seed
    assert 5 < described < 95  # the mutations are neither all harmless nor all fatal


def test_200_damaged_gguf_headers(tmp_path: Path) -> None:
    keys = {"embedding_length": 24, "attention.head_count": 6, "attention.head_count_kv": [2, 6]}
    keys |= {"attention.sliding_window": 7, "context_length": 64, "rope.freq_base": 1e4}
    blocks = [plain_block(24, 6, count, 4) for count in (2, 6)]
    sound = write_header(tmp_path / "sound.gguf", "gemma2", keys, blocks).read_bytes()
    end = sound.index(b"blk.1.attn_output") + 60
    file = tmp_path / "spoilt.gguf"
    for seed in range(200):
        draw = random.Random(seed)
        data = bytearray(sound)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(end)] = draw.choice((0, 1, 9, 127, 255))
        file.write_bytes(data if draw.random() < 0.8 else data[: draw.randrange(len(data))])
        found = outcome(file)
        assert not isinstance(found, str) or found.startswith(str(file)), (seed, found)


def test_many_layers_take_little_time(tmp_path: Path) -> None:
    count = 500
    config = PUBLISHED["gemma-3-1b"] | {"num_hidden_layers": count}
    config |= {"layer_types": ["sliding_attention", "full_attention"] * (count // 2)}
    start = time.process_time()
    assert len(describe(folder_of(tmp_path, config)).layers) == count
    config = PUBLISHED["SmolLM3-3B"] | {"num_hidden_layers": count}
    config |= {"layer_types": None, "no_rope_layers": [1, 0] * (count // 2)}
    assert len(describe(folder_of(tmp_path, config)).layers) == count
    config = PUBLISHED["gpt2"] | {"n_layer": count, "scale_attn_by_inverse_layer_idx": True}
    model = describe(folder_of(tmp_path, config))
    assert len(model.distinct()) == count
    assert time.process_time() - start < 6 * SECONDS


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    config = LlamaConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3
    )
    config.vocab_size, config.intermediate_size = 20, 16
    model = LlamaForCausalLM(config)
    layers = [as_latent(attention_of(each)) for each in attention_modules(model).values()]
    place(model, layers)
    folder = tmp_path_factory.mktemp("converted") / "small"
    save(model, None, folder)
    return folder, layers


def test_a_saved_conversion(converted: tuple[Path, Any]) -> None:
    folder, layers = converted
    model = describe(folder)
    assert model.architecture == "regard" and len(model.layers) == 3
    assert model.weight_bytes is not None and model.weight_bytes > 1000
    assert any("Converted from llama" in remark for remark in model.remarks)
    for shape, layer in zip(model.layers, layers, strict=True):
        assert shape.kind == "LatentKV" and shape.keys_by_position
        assert shape.kv_lora_rank == layer.kv_lora_rank
        assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 6)
        assert shape.rope == "Rotary(6)" and shape == shape_of(layer)


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (lambda entry: entry["layers"].pop(), "an entry for each of the 3 layers"),
        (lambda entry: entry.pop("base"), "it must have"),
        (lambda entry: entry.update(base=[]), "'base' must be an object"),
        (lambda entry: entry.update(format=9), "format 1"),
        (lambda entry: entry["base"].update(hidden_size=48), "hidden_size=48"),
        (lambda entry: entry["base"].update(model_type="unheard"), "'base.model_type'"),
        (lambda entry: entry["layers"].__setitem__(1, None), "must have a kind"),
        (lambda entry: entry["layers"][1].update(kv_lora_rank=True), "'kv_lora_rank' of a layer"),
        (lambda entry: entry["layers"][1].update(kv_lora_rank=1 << 30), "'kv_lora_rank'"),
    ],
)
def test_damaged_ones(converted: tuple[Path, Any], tmp_path: Path, spoil: Any, rule: str) -> None:
    entry = copy.deepcopy(json.loads((converted[0] / "config.json").read_text()))
    spoil(entry)
    (tmp_path / "config.json").write_text(json.dumps(entry))
    with pytest.raises(CheckpointError, match=rule):
        describe(tmp_path)


GGUF = {"embedding_length": 24, "attention.head_count": 6, "context_length": 128}
GGUF |= {"attention.head_count_kv": 2, "rope.freq_base": 500000.0, "vocab_size": 40}
GGUF |= {"feed_forward_length": 32, "attention.layer_norm_rms_epsilon": 1e-5}


def test_a_gguf_is_described_as_transformers_reads_it(tmp_path: Path) -> None:
    blocks = [plain_block(24, 6, 2, 4)] * 6
    model = describe(write_header(tmp_path / "small.gguf", "llama", GGUF, blocks))
    (layer,) = model.distinct()
    assert (model.name, model.architecture, model.max_positions) == ("small", "llama", 128)
    assert (layer.kind, layer.num_heads, layer.num_kv_heads, layer.head_dim) == ("GQA", 6, 2, 4)
    assert layer.rope == "Rotary(4, theta=500000.0)"  # its weights are permuted when they are read
    assert model.dtype == "float16" and "float16 cache" in model.remarks[0]
    assert model.weight_bytes == 6 * 4 * (2 * 24 * 24 + 2 * 8 * 24)


def test_a_gguf_that_transformers_does_not_read_is_refused(tmp_path: Path) -> None:
    file = write_header(tmp_path / "odd.gguf", "deepseek2", GGUF, [plain_block(24, 6, 2, 4)])
    with pytest.raises(CheckpointError, match="transformers must be able to read"):
        describe(file)
