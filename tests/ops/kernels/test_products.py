"""Products of packed blocks against float64, by both instructions."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from regard.ops.kernels.launching_prefill import _palette, products
from regard.ops.kernels.panels import SIDE, Panel
from regard.ops.kernels.products import add_product, begin_tiles, end_tiles, product

pytestmark = pytest.mark.skipif(products() is None, reason="no instructions for bfloat16")


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("amx", [False, True] if products() == "amx" else [False])
def test_a_product_and_its_sum(amx, steps):
    import numba

    panel = Panel(32, 32, amx, False)

    @numba.njit
    def run(a, b, c, d, palette, kept):
        begin_tiles(panel, palette, kept)
        product(panel, steps, a, 2048, b, c)
        add_product(panel, steps, a, 2048, b, d)
        end_tiles(panel, kept)

    a, b = torch.randn(SIDE, SIDE * steps).bfloat16(), torch.randn(SIDE * steps, SIDE).bfloat16()
    packed_a = a.unflatten(1, (steps, SIDE)).transpose(0, 1).contiguous()
    packed_b = b.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()
    c, kept = torch.full((SIDE, SIDE), 9.0), np.zeros(64, np.uint8)
    d = torch.randn(SIDE, SIDE)
    wanted = a.double() @ b.double()
    summed = wanted + d
    run(packed_a.data_ptr(), packed_b.data_ptr(), c.data_ptr(), d.data_ptr(),
        _palette().ctypes.data, kept.ctypes.data)  # fmt: skip
    torch.testing.assert_close(c.double(), wanted, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(d.double(), summed, rtol=1e-6, atol=1e-5)
