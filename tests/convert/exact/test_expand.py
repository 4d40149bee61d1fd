"""GQA with copied heads and MLA as MHA return the same outputs, with all options."""

import copy
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from layers import WIDTH, WINDOW, attention, everything_at_once, inputs, latent, scattered
from regard import (
    NO_ROPE,
    Alibi,
    Causal,
    KVCache,
    MultiHeadLatentAttention,
    PositionScale,
    Rotary,
    Yarn,
)
from regard.convert import expand, spell_out
from regard.convert.exact.expand import LowRank

PROJECTIONS = {
    None: ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    5: ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
}
BIASES = [
    (rank, tuple(name for name, on in zip(names, chosen, strict=True) if on))
    for rank, names in PROJECTIONS.items()
    for chosen in product([False, True], repeat=len(names))
]
VARIANTS = {
    "as DeepSeek": {},
    "halves": {"rope": Rotary(4)},
    "yarn": {"rope": Rotary(4, pairing="pairs", scaling=Yarn(4.0, original_max_position=8))},
    "values wider than keys": {"v_head_dim": 13},
    "values as wide as keys": {"v_head_dim": 10},
    "all channels rotated": {"qk_nope_head_dim": 0},
    "no rope": {"rope": NO_ROPE},
    "scale and bias of scores": {"scale": 0.3, "score_bias": Alibi.for_heads(3)},
    "window": {"mask": WINDOW},
    "gate of heads, sinks": {"gate": "head", "sinks": True},
    "gate of channels": {"gate": "channel"},
    "gate of wider values": {"gate": "channel", "v_head_dim": 13},
    "scaled queries": {"query_scale": PositionScale(0.8, 3)},
}
GROUPED = {
    "GQA": lambda: attention(4, num_kv_heads=2),
    "MQA with biases": lambda: attention(4, num_kv_heads=1, bias=True),
    "QK-norm, gate": lambda: attention(4, num_kv_heads=2, qk_norm="head", gate="head"),
    "everything at once": everything_at_once,
}


def same(mha, mla, x, tolerance=1e-12):
    torch.testing.assert_close(mha(x), mla(x), atol=tolerance, rtol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("latent_norm", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_mla_expanded_is_the_same_attention(name, latent_norm):
    mla = scattered(latent(latent_norm=latent_norm, **VARIANTS[name])).double().eval()
    mha = expand(mla)
    assert (mha.kind, mha.head_dim) == ("MHA", max(mla.qk_head_dim, mla.v_head_dim))
    assert not any(parameter.is_meta for parameter in mha.parameters())
    x = inputs(2, 7)
    same(mha, mla, x)
    cache = KVCache()
    pieces = [mha(piece, cache=cache) for piece in x.split(3, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), mla(x), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(mha.weights(x), mla.weights(x), atol=1e-12, rtol=1e-12)
    assert cache.nbytes == 2 * 7 * 2 * 3 * mha.head_dim * 8


@torch.no_grad()
@pytest.mark.parametrize("latent_norm", [True, False])
@pytest.mark.parametrize(("rank", "biased"), BIASES, ids=str)
def test_every_set_of_biases(rank, biased, latent_norm):
    options = {"q_lora_rank": rank, "bias": set(biased), "latent_norm": latent_norm}
    mla = scattered(latent(**options)).double().eval()
    same(expand(mla), mla, inputs(1, 5))


@st.composite
def sizes(draw):
    pick = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    rotary = 2 * pick(1, 3)
    return {
        "kv_lora_rank": pick(1, 6),
        "q_lora_rank": draw(st.none() | st.integers(1, 5)),
        "qk_nope_head_dim": pick(0, 5),
        "qk_rope_head_dim": rotary,
        "v_head_dim": pick(1, 9),
        "rope": Rotary(rotary, pairing=draw(st.sampled_from(["pairs", "halves"]))),
        "latent_norm": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "mask": Causal(),
    }


@torch.no_grad()
@given(sizes(), st.integers(1, 4))
def test_any_sizes(options, heads):
    mla = scattered(MultiHeadLatentAttention(WIDTH, heads, **options)).double().eval()
    same(expand(mla), mla, inputs(1, 4), 1e-11)


@torch.no_grad()
def test_in_float32_to_rounding():
    mla = scattered(latent()).eval()
    x = inputs(2, 7).float()
    exact = copy.deepcopy(mla).double()(x.double())
    error, own = ((each(x) - exact).abs().max() for each in (expand(mla), mla))
    assert error <= 4 * own + 1e-6


def test_only_projections_with_a_norm_between_stay_in_two_steps():
    plain = expand(latent(latent_norm=False))
    assert all(type(child) is nn.Linear for child in plain.children())
    mla = latent()
    mha = expand(mla)
    assert {name for name, child in mha.named_children() if isinstance(child, LowRank)} == {
        "q_proj",
        "k_proj",
        "v_proj",
    }
    assert mha.k_proj.down is mha.v_proj.down is mla.kv_a_proj_with_mqa
    assert type(expand(latent(q_lora_rank=None)).q_proj) is nn.Linear


def test_gradients_reach_the_shared_parameters():
    mla = scattered(latent()).double()
    (expand(mla)(inputs(1, 5)).square().sum()).backward()
    for name in ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"):
        assert mla.get_submodule(name).weight.grad.abs().max() > 0


def test_projections_that_are_not_plain_are_refused():
    mla = latent()
    mla.kv_b_proj = nn.Sequential(mla.kv_b_proj)
    with pytest.raises(ValueError, match="kv_b_proj is a Sequential"):
        expand(mla)


@pytest.mark.parametrize("name", GROUPED)
def test_gqa_spelled_out_is_the_same_attention(name):
    layer = GROUPED[name]().double().eval()
    mha = spell_out(layer)
    x = torch.randn(2, 7, layer.hidden_size, dtype=torch.float64)
    assert mha.kind == "MHA"
    torch.testing.assert_close(mha(x), layer(x), atol=1e-12, rtol=1e-12)
    caches = KVCache(), KVCache()
    chunks = [(mha(c, cache=caches[0]), layer(c, cache=caches[1])) for c in x.split(3, dim=1)]
    for ours, theirs in chunks:
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    assert caches[0].nbytes == caches[1].nbytes * layer.num_heads // layer.num_kv_heads


def test_all_but_keys_and_values_is_shared():
    layer = attention(4, num_kv_heads=2)
    mha = spell_out(layer)
    assert mha.q_proj is layer.q_proj
    assert mha.o_proj is layer.o_proj
    assert not any(parameter.is_meta for parameter in mha.parameters())


def test_mha_is_returned_unchanged():
    layer = attention(4)
    assert spell_out(layer) is layer


def test_norms_over_the_whole_width_are_refused():
    with pytest.raises(ValueError, match='qk_norm="width" norms all key heads at once'):
        spell_out(attention(4, num_kv_heads=2, qk_norm="width"))


def test_adapters_are_refused():
    layer = attention(4, num_kv_heads=2)
    layer.k_proj = torch.nn.Sequential(layer.k_proj)
    with pytest.raises(ValueError, match="k_proj is a Sequential"):
        spell_out(layer)
