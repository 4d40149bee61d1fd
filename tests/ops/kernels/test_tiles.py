"""Tiles: their loops divide every call; arguments are packed as a kernel reads them."""

import itertools
import struct

from regard.ops.kernels.decoding import is_far
from regard.ops.kernels.tiles import (
    BLOCK_BYTES,
    FAR,
    KEYS_A_TASK,
    LINE,
    PACKED,
    RECORD,
    Decode,
    Format,
    tile_for,
)

WIDTHS = [(16, 16), (64, 64), (80, 48), (192, 128), (576, 512)]
TILES = [
    tile_for(rows, *widths, half, False, False, lanes)
    for rows, widths, half, lanes in itertools.product(
        (1, 3, 6, 7, 40), WIDTHS, (False, True), (4, 8, 16)
    )
    if widths[0] % lanes == 0 and widths[1] % lanes == 0
]


def divides(tile):
    """Whether each loop of the kernel over the tile ends at the end of its data."""
    registers = max(tile.registers * tile.lanes, tile.rows * tile.value_width)
    return (
        tile.value_width % tile.strip == 0
        and tile.strip % tile.lanes == 0
        and tile.rows * tile.strip <= registers
        and tile.block % tile.keys == 0
        and tile.prefetch_bytes % LINE == 0
        and tile.prefetch_bytes * tile.prefetches >= tile.k.bytes(tile.width)
        and tile.request_bytes * tile.requests >= tile.v.bytes(tile.value_width)
        and tile.part_bytes % (4 * tile.lanes) == 0
    )


def test_strips_and_vectors_divide_the_widths():
    assert [tile for tile in TILES if not divides(tile)] == []


def test_a_tile_pads_as_little_as_it_can():
    faults = []
    for rows in range(1, 20):
        tile = tile_for(rows, 64, 64, False, False, False, 16)
        padded = tile.padded(rows)
        least = min(-(-rows // r) * r for r in range(1, 7))
        if padded % tile.rows or not rows <= padded < rows + tile.rows or padded != least:
            faults.append((rows, padded, tile))
    assert faults == []


def test_a_block_of_keys_is_long_enough_to_pay():
    for width, half in itertools.product((16, 64, 576), (False, True)):
        tile = tile_for(1, width, width, half, False, False, 16)
        assert tile.block == 64 or tile.block * width * tile.item >= BLOCK_BYTES


def test_streams_have_longer_blocks_of_keys_that_are_no_codes_and_request_nothing_far():
    codes, latents = Format(8, 64), Format(32, rank=48)
    for half, k, several in (
        (False, None, 4),
        (True, None, 4),
        (True, codes, 1),
        (False, latents, 1),
    ):
        given = 4, 128, 128, half, False, False, 16, k, codes if k is codes else None
        one, four = tile_for(*given), tile_for(*given, streams=4)
        assert four.streams == several
        least = several * BLOCK_BYTES
        assert four.block * four.k.bytes(128) >= least or four.block == 64
        assert (four.block > one.block) == (several == 4)
        assert four.requests_all == (one.requests_all and several == 1)


def test_codes_of_four_query_heads_are_converted_once_for_all_of_them():
    for lanes, bits in itertools.product((8, 16), (4, 6, 8)):
        form = Format(bits, 64)
        tile = tile_for(4, 128, 128, False, False, False, lanes, form, form)
        assert (tile.rows, tile.k_direct, tile.v_direct) == (4, True, True)
        assert tile.rows * tile.keys <= tile.registers


def test_float32_is_requested_far_ahead_and_of_other_pages_those_that_are_not_in_order():
    codes, apart = Format(8, 64), FAR + 1  # blocks from the next one to that at the distance
    for half, k, v, page, in_order, scattered in (
        (False, None, None, 0, True, True),
        (False, None, None, 64, True, True),
        (True, None, None, 0, False, False),
        (True, None, None, 64, False, True),
        (False, codes, codes, 0, False, False),
        (False, None, codes, 0, False, False),
        (False, codes, codes, 64, False, True),
    ):
        tile = tile_for(4, 64, 64, half, False, False, 16, k, v, page)
        found = [is_far.py_func(tile, 640, 640 + n * tile.block) for n in (FAR, apart, -apart)]
        assert found == [in_order, scattered, scattered], (half, k, v, page)
    latents = Format(32, rank=48)  # keys are products with them: these take the time
    tile = tile_for(4, 64, 64, False, False, False, 16, latents, None)
    assert not is_far.py_func(tile, 640, 640 + FAR * tile.block)


def test_ranges_hold_every_key_once():
    tile, faults = tile_for(1, 64, 64, False, False, False, 16), []
    for keys, heads, threads in itertools.product((1, 255, 4096, 5001), (1, 8, 64), (1, 2, 16)):
        ranges, length = tile.ranges(keys, heads, threads)
        once = (ranges - 1) * length < keys <= ranges * length
        if not once or (ranges > 1 and (length % tile.block or keys / ranges < KEYS_A_TASK / 2)):
            faults.append((keys, heads, threads, ranges, length))
    assert faults == []


def test_arguments_are_packed_as_the_kernel_reads_them():
    numbers = [*range(1, len(Decode._fields)), 0.5]
    packed = PACKED.pack(*numbers)
    assert len(packed) == RECORD.itemsize
    for name, number in zip(Decode._fields, numbers, strict=True):
        kind, offset = RECORD.fields[name][:2]
        code = "f" if kind.kind == "f" else "q"
        assert struct.unpack_from(code, packed, offset) == (number,)
