"""What a description says besides its layers; and what regard runs of each architecture."""

from pathlib import Path
from typing import Any

import pytest

from architectures import CASES, attentions, built, entries
from published_configs import PUBLISHED
from regard.hf import FAMILIES
from regard.hf.loading.untrusted import CheckpointError
from regard.plan.configurations import CONFIGURATIONS, NESTED
from regard.plan.configured import described_values
from regard.plan.shapes import ModelShape


def described(config: dict[str, Any]) -> ModelShape:
    return described_values(config, Path("config.json"), "model", 7)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "torch.float32", "torch_dtype": "bfloat16"}, "float32"),
        ({}, "float32"),
        ({"torch_dtype": "auto"}, "float32"),
    ],
)
def test_dtype(given: dict[str, Any], expected: str) -> None:
    config = {k: v for k, v in PUBLISHED["Qwen3-0.6B"].items() if k != "torch_dtype"}
    model = described(config | given)
    assert model.dtype == expected
    unnamed = given.get("torch_dtype") == "auto" or not given
    assert any("names no dtype" in remark for remark in model.remarks) == unnamed


def test_parts_of_a_model() -> None:
    model = described(PUBLISHED["gemma-3-4b"])
    assert (model.architecture, len(model.layers), model.dtype) == ("gemma3", 34, "bfloat16")
    assert any("leaves out num_attention_heads" in remark for remark in model.remarks)
    assert any("Only the part that writes text" in remark for remark in model.remarks)
    alone = described(PUBLISHED["gemma-3-4b"]["text_config"] | {"num_attention_heads": 8})
    assert alone.layers == model.layers
    with pytest.raises(CheckpointError, match="'num_attention_heads' must be a whole number"):
        described(PUBLISHED["gemma-3-4b"]["text_config"])


@pytest.mark.parametrize("outer", list(NESTED))
def test_the_text_part_is_found(outer: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 10, "num_attention_heads": 8}
    more = {"num_key_value_heads": 2, "head_dim": 8, "num_kv_shared_layers": 2}
    inner = sizes | ({k: v for k, v in more.items() if "shared" not in k or outer == "gemma3n"})
    model = described({"model_type": outer, "text_config": inner, "image_token_index": 3})
    own = described({"model_type": NESTED[outer]} | inner)
    assert model.layers == own.layers


def test_left_out_sizes_are_those_of_transformers() -> None:
    """Of descriptions inside a larger one: `sizes` and `defaults` of the table."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for name, row in CONFIGURATIONS.items():
        made = CONFIG_MAPPING[name]()
        for entry, value in row.sizes.items():
            assert getattr(made, entry) == value, (name, entry)
        skipped = {"period", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"}
        skipped |= {"sliding_window_pattern", "full_attention_interval"}
        for entry, value in row.defaults.items():
            if entry in skipped or (
                entry == "sliding_window" and "use_sliding_window" in row.defaults
            ):
                continue
            if name == "qwen3_moe" and entry == "sliding_window":
                continue
            assert getattr(made, entry) == value, (name, entry)


def test_quantised_weights_are_told() -> None:
    remarks = described(PUBLISHED["gpt-oss-20b"]).remarks
    assert any(remark.startswith("Weights are quantised") for remark in remarks)


@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_what_install_runs_is_what_the_remark_says(name: str) -> None:
    """The class that transformers builds is the one that the row names."""
    more = next(more for each, more in CASES if each == name)
    config = entries(name, more)
    classes = {type(getattr(each, "self", each)).__name__ for each in attentions(built(config))}
    own = CONFIGURATIONS[name].attention
    assert own in classes
    runs = any("regard.hf.install runs it" in remark for remark in described(config).remarks)
    assert runs == (own in FAMILIES)
