"""Facts of a family that plans over several devices ask for, in words."""

import pytest

from joined import random_mla
from regard.distributed.models_context import _objection as context_objection
from regard.distributed.models_tensor import _objection as tensor_objection
from regard.hf import attention_modules, install, place
from regard.hf.families.recognising import family_of
from tiny import tiny
from zoo import ZOO

WORDS = {
    "llama": ["", "", ""],
    "deepseek-v3": ["", "", ""],
    "kimi-linear": ["", "", ""],
    "bailing": ["gates its outputs"] * 3,
    "mistral4": ["scales queries by their positions"] * 3,
    "llama4": ["", "scales queries by their positions", ""],
    "gemma4": ["shares its keys with other layers"] * 4,
    "gemma4 tied": ["", "has keys that are its values"],
}


@pytest.mark.parametrize("name", WORDS)
def test_what_a_module_does_besides_is_said(name):
    modules = attention_modules(ZOO[name].build()).values()
    assert [family_of(each).beyond_heads(each) for each in modules] == WORDS[name]


@pytest.mark.parametrize("name", ["bailing", "gemma4", "gemma4 tied"])
def test_several_devices_refuse_it(name):
    model = ZOO[name].build()
    install(model)
    module = list(attention_modules(model).values())[-1]
    words = WORDS[name][-1]
    assert "leave it on one device" in tensor_objection(module, 2)
    assert words in context_objection(module, None)


@pytest.mark.parametrize("options", [{}, {"gate": "head"}, {"sinks": True}], ids=repr)
def test_placed_layers_say_what_they_have(options):
    model = tiny("llama")
    place(model, random_mla(model, **options))
    module = model.model.layers[0].self_attn
    words = "gates its outputs" if "gate" in options else ""
    assert family_of(module).beyond_heads(module) == words
    wanted = {"gate": "has gate_proj", "sinks": "has sinks"}.get(next(iter(options), ""))
    found = tensor_objection(module, 2)
    assert found is None if wanted is None else wanted in found
