"""The specification of the kernel in NumPy: attention, whatever the tile and the ranges."""

import numpy as np
import pytest

from regard.ops.kernels.specification import Specification
from regard.ops.kernels.tiles import EXP2, FLOAT32, LOG2E, Tile, tile_for


def draw(rows, keys, width=32, values=16, heads=2, seed=0):
    numbers = np.random.default_rng(seed)
    sizes = ((heads, rows, width), (heads, keys, width), (heads, keys, values))
    return [numbers.standard_normal((1, *size)).astype(np.float32) for size in sizes]


def attention(q, k, v, bias, scale):
    """In float64: the output, and the log-sum-exp of the scores."""
    scores = scale * q.astype(float) @ k.astype(float).swapaxes(-1, -2)
    scores = scores + (0 if bias is None else bias)
    top = scores.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.nan_to_num(weights @ v.astype(float) / total)
        return out, (np.log(total) + top)[..., 0]


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (3, 17), (6, 300), (7, 1200)])
@pytest.mark.parametrize("fma", [True, False])
def test_it_is_attention(lanes, rows, keys, fma):
    q, k, v = draw(rows, keys)
    tile = tile_for(rows, 32, 16, False, False, False, lanes)
    out, lse = Specification(tile, fma).decode(q, k, v, None, 0.2, threads=2)
    wanted, sums = attention(q, k, v, None, 0.2)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, sums, rtol=0, atol=4e-6)


def test_hidden_keys_may_hold_anything_and_fully_masked_rows_are_zero():
    q, k, v = draw(3, 90)
    bias = np.random.default_rng(1).standard_normal((1, 2, 3, 90)).astype(np.float32)
    bias[..., 64:] = bias[:, 0, 1] = -np.inf
    wanted, sums = attention(q, k, v, bias, 0.2)
    k[:, :, 64:], v[:, :, 64:] = np.nan, np.inf  # a block that no row attends to is not read
    tile = tile_for(3, 32, 16, False, False, True, 8)
    assert tile.block in (32, 64)
    out, lse = Specification(tile).decode(q, k, v, bias, 0.2, threads=1)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-6)
    assert (out[0, 0, 1] == 0).all() and lse[0, 0, 1] == -np.inf
    np.testing.assert_allclose(np.delete(lse[0, 0], 1), np.delete(sums[0, 0], 1), atol=4e-6)


def test_ranges_change_the_order_of_sums_alone():
    q, k, v = draw(2, 3000)
    twin = Specification(tile_for(2, 32, 16, False, False, False, 8))
    one, many = (twin.decode(q, k, v, None, 0.2, threads)[0] for threads in (1, 16))
    assert twin.tile.ranges(3000, 2, 1) != twin.tile.ranges(3000, 2, 16)
    assert not np.array_equal(one, many)
    np.testing.assert_allclose(one, many, rtol=0, atol=1e-6)


def test_powers_of_two_are_right_to_a_rounding():
    twin = Specification(Tile(8, 1, 8, 8, 16, False, False, False, FLOAT32, FLOAT32))
    x = np.linspace(-60, 0, 10_001, dtype=np.float32)
    np.testing.assert_allclose(twin.exp2(x), np.exp2(x.astype(float)), rtol=4e-7)
    assert twin.exp2(np.float32([-1e38, -np.inf])).tolist() == [0.0, 0.0]
    assert EXP2[0] == 1.0 and np.float32(1 / np.log(2)) == LOG2E
