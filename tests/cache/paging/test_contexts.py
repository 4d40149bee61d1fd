"""`Context` and `context_of`: what tells two models apart, and what does not."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from regard import (
    NTK,
    Attention,
    Causal,
    Frequencies,
    MultiHeadLatentAttention,
    Rotary,
    SlidingWindow,
    Where,
)
from regard.cache.paging.contexts import Context, context_of


def test_contexts_are_text():
    assert Context("5e1f", "a") == Context("5e1f", "a") != Context("5e1fa", "")
    for wrong in ((7, ""), ("5e1f", None)):
        with pytest.raises(TypeError, match="is text"):
            Context(*wrong)


# ---- of a model ----


def equal(layer, **changed):
    """A layer of the same weights, and other arguments."""
    other = type(layer)(**{**layer.arguments, **changed})
    other.load_state_dict(layer.state_dict())
    return other


LAYER = Attention(32, 4, num_kv_heads=2, rope=Rotary(8), mask=Causal())
OTHER = {
    "theta": {"rope": Rotary(8, theta=500.0)},
    "pairing": {"rope": Rotary(8, pairing="pairs")},
    "part": {"rope": Rotary(4)},
    "frequencies": {"rope": Rotary(8, scaling=Frequencies((1.0, 0.5, 0.25, 0.125)))},
    "window": {"mask": SlidingWindow(4)},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 30.0},
    "score bias": {"score_bias": torch.ones(1)},
}


@pytest.mark.parametrize("name", OTHER)
def test_equal_weights_that_compute_something_else_have_another_context(name):
    one, other = context_of(LAYER), context_of(equal(LAYER, **OTHER[name]))
    assert one.weights == other.weights and one.key != other.key
    assert one == context_of(equal(LAYER))


def test_tensors_among_the_arguments_count_by_their_content():
    one, other = (equal(LAYER, score_bias=torch.tensor([x])) for x in (1.0, 2.0))
    assert context_of(one) != context_of(other)
    assert context_of(one) == context_of(equal(one, score_bias=torch.ones(1)))


def test_how_a_layer_computes_is_no_part_of_its_context():
    other = equal(LAYER, backend="eager", dropout=0.1, precision="fast")
    assert context_of(other) == context_of(LAYER)


def test_layers_in_order_are_a_model():
    layers = [LAYER, equal(LAYER, rope=Rotary(8, theta=500.0))]
    assert context_of(layers) == context_of(nn.ModuleList(layers))
    assert context_of(layers) != context_of(layers[::-1])


def test_the_dtype_is_that_of_the_weights_or_the_one_given():
    layer = equal(LAYER).to(torch.bfloat16)
    assert json.loads(context_of(layer).key)[1] == "bfloat16"
    assert json.loads(context_of(layer, dtype=torch.float16).key)[1] == "float16"
    assert json.loads(context_of(nn.ModuleList()).key)[1] == "float32"


def test_mla_and_compiled_models_have_contexts():
    layer = MultiHeadLatentAttention(
        32,
        2,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        rope=Rotary(4),
    )
    compiled = nn.Module()  # as torch.compile returns it
    compiled._orig_mod = layer
    assert context_of(compiled) == context_of(layer)


def test_frequencies_that_depend_on_the_length_are_refused():
    layer = equal(LAYER, rope=Rotary(8, scaling=NTK(4.0, original_max_position=16)))
    with pytest.raises(ValueError, match="change with the length of a call"):
        context_of(layer)
    assert json.loads(context_of(layer, computes="short texts").key)[3] == "short texts"


def test_an_argument_without_a_description_is_refused():
    layer = equal(LAYER, mask=Where(lambda b, h, q, k: q >= k))
    with pytest.raises(ValueError, match="holds for this process only"):
        context_of(layer)
    assert json.loads(context_of(layer, computes="causal").key)[3] == "causal"


def test_active_adapters_are_found():
    class Adapted(nn.Linear):
        active_adapters, disable_adapters = ("one",), False

    model = nn.Sequential(Adapted(2, 2), nn.Linear(2, 2))
    assert json.loads(context_of(model).key)[2] == "('one',)"
    model[0].disable_adapters = True
    assert json.loads(context_of(model).key)[2] == "('one',) disabled"


def test_names_tell_contexts_apart_as_nothing_else_does():
    names = ["", "a", '", "', "float32"]
    assert len({context_of(LAYER, name=each) for each in names}) == 4
    assert json.loads(context_of(LAYER, name="a").key)[0] == "a"


# ---- of transformers models ----


class Config(SimpleNamespace):
    def to_dict(self):
        return dict(vars(self))


class Rotating(nn.Module):
    """As in transformers: frequencies in a buffer that is not saved."""

    rope_type = "default"

    def __init__(self, theta):
        super().__init__()
        frequencies = theta ** -torch.linspace(0, 1, 4)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("original_inv_freq", frequencies.clone(), persistent=False)


def model(theta=1e4, **entries):
    found = nn.ModuleDict({"rotary_emb": Rotating(theta), "lm": nn.Linear(2, 2, bias=False)})
    nn.init.ones_(found["lm"].weight)
    entries = {"rope_parameters": {"rope_theta": 1e4}, "rms_norm_eps": 1e-6, **entries}
    found.config = Config(**entries)
    return found


def test_the_config_and_the_frequencies_tell_models_apart():
    one = context_of(model())
    assert context_of(model(use_cache=False, _name_or_path="elsewhere", dtype="x")) == one
    others = [
        model(theta=500.0),
        model(rope_parameters={"rope_theta": 500.0}),
        model(rms_norm_eps=1e-5),
    ]
    assert len({one, *(context_of(each) for each in others)}) == 4
    assert all(context_of(each).weights == one.weights for each in others)


def test_frequencies_that_transformers_changes_are_refused():
    changing = model()
    changing["rotary_emb"].rope_type = "dynamic"
    with pytest.raises(ValueError, match="'dynamic' change with the length"):
        context_of(changing)
