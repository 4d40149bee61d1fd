"""The kernel of a prefill's gradients: hidden keys and absent queries add nothing to any."""

import pytest
import torch

pytest.importorskip("numba")

from regard.ops.kernels.launching_gradients import prefill_gradients
from regard.ops.kernels.launching_prefill import prefill
from regard.ops.kernels.vectors import machine_lanes

pytestmark = pytest.mark.skipif(machine_lanes() < 8, reason="no AVX2")


def gradients(q, k, v, slope, starts, stops):
    options = {"scale": 0.3, "starts": starts, "stops": stops}
    out, lse = prefill(q, k, v, wide=True, **options)
    return prefill_gradients(slope, q, k, v, lse, (out * slope).sum(-1), **options)


def test_hidden_keys_are_not_read():
    """They may be as large as they like, in the same block as keys that are visible."""
    q, k, v, slope = (torch.randn(1, 2, n, 32) for n in (40, 150, 150, 40))
    starts, stops = torch.full((1, 40), 7).int(), torch.full((1, 40), 133).int()
    before = gradients(q, k, v, slope, starts, stops)
    hidden = torch.ones(150, dtype=torch.bool)
    hidden[7:133] = False
    k[:, :, hidden], v[:, :, hidden] = 1e18, -1e18
    after = gradients(q, k, v, slope, starts, stops)
    for one, other in zip(before, after, strict=True):
        assert one.equal(other)
    assert all(x[:, :, hidden].eq(0).all() for x in after[1:])


def test_memory_beyond_the_last_query_is_not_read():
    """37 queries are a block and five of a second, whose other rows lie in memory of NaN."""
    full = [torch.full((1, 2, 64, 32), torch.nan) for _ in range(2)]
    k, v = torch.randn(2, 1, 2, 50, 32)
    for x in full:
        x[:, :, :37] = torch.randn(1, 2, 37, 32)
    limits = torch.zeros(1, 37).int(), torch.full((1, 37), 50).int()
    inside = [x[:, :, :37] for x in full]
    found = gradients(inside[0], k, v, inside[1], *limits)
    wanted = gradients(inside[0].clone(), k, v, inside[1].clone(), *limits)
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        assert one.equal(other)
