"""A joint latent is exact at full rank, and below it no other choice of its rank does better."""

import pytest
import torch

from layers import WIDTH, attention, scattered
from regard import KVCache
from regard.convert import Moments, as_latent, latentize, watch
from regard.convert.lossy.principal import VALUES

SHAPES = {
    "GQA": {"num_kv_heads": 2},
    "MQA": {"num_kv_heads": 1},
    "MHA, more rows than columns": {},
    "biases": {"num_kv_heads": 2, "bias": True},
    "key bias alone": {"num_kv_heads": 2, "bias": {"k_proj"}},
    "QK-norm of heads": {"num_kv_heads": 2, "qk_norm": "head", "norm_eps": 0.1},
    "QK-norm of the width": {"num_kv_heads": 2, "qk_norm": "width", "bias": True},
    "QK-norm of ones own": {"num_kv_heads": 2, "qk_norm": torch.nn.LayerNorm},
}


def skewed(*shape: int) -> torch.Tensor:
    """Inputs that live in some directions more than in others."""
    return torch.randn(*shape, dtype=torch.float64) * torch.linspace(0.05, 2.0, shape[-1])


def covariance_of(x: torch.Tensor) -> torch.Tensor:
    moments = Moments()
    moments.add(x)
    return moments.covariance


@pytest.mark.parametrize("name", SHAPES)
def test_a_latent_of_full_rank_is_the_same_attention(name):
    layer = scattered(attention(4, **SHAPES[name])).double()
    latent = as_latent(layer)
    assert latent.kv_lora_rank == min(WIDTH, 2 * layer.num_kv_heads * layer.head_dim)
    x, cache = torch.randn(2, 7, WIDTH, dtype=torch.float64), KVCache()
    torch.testing.assert_close(latent(x), layer(x), atol=1e-12, rtol=1e-12)
    chunks = [latent(chunk, cache=cache) for chunk in x.split(3, dim=1)]
    torch.testing.assert_close(torch.cat(chunks, 1), layer(x), atol=1e-12, rtol=1e-12)
    assert cache.nbytes == 2 * 7 * (8 * latent.kv_lora_rank + 4)


def test_calibrated_at_full_rank_nothing_is_lost():
    layer = attention(4, num_kv_heads=1).double()
    x = skewed(2, 50, WIDTH)
    made = latentize(layer, rank=12, covariance=covariance_of(x))
    assert made.lost < 1e-12
    torch.testing.assert_close(made.layer(x), layer(x), atol=1e-10, rtol=1e-10)


def test_less_rank_loses_more():
    layer, x = attention(4, num_kv_heads=1).double(), skewed(2, 50, WIDTH)
    lost = [latentize(layer, rank=r, covariance=covariance_of(x)).lost for r in range(1, 13)]
    assert lost == sorted(lost, reverse=True)
    assert 0 < lost[8] < lost[0] < 1


@torch.no_grad()
def test_what_it_says_is_lost_is_what_is_lost():
    layer, x = attention(4, num_kv_heads=2).double(), skewed(1, 200, WIDTH)
    made = latentize(layer, rank=5, covariance=covariance_of(x))
    rebuilt = made.layer.kv_b_proj(made.layer.kv_a_proj(x))
    wanted = torch.cat([layer.k_proj(x), layer.v_proj(x)], -1)
    keys, values = (wanted - rebuilt).square().sum((0, 1)).chunk(2)
    all_keys, all_values = wanted.square().sum((0, 1)).chunk(2)
    count = VALUES**2
    share = keys.sum() / all_keys.sum() + count * values.sum() / all_values.sum()
    share = share / (1 + count)
    assert made.lost == pytest.approx(float(share))


@torch.no_grad()
def test_no_other_directions_do_better():
    layer, x = attention(4, num_kv_heads=2).double(), skewed(1, 200, WIDTH)
    made = latentize(layer, rank=5, covariance=covariance_of(x))
    plain = latentize(layer, rank=5, covariance=torch.eye(WIDTH))

    def error(latent):
        wanted = torch.cat([layer.k_proj(x), layer.v_proj(x)], -1)
        weights = wanted.square().sum((0, 1)).unflatten(0, (2, -1)).sum(1).repeat_interleave(12)
        rebuilt = latent.kv_b_proj(latent.kv_a_proj(x))
        return float(((wanted - rebuilt).square().sum((0, 1)) / weights).sum())

    assert error(made.layer) < error(plain.layer)
    for _ in range(20):
        other = latentize(layer, rank=5, covariance=covariance_of(skewed(1, 30, WIDTH)))
        assert error(made.layer) <= error(other.layer) * (1 + 1e-9)


def test_moments_add_up_over_calls():
    layer, (x, y) = torch.nn.Linear(3, 3), torch.randn(2, 4, 3)
    with watch([layer]) as (seen,):
        layer(x)
        layer(y)
    layer(x)  # no longer watched
    rows = torch.cat([x, y]).double()
    assert seen.tokens == 8
    torch.testing.assert_close(seen.covariance, rows.mT @ rows / 8)


def test_moments_of_nothing_are_refused():
    with pytest.raises(ValueError, match="no token was seen"):
        Moments().covariance  # noqa: B018  (a property that raises)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "head", "sinks": True}, "no place for gate, sinks, which .* a quantised cache"),
        ({"qk_norm": "head", "sinks": True}, "has no place for sinks, which this layer has"),
    ],
)
def test_what_a_latent_cannot_hold_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        as_latent(attention(4, num_kv_heads=2, **options))


@pytest.mark.parametrize(
    ("rank", "width", "message"),
    [
        (0, WIDTH, r"rank=0 is not in 1\.\.12"),
        (13, WIDTH, r"rank=13 is not in 1\.\.12"),
        (3, 5, "covariance is of inputs of width 5"),
    ],
)
def test_a_rank_or_covariance_that_does_not_fit_is_refused(rank, width, message):
    layer = attention(4, num_kv_heads=2)
    with pytest.raises(ValueError, match=message):
        latentize(layer, rank=rank, covariance=torch.eye(width))
