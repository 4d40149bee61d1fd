"""`Bounds`: what the products of a query with the keys of a page hardly exceed."""

import pytest
import torch

from regard.sparse import bounds
from regard.sparse.bounds import Bounds

PAGES, WIDTH = 40, 64


@pytest.mark.parametrize("size", [16, 64, 256])
def test_of_normal_keys_a_bound_is_just_above_the_greatest_product(size):
    torch.manual_seed(0)
    keys = torch.randn(1, 1, PAGES * size, WIDTH) * torch.rand(WIDTH) + torch.randn(WIDTH)
    q = torch.randn(1, 1, 1, WIDTH) / WIDTH**0.5
    found = Bounds.of(keys, size)
    mean, spread = (x[0, 0].float() for x in found)
    highest = q[0, 0] @ mean.T + (q[0, 0].square() @ spread.T).sqrt()
    products = (keys[0, 0] @ q[0, 0, 0]).view(PAGES, size)
    above = (highest[0] - products.amax(1)).mean() / products.std()
    assert 0 < above < 0.8
    assert (found.highest(q)[0, 0] - highest.log_softmax(-1)[0]).abs().max() < 0.05  # q is rounded


@pytest.mark.parametrize("with_numba", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_no_bound(dtype, with_numba, monkeypatch):
    monkeypatch.setattr(bounds, "has_numba", lambda: with_numba)
    torch.manual_seed(3)
    keys, q = 1e2 * torch.randn(1, 1, PAGES * 8, WIDTH), 1e2 * torch.randn(1, 1, 1, WIDTH)
    found = Bounds.of(keys, 8)
    with torch.autocast("cpu", dtype):
        rounded = found.highest(q)
    assert torch.equal(rounded, found.highest(q))


def test_one_page_along_the_query_comes_before_pages_of_great_numbers_in_all_directions():
    """A sum of the greatest products of each channel is nearly twice as high in the other pages."""
    torch.manual_seed(1)
    size, q = 64, torch.ones(1, 1, 1, WIDTH)
    keys = torch.randn(1, 1, PAGES, size, WIDTH)
    keys[:, :, 7] = 1 + 0.1 * keys[:, :, 7]
    assert keys.amax(3).sum(-1).argmin() == 7 and keys.sum(-1).amax(3).argmax() == 7
    assert Bounds.of(keys.flatten(2, 3), size).highest(q).argmax() == 7


def test_by_the_head_of_a_group_for_which_a_page_has_the_greatest_share():
    torch.manual_seed(2)
    keys, q = torch.randn(2, 3, PAGES * 8, WIDTH), torch.randn(2, 6, 1, WIDTH)
    found, alone = Bounds.of(keys, 8).highest(q), []
    for head in range(6):
        own = Bounds.of(keys[:, head // 2 : head // 2 + 1], 8)
        alone.append(own.highest(q[:, head : head + 1])[:, 0])
    wanted = torch.stack(alone, 1).unflatten(1, (3, 2)).amax(2)
    assert (found - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_bounds_have_two_bytes_a_channel_and_are_finite(dtype):
    great = 3e4 if dtype is torch.float16 else 3e30
    keys = torch.tensor([-great, great], dtype=dtype).repeat(8)[None, None, :, None]
    found = Bounds.of(keys.expand(1, 1, 16, 4), 16)
    assert found.mean.dtype is found.spread.dtype is torch.bfloat16
    assert found.highest(torch.ones(1, 1, 1, 4, dtype=dtype)).isfinite().all()


def test_keys_of_pages_of_one_token_are_their_own_means():
    keys = torch.randn(1, 2, 5, 8)
    found = Bounds.of(keys, 1)
    assert torch.equal(found.mean, keys.bfloat16()) and not found.spread.any()
