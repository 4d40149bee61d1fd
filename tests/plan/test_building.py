"""Layers from entries: states of recurrent layers against the caches of real models, and kinds."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from architectures import DELTA, EXPERTS, WIDE, entries
from regard.hf.loading.untrusted import CheckpointError
from regard.plan.building import FULL, LINEAR, SLIDING, every, full, uniform
from regard.plan.configured import described_values
from regard.plan.reading import Keys

FILE = Path("config.json")


@pytest.mark.parametrize(
    "config",
    [
        entries("qwen3_next", WIDE | EXPERTS | DELTA | {"head_dim": 16}),
        entries(
            "jamba",
            {"num_key_value_heads": 2, "attn_layer_period": 3, "attn_layer_offset": 1}
            | EXPERTS
            | {
                "mamba_d_state": 5,
                "mamba_d_conv": 3,
                "mamba_expand": 2,
                "use_mamba_kernels": False,
            },
        ),
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_states_are_as_large_as_those_of_transformers(config: dict[str, object]) -> None:
    given = {name: value for name, value in config.items() if name != "model_type"}
    model = AutoModel.from_config(CONFIG_MAPPING[str(config["model_type"])].from_dict(given))
    with torch.no_grad():
        cache = model(torch.ones(1, 4, dtype=torch.long), use_cache=True).past_key_values
    shape = described_values(config, FILE, "small", None)
    for layer, held in zip(shape.layers, cache.layers, strict=True):
        if layer.kind == "linear":
            states = [*held.conv_states.values(), *held.recurrent_states.values()]
            assert layer.state_elements == sum(state.numel() for state in states)
        else:
            assert held.keys.shape[1:] == (layer.num_kv_heads, 4, layer.head_dim)


def test_kinds_of_layers() -> None:
    keys = Keys({"period": 3, "sliding_window": 4}, FILE)
    assert every("period", SLIDING)(keys, 7) == [SLIDING, SLIDING, FULL] * 2 + [SLIDING]
    assert every("period", FULL, LINEAR)(keys, 4) == [FULL, FULL, LINEAR, FULL]
    assert uniform(keys, 2) == [SLIDING, SLIDING] and full(keys, 2) == [FULL, FULL]
    assert uniform(Keys({"sliding_window": None}, FILE), 2) == [FULL, FULL]
    with pytest.raises(CheckpointError, match="'period' must be a whole number"):
        every("period", SLIDING)(Keys({"period": 0}, FILE), 7)


def test_old_names_of_kinds_are_read() -> None:
    config = entries("qwen3_next", WIDE | DELTA | {"head_dim": 16})
    names = ["mamba", "attention", "linear_attention", "full_attention", *["attention"] * 3]
    shape = described_values(config | {"layer_types": names}, FILE, "small", None)
    kinds = [layer.kind for layer in shape.layers]
    assert kinds == ["linear", "GQA", "linear", "GQA", "GQA", "GQA", "GQA"]
