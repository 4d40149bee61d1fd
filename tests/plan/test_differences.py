"""What single architectures read in their own way, where transformers is no oracle: refusals."""

from pathlib import Path
from typing import Any

import pytest

from published_configs import PUBLISHED
from regard.hf.loading.untrusted import CheckpointError
from regard.plan.configured import described_values
from regard.plan.shapes import ModelShape


def described(name: str, **changed: Any) -> ModelShape:
    config = PUBLISHED[name]
    inner = {"text_config": config["text_config"] | changed} if "text_config" in config else changed
    return described_values(config | inner, Path("config.json"), name, None)


@pytest.mark.parametrize(
    ("name", "changed", "rule"),
    [
        ("Qwen2.5-7B", {"max_window_layers": None}, "'max_window_layers' must be a whole number"),
        ("Qwen2.5-7B", {"use_sliding_window": "yes"}, "'use_sliding_window' must be true or"),
        ("Qwen2.5-7B", {"layer_types": ["sliding_attention"] * 28}, "since there are layers"),
        ("gemma-3n-E2B", {"num_kv_shared_layers": 30}, "a whole number below 30"),
        ("gemma-3n-E2B", {"num_kv_shared_layers": 27}, "so few that a layer of 'full_att"),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, "only causal attention"),
        ("gemma-3-1b", {"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' must be above 0"),
        ("gpt2", {"add_cross_attention": True}, "follows another sequence"),
        ("bert-base", {"add_cross_attention": True}, "follows another sequence"),
        ("bert-base", {"position_embedding_type": "relative_key"}, "must be 'absolute'"),
        ("DeepSeek-V3", {"num_key_value_heads": 8}, "the 128 query heads, since keys are exp"),
        ("Qwen3-Next-80B-A3B", {"attention_bias": True}, "gates with a bias"),
        ("Qwen3-Next-80B-A3B", {"linear_num_key_heads": 7}, "a divisor of the 32 value heads"),
        ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, "a list of 36 zeros and ones"),
        ("Llama-4-Scout", {"attention_chunk_size": 0}, "'text_config.attention_chunk_size'"),
        ("falcon-40b", {"num_kv_heads": 7}, "'num_kv_heads' must be a divisor of the 128"),
    ],
)
def test_what_is_refused(name: str, changed: dict[str, Any], rule: str) -> None:
    with pytest.raises(CheckpointError, match=rule):
        described(name, **changed)


def test_windows_begin_at_a_layer() -> None:
    model = described("Qwen2.5-7B", use_sliding_window=True, max_window_layers=20)
    assert [layer.window for layer in model.layers] == [None] * 20 + [131072] * 8


def test_a_window_of_null_is_none() -> None:
    assert {layer.window for layer in described("Mistral-7B-v0.1").layers} == {4096}
    model = described("Mistral-7B-v0.1", sliding_window=None)
    assert {layer.window for layer in model.layers} == {None}


def test_shared_keys_are_those_of_the_last_layer_of_a_kind() -> None:
    model = described("gemma-3n-E2B")
    assert [layer.keys_of for layer in model.layers[18:26]] == [None, None, 18, 18, 18, 18, 19, 18]


def test_gpt2_divides_scores_by_the_number_of_the_layer() -> None:
    model = described("gpt2", scale_attn_by_inverse_layer_idx=True)
    assert [layer.scale for layer in model.layers] == [None] + [
        64**-0.5 / number for number in range(2, 13)
    ]


def test_reasons_why_a_layer_is_not_computed() -> None:
    reasons = {layer.rope != "": layer.unsupported for layer in described("Llama-4-Scout").layers}
    assert "normalised after RoPE" in reasons[True] and "by their position" in reasons[False]
    plain = described("Llama-4-Scout", use_qk_norm=False, attn_temperature_tuning=False)
    assert {layer.unsupported for layer in plain.layers} == {""}
    assert not any(layer.unsupported for layer in described("gpt-oss-20b").layers)
