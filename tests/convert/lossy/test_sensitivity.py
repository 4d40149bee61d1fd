"""The metric is the mean over tokens of the squared Jacobians of outputs by keys and values."""

import pytest
import torch
from torch import nn

from layers import WIDTH, attention, scattered
from regard import Causal, Dense
from regard.convert.lossy.sensitivity import SHRINKAGE, sensitivity

TOKENS, STEP = 4, 1e-5


class Shifted(nn.Module):
    """A projection whose outputs are those of another plus a constant."""

    def __init__(self, inner: nn.Module, shift: torch.Tensor) -> None:
        super().__init__()
        self.inner, self.shift = inner, shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.shift


def jacobians(layer, x):
    """Of the outputs by the keys and values of each token, by differences: `[tokens, out, R]`."""
    own = layer.k_proj, layer.v_proj
    half = own[0].out_features
    found = torch.zeros(TOKENS, x.numel(), 2 * half, dtype=torch.float64)
    for token in range(TOKENS):
        for row in range(2 * half):
            outs = []
            for sign in (1, -1):
                shifts = torch.zeros(2, TOKENS, half, dtype=torch.float64)
                shifts[row // half, token, row % half] = sign * STEP
                layer.k_proj, layer.v_proj = map(Shifted, own, shifts)
                outs.append(layer(x[None])[0])
            found[token, :, row] = ((outs[0] - outs[1]) / (2 * STEP)).flatten()
    layer.k_proj, layer.v_proj = own
    return found


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"qk_norm": "head", "bias": True}])
def test_the_metric_is_the_mean_of_squared_jacobians(options):
    torch.manual_seed(0)
    layer = scattered(attention(2, num_kv_heads=1, **options)).double()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    by_token = jacobians(layer, x)
    wanted = (by_token.mT @ by_token).mean(0)
    found = sensitivity(layer, x.expand(500, -1, -1))[0]
    found = found - SHRINKAGE / (1 + SHRINKAGE) * found.diagonal().diag()
    assert float((found - wanted).norm()) < 0.15 * float(wanted.norm())


@torch.no_grad()
def test_a_token_that_no_query_reads_does_not_count():
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    visible[1:, 2] = visible[2, 2] = False
    layer = attention(2, num_kv_heads=1, mask=Causal() & Dense(visible)).double()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    before = sensitivity(layer, x)[1]
    x[:, 2] *= 100  # its query is the only one that changes
    after = sensitivity(layer, x)[1]
    assert float(after[:-1, :-1].diagonal().max()) < 20 * float(before.diagonal().max())


@torch.no_grad()
def test_a_layer_without_sensitivity_has_the_covariance_of_its_inputs():
    layer = attention(2, num_kv_heads=1).double()
    nn.init.zeros_(layer.o_proj.weight)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    metric, covariance = sensitivity(layer, x)
    assert torch.isfinite(metric).all()
    rows = x.flatten(0, 1)
    torch.testing.assert_close(covariance[:-1, :-1], rows.mT @ rows / len(rows))
    torch.testing.assert_close(covariance[-1, :-1], rows.mean(0))


@torch.no_grad()
def test_the_same_inputs_give_the_same_bits():
    layer, x = attention(2, num_kv_heads=1), torch.randn(2, 5, WIDTH)
    for one, other in zip(sensitivity(layer, x), sensitivity(layer, x), strict=True):
        assert torch.equal(one, other)


def test_modes_and_defaults_of_the_caller_do_not_matter():
    layer, x = attention(2, num_kv_heads=1), torch.randn(2, 5, WIDTH)
    expected = sensitivity(layer, x)
    with torch.inference_mode():
        made_there = x + 0
        found = [sensitivity(layer, made_there)]
    with torch.device("meta"):
        found.append(sensitivity(layer, x))
    for each in found:
        assert all(torch.equal(one, other) for one, other in zip(each, expected, strict=True))
