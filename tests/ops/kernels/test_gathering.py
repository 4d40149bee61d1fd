"""The weighted sums of values and of codes against NumPy, with vectors of any length."""

import numpy as np
import pytest

pytest.importorskip("numba")

from kernel_checks import has_fma
from kernel_parts import coded, held, random, run, stored, tile_of
from regard.ops.kernels import gathering
from regard.ops.kernels.specification import Specification
from regard.ops.kernels.tiles import Format

LANES = pytest.mark.parametrize("lanes", [16, 8, 4])


@LANES
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("requested", ["nothing", "the next keys", "far values"])
def test_add_weighted_sums_a_strip_key_after_key(lanes, half, requested):
    tile = tile_of(lanes, half=half)
    keys, values = stored(tile, random(7, tile.value_width))
    weights, sums = random(tile.rows, tile.block), random(tile.rows, tile.value_width)
    wanted = sums.copy()
    for weight, value in zip(weights.T, held(tile, values)[:5], strict=False):
        wanted = Specification(tile, has_fma()).add_product(weight[:, None], value, wanted)
    assert tile.strip == tile.value_width
    given = tile, 5, weights, keys, keys.strides[0], sums
    if requested == "nothing":
        run(gathering.add_weighted, *given)
    else:
        far = keys if requested == "far values" else 0
        run(gathering.add_weighted_and_prefetch, *given, keys, keys.strides[0], far)
    np.testing.assert_array_equal(sums, wanted)


@LANES
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("bits", [8, 6, 4])
def test_add_weighted_codes_sums_what_they_stand_for(lanes, bits, far):
    form = Format(bits, 16)
    tile = tile_of(lanes)._replace(value_width=96, v=form, direct=True)
    codes, scales, values = coded(tile, form, 96, 7)
    weights, sums = random(tile.rows, tile.block), random(tile.rows, 96)
    wanted = sums.copy()
    for weight, value in zip(weights.T, values[:5], strict=False):
        wanted = Specification(tile, has_fma()).add_product(weight[:, None], value, wanted)
    given = weights, codes, codes.strides[0], scales, scales.strides[0], sums
    run(gathering.add_weighted_codes, tile, 5, *given, codes, codes.strides[0], codes if far else 0)
    np.testing.assert_array_equal(sums, wanted)
