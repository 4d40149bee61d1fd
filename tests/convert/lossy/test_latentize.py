"""A joint latent is exact at full rank, and below it its directions have the least error.

Given inputs, errors of keys and values count by what they do to the layer's outputs.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from layers import WIDTH, attention, scattered
from regard import KVCache
from regard.convert import Moments, as_latent, latentize
from regard.convert.lossy.calibrate import moments_of
from regard.convert.lossy.directions import VALUES
from regard.convert.lossy.latentize import plain_norm

SHAPES = {
    "GQA": {"num_kv_heads": 2},
    "MQA": {"num_kv_heads": 1},
    "MHA, more rows than columns": {},
    "biases": {"num_kv_heads": 2, "bias": True},
    "key bias alone": {"num_kv_heads": 2, "bias": {"k_proj"}},
    "QK-norm of heads": {"num_kv_heads": 2, "qk_norm": "head", "norm_eps": 0.1},
    "QK-norm of the width": {"num_kv_heads": 2, "qk_norm": "width", "bias": True},
    "QK-norm that is user-defined": {"num_kv_heads": 2, "qk_norm": torch.nn.LayerNorm},
}


def skewed(*shape: int) -> torch.Tensor:
    """Inputs with more energy in some directions than in others."""
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
def test_the_reported_loss_is_the_measured_one():
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


NORMS = {
    "of heads": {"qk_norm": "head"},
    "of the width": {"qk_norm": "width"},
    "of heads, with biases": {"qk_norm": "head", "bias": True},
    "user-defined": {"qk_norm": nn.LayerNorm},
}


def layer_of(name: str):
    return scattered(attention(4, num_kv_heads=2, **NORMS[name])).double()


def uneven(tokens: int) -> torch.Tensor:
    """Inputs in two subspaces, those in one of them twenty times as large."""
    x = torch.randn(1, tokens, WIDTH, dtype=torch.float64)
    large = torch.rand(1, tokens, 1, dtype=torch.float64) < 0.5
    half = torch.arange(WIDTH) < WIDTH // 2
    return torch.where(large, 20 * x * half, x * ~half + 0.2 * x * half)


def error(layer, made, x):
    """The squared error of the outputs."""
    return float((made(x) - layer(x)).square().mean())


def fitted(layer, x, rank, *, with_inputs=True):
    covariance = moments_of(x).covariance
    return latentize(layer, rank=rank, covariance=covariance, inputs=x if with_inputs else None)


@torch.no_grad()
@pytest.mark.parametrize("name", NORMS)
def test_normed_keys_are_exact_at_full_rank(name):
    layer, x = layer_of(name), uneven(80)
    for with_inputs in (True, False):
        made = fitted(layer, x, WIDTH, with_inputs=with_inputs)
        assert made.lost < 1e-9
        torch.testing.assert_close(made.layer(x), layer(x), atol=1e-7, rtol=1e-7)


@torch.no_grad()
@pytest.mark.parametrize("name", [*NORMS, "none"])
def test_outputs_over_other_text_are_nearer_if_errors_count_by_them(name):
    """Of most layers: an estimate from one draw of signs is not the best for each."""
    better = 0
    for seed in range(9):
        torch.manual_seed(seed)
        layer = scattered(attention(4, num_kv_heads=2, **NORMS.get(name, {}))).double()
        x, other = 0.5 * skewed(40, 10, WIDTH), 0.5 * skewed(20, 10, WIDTH)
        fits = [fitted(layer, x, WIDTH - 3, with_inputs=each).layer for each in (True, False)]
        better += error(layer, fits[0], other) < error(layer, fits[1], other)
    assert better >= 7


@torch.no_grad()
def test_the_size_of_a_heads_keys_does_not_change_the_fit_where_a_norm_divides_by_it():
    layer, x = layer_of("of heads"), uneven(300)
    before = fitted(layer, x, 5).layer
    layer.k_proj.weight[: layer.head_dim] *= 1000
    after = fitted(layer, x, 5).layer
    torch.testing.assert_close(after(x), before(x), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_with_fewer_tokens_than_the_rank_these_tokens_are_exact():
    layer, x = layer_of("of heads"), uneven(4)
    made = fitted(layer, x, WIDTH - 1).layer
    torch.testing.assert_close(made(x), layer(x), atol=1e-4, rtol=1e-4)
    assert torch.isfinite(made(uneven(9))).all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("made_by", [Qwen3RMSNorm, Gemma3RMSNorm])
def test_rms_norms_of_transformers_become_torchs(made_by, dtype):
    norm = made_by(6, eps=1e-3).to(dtype)
    nn.init.normal_(norm.weight, 0.0, 0.5)
    plain = plain_norm(norm)
    assert type(plain) is nn.RMSNorm and plain.eps == 1e-3
    gains = norm.weight.float() + (made_by is Gemma3RMSNorm)
    x = torch.randn(2, 5, 6, dtype=dtype) * torch.tensor([1.0, 0.01])[:, None, None]
    x = x.to(dtype)
    wanted = rms_norm(x.float(), (6,), gains, 1e-3)
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        plain(x.to(plain.weight.dtype)).float(), wanted, atol=bound, rtol=bound
    )


class Doubling(nn.Module):
    """A module with the attributes of an RMS norm that computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

    def forward(self, x):
        return 2 * x * self.weight


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), Doubling(), nn.Identity(), nn.RMSNorm(4)])
def test_other_norms_are_returned_unchanged(norm):
    assert plain_norm(norm) is norm
