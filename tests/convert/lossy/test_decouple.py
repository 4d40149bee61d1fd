"""With all components rotated nothing is lost; else those that matter least are not rotated."""

import pytest
import torch

from layers import WIDTH, attention
from regard import NO_ROPE, Causal, KVCache, Rotary, SlidingWindow, Yarn, attend
from regard.convert import Moments, decouple
from regard.convert.lossy.decouple import (
    common_counts,
    components,
    reactions,
    score_gradients,
)

DIM = 6
SHAPES = {
    "GQA": {"num_kv_heads": 2},
    "MQA": {"num_kv_heads": 1},
    "MHA": {},
    "biases": {"num_kv_heads": 2, "bias": True},
    "key bias alone": {"num_kv_heads": 2, "bias": {"k_proj"}},
    "pairs": {"num_kv_heads": 2, "rope": Rotary(DIM, pairing="pairs")},
    "some channels not rotated": {"num_kv_heads": 2, "rope": Rotary(4, theta=50.0)},
    "yarn": {"num_kv_heads": 2, "rope": Rotary(DIM, scaling=Yarn(4.0, original_max_position=16))},
}


def made(name):
    options = {"rope": Rotary(DIM, theta=50.0)} | SHAPES[name]
    return attention(4, head_dim=DIM, mask=Causal(), **options).double()


def covariance_of(x):
    moments = Moments()
    moments.add(x)
    return moments.covariance


def inputs():
    torch.manual_seed(2)
    return torch.randn(2, 30, WIDTH, dtype=torch.float64) * torch.linspace(0.2, 2.0, WIDTH)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@torch.no_grad()
def test_nothing_is_lost_if_all_components_are_rotated(name, form):
    layer, x = made(name), inputs()
    full = min(WIDTH, 2 * layer.num_kv_heads * DIM)
    rotated = layer.num_kv_heads * layer.rope.dim
    found = decouple(layer, rank=full, rope_dim=rotated, covariance=covariance_of(x))
    assert found.lost_rotation == 0 and found.lost < 1e-9
    if form == "absorbed" and found.layer.kv_b_proj.bias is not None:
        pytest.skip("a bias cannot be absorbed")
    found.layer.form = form
    torch.testing.assert_close(found.layer(x), layer(x), atol=1e-9, rtol=1e-9)
    cache = KVCache()
    steps = torch.cat([found.layer(part, cache=cache) for part in x.split(7, dim=1)], dim=1)
    torch.testing.assert_close(steps, layer(x), atol=1e-9, rtol=1e-9)
    assert cache.nbytes == 2 * 30 * (full + rotated) * 8


def test_the_arguments_of_the_layer_are_those_that_build_it():
    layer = decouple(made("GQA"), rank=8, rope_dim=6, covariance=covariance_of(inputs())).layer
    again = type(layer)(**layer.arguments)
    assert again.rope == layer.rope and repr(again) == repr(layer)


@torch.no_grad()
def test_components_are_uncorrelated_and_make_up_the_keys():
    layer, x = made("GQA"), inputs()
    found = components(layer, covariance_of(x))
    rows = found.rows[..., :-1]
    energy = rows @ covariance_of(x).to(rows.dtype) @ rows.mH
    apart = energy - torch.diag_embed(energy.diagonal(dim1=-2, dim2=-1))
    assert float(apart.abs().max()) < 1e-9 * float(energy.abs().max())
    keys = (found.mixing @ rows).transpose(0, 1)
    heads = layer.k_proj.weight.unflatten(0, (2, DIM))
    torch.testing.assert_close(torch.cat([keys.real, keys.imag], 1), heads)


