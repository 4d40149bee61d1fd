"""Each intrinsic of the kernel against NumPy, with vectors of 16, 8 and 4 lanes on any machine."""

import numpy as np
import pytest

pytest.importorskip("numba")

import numba

from kernel_checks import has_fma
from kernel_parts import coded, held, random, run, stored, tile_of
from regard.ops.kernels import intrinsics
from regard.ops.kernels.specification import Specification
from regard.ops.kernels.tiles import HIDDEN, LOG2E, Format

LANES = pytest.mark.parametrize("lanes", [16, 8, 4])
HALF = pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])


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
    run(intrinsics.dot_products, tile, placed, keys, keys.strides[0], 0, 0, 4, last, scores)
    wanted = Specification(tile, has_fma()).score(queries, values)
    chosen = np.minimum(np.arange(4, 4 + tile.keys), last)  # keys after the last are the last
    np.testing.assert_array_equal(scores[:, 4 : 4 + tile.keys], wanted[:, chosen])
    np.testing.assert_array_equal(scores[:, :4], before[:, :4])
    np.testing.assert_array_equal(scores[:, 4 + tile.keys :], before[:, 4 + tile.keys :])


def test_prefetch_value_changes_nothing():
    tile, value = tile_of(16), random(48)
    before = value.copy()
    run(intrinsics.prefetch_value, tile, value, 1, 8)
    run(intrinsics.prefetch_value, tile, 0, 1, 8)  # an address without memory is no error
    np.testing.assert_array_equal(value, before)


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_rows_of_equal_parts_come_in_turns(streams):
    @intrinsics.emits(numba.types.int64)
    def in_turns(e, tile, j):
        return e.in_turns(j, tile.block, tile.streams)

    tile = tile_of(16, streams=streams)
    found = [run(in_turns, tile, j) for j in range(tile.block)]
    assert found == [*np.arange(tile.block).reshape(streams, -1).T.flat]


def test_prefetch_far_changes_nothing():
    tile, keys = tile_of(16), random(48)
    before = keys.copy()
    run(intrinsics.prefetch_far, tile, keys, 1, 8)
    run(intrinsics.prefetch_far, tile, 1 << 62, 1, 8)  # an address without memory is no error
    np.testing.assert_array_equal(keys, before)


@LANES
@pytest.mark.parametrize("bits", [8, 6, 4])
def test_dot_products_of_codes_are_those_of_what_they_stand_for(lanes, bits):
    form = Format(bits, 16)
    tile = tile_of(lanes)._replace(width=48, k=form, direct=True)
    codes, scales, values = coded(tile, form, 48, 11)
    queries, scores = random(tile.rows, 48), random(tile.rows, tile.block)
    given = codes, codes.strides[0], scales, scales.strides[0], 4, 10
    run(intrinsics.dot_products, tile, queries, *given, scores)
    wanted = Specification(tile, has_fma()).score(queries, values)[:, np.minimum(range(4, 20), 10)]
    np.testing.assert_array_equal(scores[:, 4 : 4 + tile.keys], wanted[:, : tile.keys])


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_prefetch_scales_changes_nothing(bits):
    form = Format(bits, 16)
    tile = tile_of(16, k=form, v=form)
    for address in (0, 1 << 62):  # without memory, which is no error
        run(intrinsics.prefetch_scales, tile, address, 12, address, 12)


@pytest.mark.parametrize("biased", [False, True])
def test_visible_keys_end_with_the_last_bias_that_is_not_minus_infinity(biased):
    tile, bias = tile_of(16, biased=biased), np.full(9, HIDDEN)
    bias[2], bias[7] = 0, np.nan
    found = [run(intrinsics.visible_keys, tile, count, bias) for count in (0, 2, 3, 7, 8, 9)]
    assert found == ([0, 0, 3, 3, 8, 8] if biased else [0, 2, 3, 7, 8, 9])


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
def test_load_query_in_bfloat16_keeps_the_order_of_memory_for_codes(lanes):
    tile, target = tile_of(lanes, half=True)._replace(k=Format(8, 64)), random(3 * lanes)
    source, values = stored(tile, random(3 * lanes))
    run(intrinsics.load_query, tile, source, target, np.float32(0.3))
    np.testing.assert_array_equal(target, values * np.float32(0.3))


@LANES
@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize(("group", "width"), [(2, 48), (6, 64), (16, 48), (32, 64), (64, 48)])
def test_dequantize_keys_and_dequantize_values_give_what_codes_stand_for(lanes, bits, group, width):
    form, values = Format(bits, group), random(9, width)
    tile = tile_of(lanes)._replace(width=width, value_width=width, k=form, v=form)
    codes, scales, wanted = coded(tile, form, width, 7)
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


def test_numbers_reads_at_an_address():
    @numba.njit
    def call(address):
        return intrinsics.numbers(address)[2]

    assert call(np.array([3, 4, -(2**40)]).ctypes.data) == -(2**40)


def test_halves_reads_the_words_at_an_address():
    @numba.njit
    def call(address):
        return intrinsics.halves(address)[2]

    x = np.array([3, 4, -5], np.int16)
    assert call(x.ctypes.data) == -5


def test_octets_reads_the_bytes_at_an_address():
    @numba.njit
    def call(address):
        return intrinsics.octets(address)[2]

    assert call(np.array([3, 4, 250], np.uint8).ctypes.data) == 250


def test_fused_rounds_once():
    @numba.njit
    def call(a, b, c):
        return intrinsics.fused(a, b, c)

    a = np.float32(1 + 2**-12)
    assert call(a, a, np.float32(-1)) == np.float32(2**-11 + 2**-24)  # a * a alone would be rounded


def test_every_intrinsic_has_its_test():
    found = {name for name, x in vars(intrinsics).items() if type(x).__name__ == "_Intrinsic"}
    tested = " ".join(name for name in globals() if name.startswith("test_"))
    assert len(found) == 22
    assert all(name in tested for name in found)
