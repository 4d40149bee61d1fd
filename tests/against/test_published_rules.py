"""The rules of `benchmarks/published_rules.py`, which regard's conversions are compared with."""

import sys
from pathlib import Path

import pytest
import torch

from layers import WIDTH, attention
from regard import Causal, Rotary
from regard.convert import Moments

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from published_rules import RULES, mha2mla, transmla

DIM = 6


def made():
    rope = Rotary(DIM, theta=50.0)
    return attention(4, head_dim=DIM, mask=Causal(), num_kv_heads=2, rope=rope).double()


def covariance_of(x):
    moments = Moments()
    moments.add(x)
    return moments.covariance


def inputs():
    torch.manual_seed(2)
    return torch.randn(2, 30, WIDTH, dtype=torch.float64) * torch.linspace(0.2, 2.0, WIDTH)


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_every_rule_loses_nothing_if_all_components_are_rotated(rule):
    layer, x = made(), inputs()
    found = RULES[rule](layer, covariance_of(x), rank=WIDTH, rope_dim=12)
    torch.testing.assert_close(found.layer(x), layer(x), atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_the_rules_select_as_the_papers_describe():
    layer, x = made(), inputs()
    real, score = transmla(layer, covariance_of(x))
    assert real.mixing.imag.abs().max() == 0
    first = score.flatten().topk(3).indices.tolist()
    assert first == [0, 2, 4]  # the first component of every frequency, before any second
    heads, score = mha2mla(layer, covariance_of(x))
    assert torch.equal(heads.mixing[0], torch.eye(2, dtype=heads.mixing.dtype))
    best = score.argmax(0)
    q, k = layer.q_proj(x).unflatten(-1, (4, DIM)), layer.k_proj(x).unflatten(-1, (2, DIM))
    norms = [(t[..., : DIM // 2] ** 2 + t[..., DIM // 2 :] ** 2).mean((0, 1)) for t in (q, k)]
    product = norms[0].unflatten(0, (2, 2)).sum(1) * norms[1]
    assert torch.equal(best, product.argmax(1))