@torch.no_grad()
def test_components_rotated_slowly_lose_little_without_rotation():
    layer = attention(4, num_kv_heads=2, head_dim=DIM, mask=Causal(), rope=Rotary(DIM, theta=1e20))
    layer, x = layer.double(), inputs()
    found = decouple(layer, rank=WIDTH, rope_dim=4, covariance=covariance_of(x))
    # one of three frequencies is not slow, and both of its components are rotated
    assert found.lost_rotation < 1e-4
    torch.testing.assert_close(found.layer(x), layer(x), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_with_more_rotated_channels_less_is_lost():
    layer, x = made("GQA"), inputs()
    lost = [
        decouple(layer, rank=WIDTH, rope_dim=dim, covariance=covariance_of(x)).lost_rotation
        for dim in (2, 6, 10, 12)
    ]
    assert lost == sorted(lost, reverse=True) and lost[-1] == 0 < lost[-2]


@torch.no_grad()
def test_layers_with_shared_counts_have_the_same_frequencies():
    layers, x = [made("GQA"), made("GQA")], inputs()
    harms = [components(layer, covariance_of(x)).harm for layer in layers]
    counts = common_counts(harms, 6)
    assert sum(counts) == 3
    found = [
        decouple(layer, rank=8, rope_dim=6, covariance=covariance_of(x), counts=counts).layer
        for layer in layers
    ]
    assert found[0].rope == found[1].rope


@torch.no_grad()
def test_outputs_over_other_text_are_nearer_if_errors_count_by_them():
    better = 0
    for seed in range(9):
        torch.manual_seed(seed)
        layer = made("GQA")
        x, other = torch.randn(2, 30, 10, WIDTH, dtype=torch.float64) * torch.linspace(
            0.1, 1, WIDTH
        )
        sizes = {"rank": WIDTH - 3, "rope_dim": 6, "covariance": covariance_of(x)}
        fits = [decouple(layer, **sizes, inputs=given).layer for given in (x, None)]
        errors = [float((each(other) - layer(other)).square().mean()) for each in fits]
        better += errors[0] < errors[1]
    assert better >= 7


@torch.no_grad()
def test_gradients_by_scores_are_those_of_a_bias():
    options = {"num_kv_heads": 2, "head_dim": DIM, "mask": Causal(), "rope": NO_ROPE}
    layer, x = attention(4, **options).double(), inputs()[0]
    by = torch.randn_like(x)
    q, k, v = (
        proj(x).unflatten(-1, (-1, DIM)).transpose(0, 1)[None]
        for proj in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    bias = torch.zeros(1, 4, len(x), len(x), dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        out = attend(q, k, v, mask=Causal(), score_bias=bias)[0]
        total = (by * layer.o_proj(out.transpose(0, 1).flatten(1))).sum()
    (wanted,) = torch.autograd.grad(total, bias)
    torch.testing.assert_close(score_gradients(layer, x, by), wanted[0])


@torch.no_grad()
def test_outputs_react_to_no_score_outside_a_window():
    layer, x = made("GQA"), inputs()
    layer.mask = Causal() & SlidingWindow(3)
    found = reactions(layer, x)
    assert found.shape == (2, DIM // 2, x.shape[1])
    assert bool((found[..., :3] > 0).all()) and not found[..., 3:].any()


@torch.no_grad()
def test_rotations_over_distances_that_are_not_read_do_not_count():
    layer, x = made("GQA"), inputs()
    layer.mask = Causal() & SlidingWindow(2)
    sizes = {"rank": WIDTH, "rope_dim": 4, "covariance": covariance_of(x)}
    fits = [decouple(layer, **sizes, inputs=given).layer for given in (x, None)]
    errors = [float((each(x) - layer(x)).square().mean()) for each in fits]
    assert errors[0] < errors[1] / 4


@pytest.mark.parametrize(
    ("options", "wanted", "message"),
    [
        ({}, {"rank": 0}, "rank=0 is not in 1.."),
        ({}, {"rope_dim": 5}, "rope_dim=5 is not an even number"),
        ({}, {"rope_dim": 14}, r"rope_dim=14 is not an even number in 2..12"),
        ({}, {"counts": (1, 1, 0)}, r"counts=\(1, 1, 0\) must have one number"),
        ({"rope": NO_ROPE}, {}, "rotates nothing"),
        ({"qk_norm": "head"}, {}, "MLA has no place for qk_norm"),
        ({"softcap": 5.0}, {}, "MLA has no place for softcap"),
    ],
)
def test_what_cannot_be_decoupled_is_refused(options, wanted, message):
    layer = attention(4, num_kv_heads=2, head_dim=DIM, **options)
    given = {"rank": 8, "rope_dim": 6, "covariance": torch.eye(WIDTH)} | wanted
    with pytest.raises(ValueError, match=message):
        decouple(layer, **given)
