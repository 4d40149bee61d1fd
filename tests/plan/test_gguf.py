"""Headers of GGUF files as llama.cpp's converter writes them, and headers that contradict."""

from typing import Any

import pytest
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from gguf_headers import plain_block, write_header
from regard.hf.loading.untrusted import CheckpointError
from regard.plan.describing import describe
from regard.plan.gguf import LOADED, RULES
from regard.plan.shapes import ModelShape

SIZES = {"embedding_length": 24, "attention.head_count": 6, "context_length": 128}
GQA = SIZES | {"attention.head_count_kv": 2, "rope.freq_base": 500000.0}
WINDOW = {"attention.sliding_window": 7}
MHA = [plain_block(24, 6, 6, 4)] * 2
BLOCK = plain_block(24, 6, 2, 4)


def written(
    tmp_path: Any, architecture: str, keys: Any, blocks: Any = None, others: Any = ()
) -> ModelShape:
    blocks = [BLOCK] * 6 if blocks is None else blocks
    return describe(write_header(tmp_path / "small.gguf", architecture, keys, blocks, others))


def windows_of(model: ModelShape) -> list[int | None]:
    return [layer.window for layer in model.layers]


def test_a_llama(tmp_path: Any) -> None:
    model = written(tmp_path, "llama", GQA)
    (layer,) = model.distinct()
    assert (model.name, model.architecture, model.max_positions) == ("small", "llama", 128)
    assert (layer.kind, layer.num_heads, layer.num_kv_heads, layer.head_dim) == ("GQA", 6, 2, 4)
    assert layer.rope == "Rotary(4, theta=500000.0, pairing='pairs')"
    assert layer.bias == () and layer.qk_norm is None and layer.causal
    assert model.weight_bytes == 6 * 4 * (2 * 24 * 24 + 2 * 8 * 24) + _padding(tmp_path)


def _padding(tmp_path: Any) -> int:
    """Bytes between the header and the first tensor, up to a multiple of 32."""
    from regard.hf.loading.untrusted_gguf import read_header

    return -read_header(tmp_path / "small.gguf").size % 32


def test_key_heads_may_differ_from_layer_to_layer(tmp_path: Any) -> None:
    keys = GQA | {"attention.head_count_kv": [2, 6, 1]}
    blocks = [plain_block(24, 6, count, 4) for count in (2, 6, 1)]
    model = written(tmp_path, "llama", keys, blocks)
    assert [layer.kind for layer in model.layers] == ["GQA", "MHA", "MQA"]


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("gemma2", [7, None] * 3),
        ("gpt-oss", [7, None] * 3),
        ("gemma3", [7, 7, 7, 7, 7, None]),
        ("cohere2", [7, 7, 7, None, 7, 7]),
        ("olmo2", [7, 7, 7, None, 7, 7]),
        ("phi3", [7] * 6),
    ],
)
def test_windows_by_the_rule_of_the_architecture(
    tmp_path: Any, architecture: str, expected: list[int | None]
) -> None:
    assert windows_of(written(tmp_path, architecture, GQA | WINDOW)) == expected


def test_windows_by_a_period_or_a_list(tmp_path: Any) -> None:
    pattern = "attention.sliding_window_pattern"
    assert windows_of(written(tmp_path, "gemma3", GQA | WINDOW | {pattern: 3})) == [7, 7, None] * 2
    listed = [True, False, False, True, True, False]
    model = written(tmp_path, "gemma3", GQA | WINDOW | {pattern: listed})
    assert windows_of(model) == [7 if each else None for each in listed]
    assert [layer.rope for layer in model.layers[:2]] == [
        "Rotary(4)",
        "Rotary(4, theta=500000.0)",
    ]


