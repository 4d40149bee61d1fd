"""The shares of pages in machine code, against their definition in float64."""

import pytest
import torch

pytest.importorskip("numba")

from regard.ops.kernels.vectors import machine_lanes
from regard.sparse.bounds import Bounds
from regard.sparse.bounds_kernel import highest


def _drawn(batch, heads, kv_heads, pages, width):
    """A query, and bounds inside a tensor of more pages, as a step has them."""
    torch.manual_seed(pages + width)
    bounds = torch.randn(2, batch, kv_heads, pages + 3, width).bfloat16()
    return torch.randn(batch, heads, 1, width).bfloat16(), Bounds(bounds[0], bounds[1].abs())


def _shares(q, bounds):
    """By the definition, in float64."""
    mean, spread = (x.double() for x in bounds)
    rows = q.double().unflatten(1, (mean.shape[1], -1)).squeeze(3)
    bound = rows @ mean.mT + (rows.square() @ spread.mT).sqrt()
    return (bound - bound.logsumexp(-1, keepdim=True)).amax(2)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "pages", "width"),
    [(2, 6, 3, 7, 64), (1, 8, 1, 131, 96), (3, 9, 3, 40, 32), (1, 4, 4, 1, 16), (2, 7, 1, 65, 256)],
)
def test_shares_are_those_of_the_definition(batch, heads, kv_heads, pages, width, threads):
    q, all_bounds = _drawn(batch, heads, kv_heads, pages, width)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for first in (0, 1, 3):
            bounds = all_bounds.between(first, first + pages)
            found = highest(q, *bounds)
            assert found.shape == (batch, kv_heads, pages)
            assert (found - _shares(q, bounds)).abs().max() < 1e-4
    finally:
        torch.set_num_threads(before)


def test_narrow_heads_and_no_pages_are_left_to_torch():
    q, bounds = _drawn(1, 2, 1, 5, 6)
    assert highest(q, *bounds) is None
    assert (bounds.highest(q) - _shares(q, bounds)).abs().max() < 1e-4
    q, bounds = _drawn(1, 2, 1, 5, 16)
    assert highest(q, *bounds.between(0, 0)) is None
    assert highest(q.float(), *bounds) is None
    assert bounds.between(0, 0).highest(q).shape == (1, 1, 0)


def test_great_and_small_scores():
    """Powers of no score leave the range of float32; a page far below others keeps its order."""
    width = 2 * machine_lanes()
    q, bounds = _drawn(1, 2, 1, 50, width)
    mean = bounds.mean * torch.linspace(1, 200, bounds.mean.shape[2])[:, None].bfloat16()
    bounds = Bounds(mean, bounds.spread)
    found, wanted = highest(q, *bounds), _shares(q, bounds)
    assert wanted.min() < -200
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
