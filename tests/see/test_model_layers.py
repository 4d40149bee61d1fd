"""The attention layers of a model, and what runs in them."""

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

import regard.hf
from regard import Attention
from regard.convert import as_latent
from regard.hf.placing.placed import PlacedLatentKV
from regard.see.maps_of_model import attention_layers, on_regard
from tiny import tiny


def test_layers_of_regard_by_name():
    model = torch.nn.Sequential(Attention(8, 2), torch.nn.ModuleDict({"a": Attention(8, 2)}))
    assert list(attention_layers(model)) == ["0", "1.a"]
    assert list(attention_layers(Attention(8, 2))) == [""]


def test_layers_of_transformers_run_on_regard_inside_the_block():
    model = tiny("llama")
    layers = attention_layers(model)
    assert list(layers) == [f"model.layers.{at}.self_attn" for at in range(2)]
    with on_regard(layers):
        assert all("forward" in vars(module) for module in layers.values())
    assert not any("forward" in vars(module) for module in layers.values())


def test_what_runs_on_regard_already_stays():
    model = tiny("llama")
    regard.hf.install(model, precision="fast")
    layers = attention_layers(model)

    def forwards():
        bound = [vars(module)["forward"] for module in layers.values()]
        return [(each.func, each.args) for each in bound]

    before = forwards()
    with on_regard(layers):
        assert forwards() == before
    assert forwards() == before
    placed = tiny("llama")
    own = [regard.hf.attention_of(each) for each in regard.hf.attention_modules(placed).values()]
    regard.hf.place(placed, [as_latent(each) for each in own])
    layers = attention_layers(placed)
    with on_regard(layers):
        assert all(type(module) is PlacedLatentKV for module in layers.values())
        assert not any("forward" in vars(module) for module in layers.values())


def test_attention_that_is_unknown_is_refused_by_name():
    sizes = {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20}
    with pytest.raises(ValueError, match=r"does not know: BloomAttention \(1 modules\)"):
        attention_layers(BloomForCausalLM(BloomConfig(**sizes)))


def test_masks_that_cannot_be_read_are_refused():
    model = tiny("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r'call model.set_attn_implementation\("sdpa"\) first'):
        attention_layers(model)
