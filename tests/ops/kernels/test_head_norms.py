"""Norms of heads in compiled code, against float64."""

import ctypes

import pytest
import torch

pytest.importorskip("numba")

from regard.ops.kernels import head_norms
from regard.ops.kernels.chaining import Norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_each_head_is_normed(dtype, shift):
    width, eps = 20, 1e-3
    heads = [torch.randn(rows, width).to(dtype) for rows in (6, 3)]
    weights = [torch.randn(width).to(dtype) for _ in range(2)]
    wide = [x.double() for x in heads]
    wanted = [
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.double() + shift)
        for x, weight in zip(wide, weights, strict=True)
    ]
    data = head_norms.record(
        ((x.data_ptr(), len(x), width), Norm(weight, eps, shift))
        for x, weight in zip(heads, weights, strict=True)
    )
    address = head_norms.kernel(dtype is torch.bfloat16).address
    ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)(data)
    unit = torch.finfo(dtype).eps / 2 * (1 if dtype is torch.bfloat16 else 20)
    for x, expected in zip(heads, wanted, strict=True):
        assert ((x.double() - expected).abs() <= unit * 1.01 * expected.abs() + 1e-30).all()
