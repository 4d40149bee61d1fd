"""Gradients are clipped as on one device, however their parameters lie on the ranks."""

import copy

import pytest
import torch
from torch import nn

from ranks import on_ranks
from regard import GroupedQueryAttention
from regard.distributed import clip_gradients, tensor_parallel


def model(num_kv_heads):
    torch.manual_seed(0)
    layer = GroupedQueryAttention(16, 4, num_kv_heads, qk_norm="head")
    return nn.Sequential(nn.Linear(16, 16), layer, nn.LayerNorm(16)).double()


def trained(module, x):
    module(x).square().sum().backward()
    return module


def _clipped(mesh, num_kv_heads, most):
    """Key heads on 4 ranks: of 4 each has one, of 2 two ranks have the same, on another mesh."""
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    one = trained(model(num_kv_heads), x)
    split = trained(tensor_parallel(copy.deepcopy(model(num_kv_heads)), mesh), x)
    expected = nn.utils.clip_grad_norm_(one.parameters(), most)
    torch.testing.assert_close(clip_gradients(split, most), expected)
    torch.testing.assert_close(split[0].weight.grad, one[0].weight.grad)
    whole = split[1].o_proj.weight.grad.full_tensor()
    torch.testing.assert_close(whole, one[1].o_proj.weight.grad)
    groups = [split[1].parameters(), [*split[0].parameters(), *split[2].parameters()]]
    for group in map(list, groups):  # as foreach and fused optimizers need them
        torch.optim.AdamW(group, foreach=True).step()


@pytest.mark.parametrize("most", [0.5, 1e9])
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_as_on_one_device(num_kv_heads, most):
    on_ranks(2, _clipped, num_kv_heads, most)


@pytest.mark.parametrize("most", [0.5])
def test_with_several_meshes(most):
    on_ranks(4, _several, most)


def _several(mesh, most):
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    one = trained(model(2), x)
    split = trained(tensor_parallel(copy.deepcopy(model(2)), mesh), x)
    expected = nn.utils.clip_grad_norm_(one.parameters(), most)
    torch.testing.assert_close(clip_gradients(split, most), expected)


def test_without_gradients_and_without_a_limit():
    assert clip_gradients(nn.Linear(2, 2), 1.0) == 0
    with pytest.raises(ValueError, match=r"max_norm is above 0, got 0\.0"):
        clip_gradients(nn.Linear(2, 2), 0.0)
