"""Each intrinsic of the kernel against NumPy, with vectors of 16, 8 and 4 lanes on any machine."""

import numpy as np
import pytest

pytest.importorskip("numba")

import numba

from kernel_checks import as_bfloat16, has_fma, widened
from regard.ops.kernels import intrinsics
from regard.ops.kernels.specification import Specification
from regard.ops.kernels.tiles import BFLOAT16, FLOAT32, HIDDEN, LOG2E, Format, Tile

LANES = pytest.mark.parametrize("lanes", [16, 8, 4])
HALF = pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])


def tile_of(lanes, **changes):
    """A tile whose rows are three vectors: a step of two, and one more."""
    form = BFLOAT16 if changes.get("half") else FLOAT32
    sizes = lanes, 2, 3 * lanes, 3 * lanes, 32
    plain = Tile(*sizes, half=False, joined=False, biased=True, k=form, v=form)
    return plain._replace(**changes)


def run(intrinsic, tile, *arguments):
    """An intrinsic called from compiled code; arrays are passed as their addresses."""

    @numba.njit
    def call(*values):
        return intrinsic(tile, *values)

    return call(*(x.ctypes.data if isinstance(x, np.ndarray) else x for x in arguments))


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def held(tile, x):
    """Rows in the order in which the kernel holds them."""
    steps = Specification(tile).columns(x.shape[-1])
    return np.concatenate([x[..., step] for step in steps], -1)


def stored(tile, x):
    """Rows as memory holds them, and their values in float32."""
    return (as_bfloat16(x), widened(as_bfloat16(x))) if tile.half else (x, x)


@LANES
@HALF
def test_load_query_scales_and_widens(lanes, half):
    tile, target = tile_of(lanes, half=half), random(3 * lanes)
    source, values = stored(tile, random(3 * lanes))
    run(intrinsics.load_query, tile, source, target, np.float32(0.3))
    np.testing.assert_array_equal(target, held(tile, values * np.float32(0.3)))


@LANES
@HALF
def test_dot_products_are_those_of_the_specification(lanes, half):
    tile = tile_of(lanes, half=half)
    keys, values = stored(tile, random(11, tile.width))
    queries, scores = random(tile.rows, tile.width), random(tile.rows, tile.block)
    before, last = scores.copy(), 5
    placed = held(tile, queries)
    run(intrinsics.dot_products, tile, placed, keys, keys.strides[0], 4, last, scores)
    wanted = Specification(tile, has_fma()).score(queries, values)
    chosen = np.minimum(np.arange(4, 4 + tile.keys), last)  # keys after the last are the last
    np.testing.assert_array_equal(scores[:, 4 : 4 + tile.keys], wanted[:, chosen])
    np.testing.assert_array_equal(scores[:, :4], before[:, :4])
    np.testing.assert_array_equal(scores[:, 4 + tile.keys :], before[:, 4 + tile.keys :])


def test_prefetch_value_changes_nothing():
    tile, value = tile_of(16), random(48)
    before = value.copy()
    run(intrinsics.prefetch_value, tile, value)
    run(intrinsics.prefetch_value, tile, 0)  # an address without memory is no error
    np.testing.assert_array_equal(value, before)


@pytest.mark.parametrize("biased", [False, True])
def test_any_visible_is_false_where_all_biases_are_minus_infinity(biased):
    tile, bias = tile_of(16, biased=biased), np.full(9, HIDDEN)
    bias[7] = np.nan
    found = [run(intrinsics.any_visible, tile, count, bias) for count in (7, 8)]
    assert found == [not biased, True]


@pytest.mark.parametrize("biased", [False, True])
def test_add_bias_adds_in_powers_of_two(biased):
    tile, bias, scores = tile_of(16, biased=biased), random(32), random(1, 32)[0]
    wanted = scores + bias * LOG2E if biased else scores.copy()
    wanted[9:] = scores[9:]
    run(intrinsics.add_bias, tile, 9, bias, scores)
    np.testing.assert_array_equal(scores, wanted)


def test_hide_from_hides_the_rest_of_a_block():
    scores = random(40)
    wanted = scores.copy()
    wanted[9:32] = HIDDEN
    run(intrinsics.hide_from, tile_of(16), 9, scores)
    np.testing.assert_array_equal(scores, wanted)


@LANES
def test_maximum(lanes):
    tile, scores = tile_of(lanes), random(32)
    for least in (np.float32(-9), np.float32(9)):
        assert run(intrinsics.maximum, tile, scores, least) == max(least, scores.max())


@LANES
def test_exponentials_and_their_sum(lanes):
    tile, scores = tile_of(lanes), 9 * random(32)
    scores[3] = HIDDEN
    top, exact = scores.max(), np.exp2((scores - scores.max()).astype(float))
    twin = Specification(tile, has_fma())
    weights = twin.exp2(scores - top)
    total = run(intrinsics.exponentials, tile, scores, top)
    np.testing.assert_array_equal(scores, weights)
    np.testing.assert_allclose(scores, exact, rtol=2e-7)
    assert scores[3] == 0
    assert total == twin.sum_of_lanes(weights.reshape(-1, lanes).cumsum(0, np.float32)[-1])


