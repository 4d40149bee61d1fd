"""Queries scaled by their positions: the formulas of Llama 4 and Ministral 3, digit by digit."""

import copy
import math
import pickle

import pytest
import torch
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from forms import float64
from regard import UNSCALED, Attention, Causal, KVCache, PositionScale, Rotary
from regard.convert import as_latent


def test_it_is_ministrals_formula():
    positions = torch.tensor([[0, 1, 7, 8, 15, 16, 10_000]])
    with float64():
        wanted = get_llama_4_attn_scale(positions, 0.1, 8)[:, 0, :, 0]
        torch.testing.assert_close(PositionScale(0.1, 8).factors(positions, wanted.dtype), wanted)


def test_it_is_llama_4s_formula_with_an_offset():
    for position in (0, 6, 7, 8, 100):
        wanted = 1 + 0.3 * math.log1p(math.floor((position + 1.0) / 8))
        factor = PositionScale(0.3, 8, offset=1).factors(torch.tensor([position]), torch.float64)
        assert float(factor) == pytest.approx(wanted, rel=1e-15)


def test_positions_below_0_are_those_of_padding_and_finite():
    assert PositionScale(0.1, 8).factors(torch.tensor([-9, -1, 0])).tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_are_multiplied_and_rounded_once(dtype):
    q = torch.randn(2, 3, 5, 4, dtype=dtype)
    positions = torch.arange(5) * 100
    wanted = q.double() * PositionScale(0.5, 9).factors(positions, torch.float64)[:, None]
    out = PositionScale(0.5, 9)(q, positions)
    assert out.dtype is dtype
    assert ((out - wanted).abs() <= 2 * torch.finfo(dtype).eps * wanted.abs()).all()


def test_a_layer_scales_scores_and_not_keys():
    layer = Attention(8, 2, rope=Rotary(4), mask=Causal(), query_scale=PositionScale(2.0, 3))
    x, layer = torch.randn(1, 7, 8, dtype=torch.float64), layer.double()
    weights = layer.weights(x)
    layer.query_scale = UNSCALED
    plain = layer.weights(x)
    assert torch.equal(weights[:, :, :3], plain[:, :, :3])
    factor = 1 + 2 * math.log(2)  # of positions 3, 4 and 5
    scores = plain[0, :, 4, :5].log() * factor
    torch.testing.assert_close(weights[0, :, 4, :5], scores.softmax(-1))


def test_steps_have_their_own_positions():
    layer = Attention(8, 2, rope=Rotary(4), mask=Causal(), query_scale=PositionScale(2.0, 2))
    x, layer, cache = torch.randn(2, 7, 8, dtype=torch.float64), layer.double(), KVCache()
    out = torch.cat([layer(each, cache=cache) for each in x.split([3, 1, 3], 1)], 1)
    torch.testing.assert_close(out, layer(x))
    shifted = layer(x, positions=torch.arange(7) + 100)
    assert not torch.allclose(shifted, layer(x))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrong", [0.5, None, PositionScale])
def test_a_number_is_refused_and_points_to_scale(wrong):
    with pytest.raises(TypeError, match="scale= is a number for all positions"):
        Attention(8, 2, query_scale=wrong)


def test_constants_are_checked():
    with pytest.raises(ValueError, match="beta is finite"):
        PositionScale(math.inf, 8)
    with pytest.raises(ValueError, match="above 0"):
        PositionScale(0.1, 0)


def test_copies_of_the_neutral_one_are_it():
    assert copy.deepcopy(UNSCALED) is UNSCALED
    assert pickle.loads(pickle.dumps(UNSCALED)) is UNSCALED
    assert repr(PositionScale(0.1, 8, offset=1)) == "PositionScale(0.1, 8, offset=1)"


def test_a_joint_latent_refuses_it():
    layer = Attention(8, 2, rope=Rotary(4), query_scale=PositionScale(0.1, 8))
    with pytest.raises(ValueError, match="no place for query_scale"):
        as_latent(layer)
