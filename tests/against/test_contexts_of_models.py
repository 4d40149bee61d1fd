"""`context_of` models of transformers, and of PEFT around them."""

import warnings

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import regard.hf
from regard.cache import context_of


def llama(**changed):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 50, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changed}))


OTHER = {
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "scaling": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "norm": {"rms_norm_eps": 1e-3},
    "heads": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
}


@pytest.mark.parametrize("name", OTHER)
def test_models_of_equal_weights_that_differ_have_other_contexts(name):
    one, other = context_of(llama()), context_of(llama(**OTHER[name]))
    assert other.weights == one.weights and other != one


def test_the_same_model_made_again_and_installed_has_the_same_context():
    model = llama()
    one = context_of(model)
    regard.hf.install(model)
    assert context_of(model) == one == context_of(llama(use_cache=False))


def test_models_with_several_ropes_or_none_have_contexts():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9, "num_hidden_layers": 2}
    config = Gemma3TextConfig(**sizes, num_key_value_heads=1, head_dim=4, intermediate_size=8)
    config.layer_types = ["full_attention", "sliding_attention"]
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    model = Gemma3ForCausalLM(config)
    before = context_of(model)
    for name in ("full_attention_inv_freq", "sliding_attention_inv_freq"):
        frequencies = model.model.rotary_emb.get_buffer(name)
        frequencies.mul_(2.0)
        assert context_of(model) != before
        frequencies.div_(2.0)
    assert context_of(model) == before
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, **ids)
    model = GPT2LMHeadModel(config)
    assert context_of(model) == context_of(model)


def test_frequencies_that_depend_on_the_length_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="change with the length of a call"):
        context_of(llama(rope_parameters=rope))


@pytest.mark.filterwarnings("ignore")
def test_adapters_tell_contexts_apart():
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(target_modules=["q_proj"], r=2)
        model = peft.get_peft_model(llama(), config)
        model.add_adapter("two", config)
        torch.nn.init.ones_(model.get_parameter(f"{QUERY}.lora_B.default.weight"))
        first = context_of(model)
        model.set_adapter("two")
        second = context_of(model)
        with model.disable_adapter():
            off = context_of(model)
        model.set_adapter("default")
        assert context_of(model) == first
        model.merge_adapter()
    assert first.weights == second.weights == off.weights != context_of(model).weights
    assert len({first, second, off}) == 3


QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
