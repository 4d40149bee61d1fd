"""Heads that differ by an invertible map are merged exactly; others lose what is reported."""

import pytest
import torch

from layers import WIDTH, attention
from regard import Causal, Rotary
from regard.convert import Moments, regroup
from regard.convert.linear import linear_of
from regard.convert.lossy.regroup import grouped

HEADS, DIM = 4, 6


def moments_of(x):
    moments = Moments()
    moments.add(x)
    return moments


def rotated(key, angles, gains):
    """A key's rows with each pair of channels rotated and scaled, which queries can undo."""
    real, imaginary = key.chunk(2)
    cos, sin = (gains * angles.cos())[:, None], (gains * angles.sin())[:, None]
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos])


def alike(pairing="halves", dim=DIM, theta=100.0, shuffled=(0, 1, 2, 3)):
    """Four key heads made of two: two of them are the same but for an invertible map."""
    torch.manual_seed(1)
    rope = Rotary(dim, theta=theta, pairing=pairing)
    layer = attention(8, num_kv_heads=HEADS, head_dim=DIM, rope=rope, mask=Causal()).double()
    keys, values = torch.randn(2, 2, DIM, WIDTH, dtype=torch.float64)
    rows, columns = [None] * HEADS, [None] * HEADS
    for place, head in enumerate(shuffled):
        angles, gains = torch.rand(2, dim // 2, dtype=torch.float64) + 0.5
        key = keys[head // 2].clone()
        if pairing == "pairs":
            order = torch.cat([torch.arange(0, dim, 2), torch.arange(1, dim, 2)])
            key[order] = rotated(key[order], angles, gains)
        else:
            key[:dim] = rotated(key[:dim], angles, gains)
        rows[place] = key
        columns[place] = torch.randn(DIM, DIM, dtype=torch.float64) @ values[head // 2]
    layer.k_proj, layer.v_proj = linear_of(torch.cat(rows)), linear_of(torch.cat(columns))
    return layer


@pytest.mark.parametrize("pairing", ["halves", "pairs"])
@pytest.mark.parametrize(("dim", "theta"), [(DIM, 100.0), (4, 100.0), (DIM, 1e9)])
@pytest.mark.parametrize("shuffled", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 2, 1)])
@torch.no_grad()
def test_heads_that_are_equal_but_for_a_map_are_found_and_merged_exactly(
    pairing, dim, theta, shuffled
):
    layer = alike(pairing, dim, theta, shuffled)
    x = torch.randn(2, 40, WIDTH, dtype=torch.float64)
    made = regroup(layer, 2, covariance=moments_of(x).covariance)
    assert made.layer.num_kv_heads == 2
    assert made.lost < 1e-9
    slow = 1e-2 if theta > 1e6 else 1e-7  # slow channels are merged as if not rotated
    torch.testing.assert_close(made.layer(x), layer(x), atol=slow, rtol=slow)


@torch.no_grad()
def test_aligned_loses_less_than_the_mean_and_the_mean_is_the_mean():
    layer = attention(4, num_kv_heads=2, head_dim=DIM, rope=Rotary(DIM), mask=Causal()).double()
    x = torch.randn(3, 30, WIDTH, dtype=torch.float64)
    aligned = regroup(layer, 1, covariance=moments_of(x).covariance).layer
    mean, first = (regroup(layer, 1, method=each).layer for each in ("mean", "first"))
    errors = [float((each(x) - layer(x)).square().mean()) for each in (aligned, mean, first)]
    assert errors[0] < min(errors[1:])
    halves = layer.k_proj.weight.unflatten(0, (2, DIM))
    assert torch.equal(mean.k_proj.weight, (halves[0] + halves[1]) / 2)
    assert torch.equal(first.k_proj.weight, halves[0])
    assert first.q_proj is layer.q_proj


@torch.no_grad()
def test_biases_are_merged_with_their_rows():
    layer = attention(4, num_kv_heads=2, head_dim=DIM, rope=Rotary(DIM), bias=True).double()
    for name in ("k_proj", "v_proj"):  # two equal heads
        for tensor in (getattr(layer, name).weight, getattr(layer, name).bias):
            tensor[DIM:] = tensor[:DIM]
    x = torch.randn(2, 30, WIDTH, dtype=torch.float64) + 0.3
    made = regroup(layer, 1, covariance=moments_of(x).augmented).layer
    assert {name for name, _ in made.named_parameters() if "bias" in name} == {
        f"{each}_proj.bias" for each in "qkvo"
    }
    torch.testing.assert_close(made(x), layer(x), atol=1e-8, rtol=1e-8)


def test_with_as_many_heads_the_layer_is_returned():
    layer = attention(4, num_kv_heads=2)
    assert regroup(layer, 2).layer is layer


@pytest.mark.parametrize(
    ("options", "wanted", "message"),
    [
        ({}, {"num_kv_heads": 3}, "must divide the layer's 4"),
        ({}, {"num_kv_heads": 2}, "give covariance="),
        ({"qk_norm": "head"}, {"num_kv_heads": 2, "covariance": torch.eye(WIDTH)}, "qk_norm"),
    ],
)
def test_what_cannot_be_merged_is_refused(options, wanted, message):
    layer = attention(4, **options)
    count = wanted.pop("num_kv_heads")
    with pytest.raises(ValueError, match=message):
        regroup(layer, count, **wanted)


def test_groups_are_of_one_size_and_no_exchange_helps():
    torch.manual_seed(0)
    loss = torch.rand(6, 6)
    loss = loss + loss.mT
    found = grouped(loss, 2)
    assert sorted(head for group in found for head in group) == list(range(6)) and {
        len(group) for group in found
    } == {2}
    every = [
        [(0, a), (b, c), (d, e)]
        for a in range(1, 6)
        for b in range(1, 6)
        for c in range(b + 1, 6)
        for d in range(b + 1, 6)
        for e in range(d + 1, 6)
        if len({a, b, c, d, e}) == 5
    ]
    best = min(sum(float(loss[x, y]) for x, y in pairs) for pairs in every)
    assert sum(float(loss[x, y]) for x, y in found) <= best * 1.3
