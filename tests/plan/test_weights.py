"""Parameters, counted by hand and in real layers."""

from dataclasses import replace

import pytest

from costs import REAL as real_cost
from measured_layers import layer_of
from regard.plan.shapes import LayerShape, Workload
from regard.plan.weights import matrices, vectors

GQA = LayerShape(hidden_size=20, num_heads=6, num_kv_heads=2, head_dim=4, v_head_dim=4)
MLA = replace(GQA, num_kv_heads=6, v_head_dim=5, kv_lora_rank=7, qk_rope_head_dim=2)
LATENT_KV = replace(GQA, kv_lora_rank=7, keys_by_position=True)
ONE = Workload(context=1)


@pytest.fixture
def cost():
    """The module: tests/plan/test_wrong_formulas.py gives the same tests a wrong one."""
    return real_cost


def count(cost, layer, **call):
    return cost.parameters(layer, cost.Workload(**{"context": 0, **call}))


def test_projections_by_hand(cost):
    assert count(cost, GQA) == 20 * 24 + 2 * 20 * 8 + 24 * 20
    assert count(cost, replace(GQA, v_head_dim=3)) == 20 * 24 + 20 * 8 + 20 * 6 + 18 * 20
    assert count(cost, MLA) == 20 * 24 + 20 * 9 + 7 + 7 * 6 * (2 + 5) + 30 * 20
    with_latent = replace(MLA, q_lora_rank=3, latent_norm=False)
    assert count(cost, with_latent) == 20 * 3 + 3 * 24 + 20 * 9 + 7 * 6 * (2 + 5) + 30 * 20
    assert count(cost, LATENT_KV) == 20 * 24 + 20 * 7 + 7 * 2 * 8 + 24 * 20


def test_biases_norms_sinks_and_gates_are_counted(cost):
    plain = count(cost, GQA)
    assert count(cost, replace(GQA, bias=("q_proj", "o_proj"))) == plain + 24 + 20
    assert count(cost, replace(GQA, bias=("k_proj", "v_proj"))) == plain + 8 + 8
    assert count(cost, replace(GQA, qk_norm="head")) == plain + 4 + 4
    assert count(cost, replace(GQA, qk_norm="width")) == plain + 24 + 8
    assert count(cost, replace(GQA, sinks=True)) == plain + 6
    assert count(cost, replace(GQA, gate="head")) == plain + 20 * 6
    assert count(cost, replace(GQA, gate="channel")) == plain + 20 * 24


def test_parameters_are_those_of_layers(cost):
    for layer in (
        GQA,
        replace(GQA, bias=("q_proj", "k_proj", "v_proj", "o_proj"), sinks=True, gate="channel"),
        MLA,
        replace(MLA, q_lora_rank=3, bias=("q_a_proj", "kv_a_proj_with_mqa")),
        replace(LATENT_KV, bias=("q_proj", "kv_b_proj"), qk_norm="width"),
    ):
        assert count(cost, layer) == sum(each.numel() for each in layer_of(layer).parameters())


def test_shared_keys_have_no_projections(cost):
    shared = replace(GQA, keys_of=0, qk_norm="head")
    assert count(cost, shared) == 20 * 24 + 24 * 20 + 4
    assert not {"k_proj", "v_proj"} & matrices(shared, ONE).keys()
    assert "kv_a_layernorm" not in vectors(replace(MLA, keys_of=0), ONE)


def test_a_rank_has_its_heads(cost):
    """With 4 ranks 6 query heads are 2 on a rank, and 2 key heads are 1."""
    a_rank = replace(GQA, num_heads=2, num_kv_heads=1, bias=("q_proj", "o_proj"), sinks=True)
    whole = replace(a_rank, num_heads=6, num_kv_heads=2)
    assert count(cost, whole, tp=4) == count(cost, a_rank)
    latent = replace(MLA, q_lora_rank=3)
    assert count(cost, latent, tp=4) == count(cost, replace(latent, num_heads=2, num_kv_heads=2))


def test_ranks_with_the_same_key_head_share_its_query_heads(cost):
    """Two key heads on 4 ranks are on two ranks each, which have half of its 3 query heads."""
    a_rank = replace(GQA, num_heads=2, num_kv_heads=1)
    assert count(cost, replace(GQA, num_heads=6, num_kv_heads=2), tp=4) == count(cost, a_rank)


def test_padding_is_counted(cost):
    """Three key heads on 2 ranks are two on each, with the 2 query heads that each serves."""
    a_rank = replace(GQA, num_heads=4, num_kv_heads=2)
    assert count(cost, replace(GQA, num_heads=6, num_kv_heads=3), tp=2) == count(cost, a_rank)


def test_an_unknown_bias_is_refused():
    with pytest.raises(ValueError, match="bias names q_a_proj; this layer has q_proj, k_proj"):
        vectors(replace(GQA, bias=("q_a_proj",)), ONE)
    with pytest.raises(ValueError, match="bias names gate_proj"):
        vectors(replace(GQA, gate="head", bias=("gate_proj",)), ONE)


def test_linear_attention_is_refused(cost):
    with pytest.raises(ValueError, match="do not follow from its sizes"):
        count(cost, replace(GQA, state_elements=5))
