"""Layers are rebuilt with other arguments around the same parameters."""

import pytest
import torch
from torch import nn

from layers import attention, everything_at_once
from regard import MultiQueryAttention, Rotary, SelfAttention
from regard.convert.linear import linear_of, rebuilt, shared_copy, weight_and_bias, with_kv_heads


@pytest.mark.parametrize(
    "layer",
    [
        attention(4, num_kv_heads=2, sinks=True).eval(),
        everything_at_once(),
        MultiQueryAttention(24, 4),
        SelfAttention(24),
    ],
    ids=["sinks", "everything at once", "MQA", "self-attention"],
)
def test_a_shared_copy_has_the_same_class_parameters_and_mode(layer):
    copy = shared_copy(layer)
    assert type(copy) is type(layer) and repr(copy) == repr(layer)
    assert copy.training == layer.training
    ours, theirs = dict(copy.named_parameters()), dict(layer.named_parameters())
    assert ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in theirs)


def test_a_shared_copy_with_a_change_leaves_the_layer():
    layer = attention(4, rope=Rotary(4))
    copy = shared_copy(layer, rope=Rotary(4, pairing="pairs"))
    assert copy.rope.pairing == "pairs" and layer.rope.pairing == "halves"


def test_other_key_heads_make_an_attention_of_another_kind():
    layer = MultiQueryAttention(24, 4)
    projections = {name: nn.Linear(24, 12, bias=False) for name in ("k_proj", "v_proj")}
    made = with_kv_heads(layer, 2, projections)
    assert made.kind == "GQA" and made.q_proj is layer.q_proj
    assert made.k_proj is projections["k_proj"]


def test_no_memory_is_taken_for_parameters_that_are_replaced():
    weight = torch.ones(2, 3)
    made = rebuilt(
        nn.Linear, {"in_features": 3, "out_features": 2}, {"weight": linear_of(weight).weight}
    )
    assert made.bias.is_meta and not made.weight.is_meta


def test_a_linear_layer_returns_its_weight_and_bias():
    holder = nn.ModuleDict({"q_proj": linear_of(torch.ones(2, 3), torch.zeros(2))})
    weight, bias = weight_and_bias(holder, "q_proj")
    assert torch.equal(weight, torch.ones(2, 3)) and torch.equal(bias, torch.zeros(2))
    holder["q_proj"].register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match=r"only a plain nn\.Linear can be converted"):
        weight_and_bias(holder, "q_proj")
