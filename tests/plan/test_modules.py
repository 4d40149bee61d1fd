"""Shapes read from layers of regard."""

import random
from dataclasses import replace

import pytest

from measured_layers import KINDS, drawn, layer_of
from regard import (
    Attention,
    Causal,
    LatentKVAttention,
    MultiHeadLatentAttention,
    Rotary,
    SlidingWindow,
)
from regard.plan.modules import shape_of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_a_layer_built_from_a_shape_has_that_shape(kind, seed):
    shape = drawn(random.Random(seed), kind)
    found = shape_of(layer_of(shape))
    assert set(found.bias) == set(shape.bias)
    others = {"bias": found.bias, "rope": found.rope}
    others |= {"latent_norm": False} if kind == "LatentKV" else {}
    assert found == replace(shape, **others)


def test_a_layer_that_is_not_causal():
    assert not shape_of(Attention(8, 2)).causal
    assert shape_of(Attention(8, 2, mask=Causal())).causal


def test_shapes_of_layers_with_all_options() -> None:
    mask = Causal() & SlidingWindow(5)
    layer = LatentKVAttention(
        16, 4, num_kv_heads=2, head_dim=8, kv_lora_rank=6, rope=Rotary(8), mask=mask,
        bias=True, qk_norm="head", softcap=20.0,
    )  # fmt: skip
    shape = shape_of(layer)
    assert shape.window == 5 and shape.softcap == 20.0 and shape.qk_norm == "head"
    children = dict(layer.named_children())
    biased = {name for name in children if getattr(children[name], "bias", None) is not None}
    assert set(shape.bias) == biased
    mla = MultiHeadLatentAttention(
        16, 2, kv_lora_rank=6, q_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=5,
        rope=Rotary(2, pairing="pairs"), mask=Causal(), latent_norm=False,
    )  # fmt: skip
    shape = shape_of(mla)
    assert (shape.head_dim, shape.v_head_dim, shape.q_lora_rank) == (5, 5, 4)
    assert not shape.latent_norm and shape.window is None
