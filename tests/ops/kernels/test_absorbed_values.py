"""The products of sums of latents with the weights of the values, in any number of threads."""

import pytest
import torch

pytest.importorskip("numba")

import numpy as np

from regard.ops.kernels import absorbed_values
from regard.ops.kernels.threads import launch

HEADS, KV_HEADS, WIDTH = 6, 2, 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "apart", "threads"), [(1, 4, 1), (19, 32, 2), (64, 64, 7)])
def test_outputs_are_the_products_of_each_head(dtype, rank, apart, threads):
    batch, counter = 2, np.zeros(1, np.int64)
    sums, out = torch.randn(batch, HEADS, apart), torch.zeros(batch, HEADS, WIDTH)
    weights = torch.randn(KV_HEADS, WIDTH, rank).to(dtype)
    record = absorbed_values.PACKED.pack(
        batch * HEADS, KV_HEADS, HEADS // KV_HEADS, rank, apart, WIDTH, sums.data_ptr(),
        weights.data_ptr(), out.data_ptr(), counter.ctypes.data,
    )  # fmt: skip
    launch(int(absorbed_values.kernel(dtype is torch.bfloat16).address), record, threads)
    rows = sums[..., :rank].double().unflatten(1, (KV_HEADS, -1))
    terms = rows.unsqueeze(-2) * weights.double().unsqueeze(1)
    wanted, unit = terms.sum(-1).flatten(1, 2), torch.finfo(torch.float32).eps / 2
    bound = (rank + 1) * unit * terms.abs().sum(-1).flatten(1, 2)  # of sums in any order
    assert ((out - wanted).abs() <= bound).all()