def test_exp2_of_one_number():
    for x in (0.0, -0.5, -1.0, -3.3, -126.0, -127.5, -1e38, -np.inf):
        found = run(intrinsics.exp2, tile_of(16), np.float32(x))
        np.testing.assert_allclose(found, np.exp2(x) if x > -127 else 0.0, rtol=2e-7)


@LANES
def test_scale_sums_scales_one_row(lanes):
    sums = random(4 * lanes)
    wanted = sums * np.where(np.arange(4 * lanes) < 3 * lanes, np.float32(0.3), np.float32(1))
    run(intrinsics.scale_sums, tile_of(lanes), sums, np.float32(0.3))
    np.testing.assert_array_equal(sums, wanted)


@LANES
@HALF
@pytest.mark.parametrize("prefetching", [False, True])
def test_add_weighted_sums_a_strip_key_after_key(lanes, half, prefetching):
    tile = tile_of(lanes, half=half)
    keys, values = stored(tile, random(7, tile.value_width))
    weights, sums = random(tile.rows, tile.block), random(tile.rows, tile.value_width)
    wanted = sums.copy()
    for weight, value in zip(weights.T, held(tile, values)[:5], strict=False):
        wanted = Specification(tile, has_fma()).add_product(weight[:, None], value, wanted)
    assert tile.strip == tile.value_width
    given = tile, 5, weights, keys, keys.strides[0], sums
    if prefetching:
        run(intrinsics.add_weighted_and_prefetch, *given, keys, keys.strides[0])
    else:
        run(intrinsics.add_weighted, *given)
    np.testing.assert_array_equal(sums, wanted)


@LANES
def test_load_query_in_bfloat16_keeps_the_order_of_memory_for_codes(lanes):
    tile, target = tile_of(lanes, half=True)._replace(k=Format(8, 64)), random(3 * lanes)
    source, values = stored(tile, random(3 * lanes))
    run(intrinsics.load_query, tile, source, target, np.float32(0.3))
    np.testing.assert_array_equal(target, values * np.float32(0.3))


@LANES
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("group", "width"), [(2, 48), (6, 64), (16, 48), (32, 64), (64, 48)])
def test_dequantize_keys_and_dequantize_values_give_what_codes_stand_for(lanes, bits, group, width):
    form = Format(bits, group)
    tile = tile_of(lanes)._replace(width=width, value_width=width, k=form, v=form)
    codes = np.random.default_rng(0).integers(0, 256, (7, form.bytes(width)), np.uint8)
    scales, values = as_bfloat16(random(7, 2 * -(-width // group))), random(9, width)
    wanted = Specification(tile, has_fma()).dequantized(codes, widened(scales), form, width)
    given = codes, codes.strides[0], scales, scales.strides[0]
    for intrinsic in (intrinsics.dequantize_keys, intrinsics.dequantize_values):
        found = values.copy()
        run(intrinsic, tile, 5, *given, found)
        np.testing.assert_array_equal(found[:5], wanted[:5])
        np.testing.assert_array_equal(found[5:], values[5:])


@LANES
def test_add_share_rounds_each_product(lanes):
    sums, merged = random(2, 3 * lanes)
    wanted = np.float32(0.3) * sums + merged
    run(intrinsics.add_share, tile_of(lanes), sums, np.float32(0.3), merged)
    np.testing.assert_array_equal(merged, wanted)


@LANES
@HALF
def test_store_row_restores_the_order_of_memory(lanes, half):
    tile, row, target = tile_of(lanes, half=half), random(3 * lanes), random(3 * lanes)
    run(intrinsics.store_row, tile, held(tile, row), target)
    np.testing.assert_array_equal(target, row)


def test_next_number_counts():
    @numba.njit
    def call(address):
        return intrinsics.next_number(address)

    counter = np.array([5])
    assert [call(counter.ctypes.data) for _ in range(3)] == [5, 6, 7]
    assert counter[0] == 8


def test_floats_reads_at_an_address():
    @numba.njit
    def call(address):
        return intrinsics.floats(address)[2]

    x = random(3)
    assert call(x.ctypes.data) == x[2]


def test_halves_reads_the_words_at_an_address():
    @numba.njit
    def call(address):
        return intrinsics.halves(address)[2]

    x = np.array([3, 4, -5], np.int16)
    assert call(x.ctypes.data) == -5


def test_fused_rounds_once():
    @numba.njit
    def call(a, b, c):
        return intrinsics.fused(a, b, c)

    a = np.float32(1 + 2**-12)
    assert call(a, a, np.float32(-1)) == np.float32(2**-11 + 2**-24)  # a * a alone would be rounded


def test_every_intrinsic_has_its_test():
    found = {name for name, x in vars(intrinsics).items() if type(x).__name__ == "_Intrinsic"}
    tested = " ".join(name for name in globals() if name.startswith("test_"))
    assert len(found) == 20
    found = {name.removesuffix("_and_prefetch") for name in found}
    assert all(name in tested for name in found)
