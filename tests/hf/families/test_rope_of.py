"""Rotary embeddings that configurations describe: frequencies and factors are transformers' own."""

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from regard.hf import attention_modules, attention_of, rope_of

DIM = 16
BEFORE = {"rope_theta": 10_000.0, "original_max_position_embeddings": 64}
LISTS = {"short_factor": [1.0, 1.1] * 4, "long_factor": [2.0, 4.0] * 4}
PARAMETERS = [
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        **BEFORE,
    },
    {"rope_type": "yarn", "factor": 40.0, **BEFORE},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, **BEFORE},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3, **BEFORE},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "truncate": False, **BEFORE},
    {"rope_type": "longrope", **LISTS, **BEFORE},
    {"rope_type": "longrope", "factor": 8.0, "attention_factor": 1.25, **LISTS, **BEFORE},
]  # fmt: skip


@pytest.mark.parametrize("length", [64, 200, 900])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda each: each["rope_type"])
def test_frequencies_and_factors_are_those_of_transformers(parameters, length):
    config = LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, max_position_embeddings=256,
        rope_parameters=dict(parameters),
    )  # fmt: skip
    rope = rope_of(config, DIM)
    theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)
    ours = rope.scaling.frequencies(DIM, rope.theta, length=torch.tensor(length))
    torch.testing.assert_close(ours.float(), theirs, rtol=3e-6, atol=0)
    assert rope.scaling.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("interleave", [True, False])
def test_pairs_are_those_that_the_configuration_names(interleave):
    config = DeepseekV3Config(rope_interleave=interleave)
    assert rope_of(config, DIM).pairing == ("pairs" if interleave else "halves")


def test_what_is_not_computed_is_refused():
    config = LlamaConfig()
    config.rope_parameters = {"rope_type": "proportional", **BEFORE}
    with pytest.raises(ValueError, match="'proportional' is none of those that regard computes"):
        rope_of(config, DIM)


def test_a_layer_does_not_take_frequencies_that_change_with_the_length():
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
    config = LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=8, num_hidden_layers=1, vocab_size=8, rope_parameters=parameters,
    )  # fmt: skip
    (module,) = attention_modules(LlamaForCausalLM(config)).values()
    with pytest.raises(ValueError, match="change with the length of a call"):
        attention_of(module)
