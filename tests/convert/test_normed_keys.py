"""Where keys are normed after the latent, the fit keeps what the norm leaves of them."""

import pytest
import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from layers import WIDTH, attention, scattered
from regard.convert import latentize
from regard.convert.linear import rows_of
from regard.convert.lossy.calibrate import moments_of
from regard.convert.lossy.norms import plain_norm

NORMS = {
    "of heads": {"qk_norm": "head"},
    "of the width": {"qk_norm": "width"},
    "of heads, with biases": {"qk_norm": "head", "bias": True},
    "of ones own": {"qk_norm": nn.LayerNorm},
}


def layer_of(name: str):
    return scattered(attention(4, num_kv_heads=2, **NORMS[name])).double()


def uneven(tokens: int) -> torch.Tensor:
    """Inputs in two subspaces, those in one of them twenty times as large."""
    x = torch.randn(1, tokens, WIDTH, dtype=torch.float64)
    large = torch.rand(1, tokens, 1, dtype=torch.float64) < 0.5
    half = torch.arange(WIDTH) < WIDTH // 2
    return torch.where(large, 20 * x * half, x * ~half + 0.2 * x * half)


def relative_errors(layer, made, x):
    """The squares of keys' errors, each over the mean square of its key, before the norm."""
    rows = rows_of(layer, "k_proj")
    keys = x @ rows[:, :-1].mT + rows[:, -1]
    rebuilt = made.kv_b_proj(made.kv_a_proj(x))[..., : keys.shape[-1]]
    heads = 1 if layer.norm_width else layer.num_kv_heads
    error, whole = ((each).unflatten(-1, (heads, -1)) for each in (rebuilt - keys, keys))
    return (error.square().mean(-1) / whole.square().mean(-1)).mean()


def fitted(layer, x, rank, *, told=True):
    covariance = moments_of(x).covariance
    return latentize(layer, rank=rank, covariance=covariance, inputs=x if told else None)


@torch.no_grad()
@pytest.mark.parametrize("name", NORMS)
def test_at_full_rank_nothing_is_lost(name):
    layer, x = layer_of(name), uneven(80)
    for told in (True, False):
        made = fitted(layer, x, WIDTH, told=told)
        assert made.lost < 1e-9
        torch.testing.assert_close(made.layer(x), layer(x), atol=1e-7, rtol=1e-7)


@torch.no_grad()
@pytest.mark.parametrize("name", NORMS)
def test_errors_count_relative_to_the_size_of_a_key(name):
    layer, x = layer_of(name), uneven(400)
    rank = WIDTH - 3
    best, blind = (fitted(layer, x, rank, told=told).layer for told in (True, False))
    assert relative_errors(layer, best, x) < relative_errors(layer, blind, x)


@torch.no_grad()
def test_no_other_directions_do_better_where_one_norm_serves_all_keys():
    layer, x = layer_of("of the width"), uneven(300)
    layer.v_proj.weight.zero_()
    nn.init.ones_(layer.k_norm.weight)
    least = relative_errors(layer, fitted(layer, x, 5).layer, x)
    for seed in range(20):
        other = fitted(layer, uneven(30 + seed), 5).layer
        assert least <= relative_errors(layer, other, x) * (1 + 1e-9)


@torch.no_grad()
def test_heads_whose_keys_are_large_weigh_no_more():
    """A norm takes their size away, so it may not change what is chosen."""
    layer, x = layer_of("of heads"), uneven(300)
    before = relative_errors(layer, fitted(layer, x, 5).layer, x)
    layer.k_proj.weight[: layer.head_dim] *= 1000
    after = relative_errors(layer, fitted(layer, x, 5).layer, x)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=0)


@torch.no_grad()
def test_less_text_than_rank_leaves_the_rest_as_it_was():
    layer, x = layer_of("of heads"), uneven(4)
    made = fitted(layer, x, WIDTH - 1).layer
    torch.testing.assert_close(made(x), layer(x), atol=1e-4, rtol=1e-4)
    assert torch.isfinite(made(uneven(9))).all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("made_by", [Qwen3RMSNorm, Gemma3RMSNorm])
def test_norms_of_transformers_become_torchs(made_by, dtype):
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
    """Has all that an RMS norm has, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

    def forward(self, x):
        return 2 * x * self.weight


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), Doubling(), nn.Identity(), nn.RMSNorm(4)])
def test_other_norms_stay_what_they_are(norm):
    assert plain_norm(norm) is norm
