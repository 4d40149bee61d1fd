"""MLA and gated delta nets in headers of GGUF files."""

from typing import Any

import pytest

from gguf_headers import plain_block, write_header
from regard.hf.loading.untrusted import CheckpointError
from regard.plan.describing import describe

MLA = {
    "embedding_length": 20,
    "attention.head_count": 4,
    "attention.kv_lora_rank": 10,
    "rope.dimension_count": 4,
    "rope.freq_base": 10000.0,
    "context_length": 64,
}
NEW = (
    MLA
    | {"attention.head_count_kv": 1, "attention.key_length": 14}
    | {
        "attention.value_length": 10,
        "attention.key_length_mla": 12,
        "attention.value_length_mla": 6,
        "attention.q_lora_rank": 8,
    }
)
OLD = MLA | {
    "attention.head_count_kv": 4,
    "attention.key_length": 12,
    "attention.value_length": 6,
}
BLOCK = {"attn_kv_a_mqa.weight": (14, 20), "attn_output.weight": (20, 24)}


@pytest.mark.parametrize("keys", [NEW, OLD])
def test_latents_of_newer_and_older_files(tmp_path: Any, keys: Any) -> None:
    model = describe(write_header(tmp_path / "a.gguf", "deepseek2", keys, [BLOCK] * 3))
    (layer,) = model.distinct()
    assert len(model.layers) == 3
    assert (layer.kind, layer.num_heads, layer.num_kv_heads) == ("MLA", 4, 4)
    assert (layer.head_dim, layer.v_head_dim, layer.kv_lora_rank) == (12, 6, 10)
    assert layer.qk_rope_head_dim == 4
    assert layer.q_lora_rank == keys.get("attention.q_lora_rank")


def test_deepseeks_yarn(tmp_path: Any) -> None:
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_log_multiplier": 0.0707,
    }
    model = describe(write_header(tmp_path / "a.gguf", "deepseek2", NEW | yarn, [BLOCK]))
    assert "mscale=0.707, mscale_all_dim=0.707" in model.layers[0].rope


@pytest.mark.parametrize(
    ("keys", "block", "rule"),
    [
        (NEW | {"attention.key_length": 15}, BLOCK, "must be 14, the latent and"),
        (NEW | {"attention.head_count_kv": 4}, BLOCK, "must be 1 in every layer"),
        (NEW | {"attention.key_length_mla": 4}, BLOCK, "above the 4 channels"),
        (NEW, BLOCK | {"attn_kv_a_mqa.weight": (15, 20)}, "must have 14 outputs"),
        ({k: v for k, v in NEW.items() if "kv_lora" not in k}, BLOCK, "kv_lora_rank"),
    ],
)
def test_contradictions(tmp_path: Any, keys: Any, block: Any, rule: str) -> None:
    with pytest.raises(CheckpointError, match=rule):
        describe(write_header(tmp_path / "a.gguf", "deepseek2", keys, [block] * 2))


NEXT = {
    "embedding_length": 20,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "attention.value_length": 8,
    "rope.dimension_count": 4,
    "ssm.conv_kernel": 3,
    "ssm.state_size": 6,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 40,
    "full_attention_interval": 2,
    "context_length": 64,
}
GATED = plain_block(20, 4, 2, 8) | {"attn_q.weight": (64, 20)}
LINEAR = {"ssm_conv1d.weight": (64, 3), "attn_qkv.weight": (64, 20)}


def test_gated_delta_nets(tmp_path: Any) -> None:
    model = describe(write_header(tmp_path / "a.gguf", "qwen3next", NEXT, [LINEAR, GATED] * 2))
    assert [layer.kind for layer in model.layers] == ["linear", "GQA"] * 2
    linear, full = model.layers[:2]
    assert full.gate == "channel" and full.qk_rope_head_dim == 4
    assert linear.state_elements == 4 * 6 * 10 + (2 * 2 * 6 + 40) * 3
    with pytest.raises(CheckpointError, match="full_attention_interval"):
        describe(write_header(tmp_path / "b.gguf", "qwen3next", NEXT, [GATED, LINEAR] * 2))
    odd = NEXT | {"ssm.inner_size": 41}
    with pytest.raises(CheckpointError, match=r"ssm\.inner_size"):
        describe(write_header(tmp_path / "c.gguf", "qwen3next", odd, [LINEAR, GATED] * 2))