def test_a_window_that_is_needed_is_not_guessed(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'gemma3\.attention\.sliding_window' must be"):
        written(tmp_path, "gemma3", GQA)
    assert windows_of(written(tmp_path, "gemma2", GQA)) == [4096, None] * 3
    assert windows_of(written(tmp_path, "olmo2", GQA)) == [None] * 6


def test_layers_without_rope(tmp_path: Any) -> None:
    model = written(tmp_path, "smollm3", GQA)
    assert [bool(layer.rope) for layer in model.layers] == [True, True, True, False, True, True]
    model = written(tmp_path, "cohere2", GQA | WINDOW)
    assert [bool(layer.rope) for layer in model.layers] == [True, True, True, False, True, True]
    assert not any(layer.rope for layer in written(tmp_path, "gpt2", SIZES, MHA).layers)


def test_llama_4_has_chunks(tmp_path: Any) -> None:
    model = written(tmp_path, "llama4", GQA)
    assert [layer.chunk for layer in model.layers] == [8192] * 3 + [None] + [8192] * 2
    assert all(layer.unsupported for layer in model.layers)


def test_shared_keys(tmp_path: Any) -> None:
    keys = GQA | WINDOW | {"attention.shared_kv_layers": 4}
    model = written(tmp_path, "gemma3n", keys, [BLOCK] * 10)
    assert [layer.keys_of for layer in model.layers] == [None] * 6 + [5, 5, 5, 4]
    with pytest.raises(CheckpointError, match=r"'gemma3n\.attention\.shared_kv_layers'"):
        written(tmp_path, "gemma3n", GQA | WINDOW)


def test_biases_norms_and_sinks_follow_from_tensors(tmp_path: Any) -> None:
    more = {
        "attn_q.bias": (24,),
        "attn_output.bias": (24,),
        "attn_q_norm.weight": (4,),
        "attn_k_norm.weight": (4,),
        "attn_sinks.weight": (6,),
    }
    (layer,) = written(tmp_path, "qwen3", GQA, [BLOCK | more] * 2).distinct()
    assert layer.bias == ("q_proj", "o_proj")
    assert layer.qk_norm == "head" and layer.sinks
    wide = {"attn_q_norm.weight": (24,), "attn_k_norm.weight": (8,)}
    (layer,) = written(tmp_path, "olmo2", GQA, [BLOCK | wide]).distinct()
    assert layer.qk_norm == "width"
    own = {"attn_q_norm.weight": (6, 4), "attn_k_norm.weight": (2, 4)}
    (layer,) = written(tmp_path, "command-r", GQA, [BLOCK | own]).distinct()
    assert "LayerNorm" in layer.unsupported


def test_softcap_and_scale(tmp_path: Any) -> None:
    (layer, _) = written(tmp_path, "gemma2", GQA | WINDOW).distinct()
    assert layer.softcap == 50.0 and layer.scale is None
    model = written(tmp_path, "gemma2", GQA | WINDOW, [BLOCK] * 46)
    assert model.layers[0].scale == (24 // 6) ** -0.5
    (layer,) = written(tmp_path, "granite", GQA | {"attention.scale": 0.25}).distinct()
    assert layer.scale == 0.25


def test_scaled_rope(tmp_path: Any) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    model = written(tmp_path, "gemma3", GQA | WINDOW | linear)
    assert [layer.rope for layer in model.layers[4:]] == [
        "Rotary(4)",
        "Rotary(4, theta=500000.0, scaling=LinearScaling(8.0))",
    ]
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0}
    yarn |= {"rope.scaling.original_context_length": 64}
    model = written(tmp_path, "gpt-oss", GQA | WINDOW | yarn)
    assert "scaling=Yarn(32.0, original_max_position=64)" in model.layers[0].rope
    with pytest.raises(CheckpointError, match=r"'llama\.rope\.scaling\.type'.*'twisted'"):
        written(tmp_path, "llama", GQA | {"rope.scaling.type": "twisted"})


def test_factors_of_rope_in_a_tensor_are_told(tmp_path: Any) -> None:
    model = written(tmp_path, "llama", GQA, None, ("rope_freqs.weight",))
    assert any("rope_freqs.weight" in remark for remark in model.remarks)


@pytest.mark.parametrize(
    "key",
    ["attention.indexer.top_k", "rope.dimension_sections", "ssm.state_size", "shared_kv_cache"],
)
def test_unknown_keys_are_refused_by_name(tmp_path: Any, key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"'llama\.{key}' is an entry"):
        written(tmp_path, "llama", GQA | {key: 3})


def test_unknown_architectures_are_refused_by_name(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be described, got 'rwkv7'; those that"):
        written(tmp_path, "rwkv7", GQA)


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        (GQA | {"attention.head_count": 5}, "must be a divisor"),
        (GQA | {"attention.head_count_kv": 4}, "divisor of the 6 query heads"),
        (GQA | {"attention.head_count_kv": [2, 2]}, "list of 6 numbers"),
        (GQA | {"attention.head_count_kv": [2, 2, 0, 2, 2, 2]}, "without attention"),
        (GQA | {"attention.head_count_kv": "2"}, "whole number"),
        (GQA | {"attention.key_length": 8}, "must have 48 outputs"),
        (GQA | {"rope.dimension_count": 3}, "dim must be even"),
        (GQA | {"rope.freq_base": float("nan")}, "finite"),
        (GQA | {"attention.causal": 1}, "true or false"),
        ({"attention.head_count": 6}, "embedding_length"),
    ],
)
def test_contradictions_are_refused(tmp_path: Any, keys: Any, rule: str) -> None:
    with pytest.raises(CheckpointError, match=rule):
        written(tmp_path, "llama", keys)


def test_a_block_without_attention_is_refused(tmp_path: Any) -> None:
    blocks = [BLOCK, {"ffn_norm.weight": (24,)}]
    with pytest.raises(CheckpointError, match="block 1 must have attn_qkv or attn_q"):
        written(tmp_path, "llama", GQA, blocks)


def test_architectures_that_transformers_reads() -> None:
    names = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
    for architecture in RULES:
        known = names.get(architecture, architecture) in GGUF_CONFIG_MAPPING
        assert (architecture in LOADED) == known, architecture
