"""The decoding kernel against float64 and its specification: tiles, strides, biases, merging.

A kernel takes seconds to compile: tests to which the tile does not matter have three rows of 32.
"""

import itertools
import platform
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("numba")

from covering import few
from kernel_checks import check, check_specification, quantized, run_python
from regard.ops.kernels.launching import decode
from regard.ops.kernels.tiles import KeyPages, tile_for
from regard.ops.kernels.vectors import machine_lanes
from session import LONG


class Kind(NamedTuple):
    """What the shape of a kernel depends on; its rows are those of a tile, not of a call."""

    lanes: int
    rows: int
    width: int
    values: int
    joined: bool
    half: bool
    biased: bool

    def check(self):
        """The kernel against float64 and its specification: several tiles, and blocks of keys."""
        torch.manual_seed(0)
        dtype = torch.bfloat16 if self.half else torch.float32
        count = {1: 7, 2: 14, 3: 9}.get(self.rows, 2 * self.rows)
        given = count, self.width, self.values, self.half, self.joined, self.biased
        assert tile_for(*given, self.lanes).rows == self.rows
        q, k = torch.randn(1, 2, count, self.width), torch.randn(1, 2, 517, self.width)
        v = k[..., : self.values] if self.joined else torch.randn(1, 2, 517, self.values)
        bias = None
        if self.biased:
            bias = torch.randn(1, 2, count, 517)
            bias = bias.masked_fill(torch.rand(bias.shape) < 0.3, -torch.inf)
            bias[0, 0, 0] = bias[..., 64:160] = -torch.inf
        given = q.to(dtype), k.to(dtype), v.to(dtype), bias, self.joined, self.lanes
        check(*given)
        check_specification(*given)

    def paths(self):
        """What decides which code is emitted: pairs of choices, each to be covered once."""
        step = 2 * self.lanes
        tile = tile_for(self.rows, *self[2:4], self.half, self.joined, self.biased, self.lanes)
        strips = tile.value_width // tile.strip
        yield "rows", self.lanes, self.rows
        yield "rows of the dtype", self.half, self.rows
        yield "read", self.lanes, self.half, self.joined
        yield "added", self.biased, self.half, self.joined
        yield "keys", self.half, self.width % step > 0, min(self.width // step, 5)
        yield "values", self.half, self.values % step > 0, min(strips, 3), self.joined
        yield "block", tile.block


ROWS = {16: range(1, 7), 8: (1, 2, 4), 4: range(1, 7)}
WIDTHS = [  # keys, values, joined: one vector, odd numbers of vectors, long loops, narrower values
    (16, 16, False), (64, 64, False), (96, 64, True), (80, 80, False), (192, 128, False),
    (32, 32, True), (48, 48, False), (128, 128, False), (96, 32, True), (256, 256, False),
    (48, 16, True), (64, 16, False), (112, 112, False), (576, 512, True), (48, 32, False),
    (96, 96, False), (256, 64, False),
]  # fmt: skip
EVERY = [  # every three of rows, widths, dtype and bias: the fourth follows from them
    Kind(lanes, rows, *widths, half, (rows + at + half) % 2 == 0)
    for lanes, tiles in ROWS.items()
    for rows, (at, widths), half in itertools.product(tiles, enumerate(WIDTHS), (False, True))
    if rows <= (2 if lanes == 8 else 4) or not half or widths[1] % (2 * lanes) == 0  # as chosen
]


def covering(kinds):
    """Few kinds that take every path which any of them takes: each adds the most new ones."""
    kinds, chosen = list(kinds), []
    left = {path for kind in kinds for path in kind.paths()}
    while left:
        chosen.append(max(kinds, key=lambda kind: len(left.intersection(kind.paths()))))
        left.difference_update(chosen[-1].paths())
    return sorted(chosen)


@pytest.mark.parametrize("kind", EVERY if LONG else covering(EVERY)[::5], ids=str)
def test_every_tile_at_every_number_of_lanes(kind):
    kind.check()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names of x86 processors")
@pytest.mark.parametrize(
    ("name", "features", "lanes"), [("haswell", "+avx2,+fma", 8), ("generic", "", 4)]
)
def test_code_for_processors_without_wide_vectors(name, features, lanes):
    """What such a machine compiles, without the instructions that it lacks, run on this one."""
    if lanes > machine_lanes():
        pytest.skip("this machine has no vectors of 8 lanes")
    if lanes == 8 == machine_lanes() and not LONG:
        pytest.skip("it is what this machine compiles in all other tests")
    plain = Kind(lanes, 1, 48, 48, False, False, False)
    kinds = covering(kind for kind in EVERY if kind.lanes == lanes) if LONG else [plain]
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_decoding import Kind, machine_lanes\n"
        f"assert machine_lanes() == {lanes}\n"
        f"for kind in {kinds}:\n    kind.check()"
    )
    chosen = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    run_python(code, **chosen)


class Paged(NamedTuple):
    """A call on pages; with a bias, some keys are hidden, and all those of a block."""

    lanes: int
    rows: int
    width: int
    values: int
    page: int
    skipped: int
    keys: int
    batch: int
    bits: tuple[int, int] | tuple[None, None] = (None, None)
    joined: bool = False
    half: bool = False
    biased: bool = False


PAGED = [
    Paged(16, 4, 128, 128, 64, 0, 517, 1),
    Paged(16, 3, 48, 80, 64, 37, 517, 3, half=True, biased=True),
    Paged(8, 1, 32, 16, 16, 16, 300, 2, biased=True),
    Paged(16, 16, 576, 512, 128, 100, 513, 1, joined=True, half=True),
    Paged(16, 16, 96, 64, 32, 3, 290, 2, (6, 6), joined=True, biased=True),
    Paged(16, 4, 128, 128, 64, 0, 517, 2, (8, 4), half=True, biased=True),
    Paged(16, 2, 64, 112, 64, 63, 1, 2, (6, 4)),
    Paged(8, 7, 80, 48, 48, 50, 400, 1, (4, 6), biased=True),
    Paged(4, 5, 16, 16, 20, 7, 333, 3, (4, 4), half=True),
    Paged(8, 1, 8, 8, 5, 0, 63, 1, (8, 8)),
]


def drawn_pages(size, skipped, keys, batch, *, shared=False):
    """A table of pages in random order, and the number of tokens of all pages."""
    count = -(-(skipped + keys) // size)
    rows = 1 if shared else batch
    table = torch.randperm(rows * count + 3)[: rows * count].view(rows, count)
    return KeyPages(table.expand(batch, -1), size, skipped, keys), (rows * count + 3) * size


def in_pages(pages, tokens, width, bits, dtype, offset):
    """Numbers in all slots of a call, and NaN in all others: free pages, and what is left of the
    first and the last page."""
    x = torch.full((1, 2, tokens, width), torch.nan)
    slots = torch.arange(pages.skipped, pages.skipped + pages.keys)
    at = pages.table[:, slots // pages.size] * pages.size + slots % pages.size
    used = at.flatten().unique()
    x[:, :, used] = torch.randn(1, 2, len(used), width) + offset
    if bits is None:
        return x.to(dtype)
    codes = quantized(x.nan_to_num(), bits, 16)
    codes.scales[x.isnan().any(-1)] = torch.nan
    return codes


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("kind", few(PAGED[::-1], 3), ids=str)
def test_pages_are_found_through_their_table(kind, shared, streams):
    torch.manual_seed(0)
    pages, tokens = drawn_pages(kind.page, kind.skipped, kind.keys, kind.batch, shared=shared)
    dtype = torch.bfloat16 if kind.half else torch.float32
    of_k, of_v = kind.bits
    q = torch.randn(kind.batch, 2, kind.rows, kind.width).to(dtype)
    k = in_pages(pages, tokens, kind.width, of_k, dtype, 0)
    v = torch.empty(kind.values)
    v = v if kind.joined else in_pages(pages, tokens, kind.values, of_v, dtype, -2)
    bias = None
    if kind.biased:
        bias = torch.randn(kind.batch, 2, kind.rows, kind.keys)
        bias = bias.masked_fill(torch.rand(bias.shape) < 0.3, -torch.inf)
        bias[0, 0, 0] = bias[..., 64:160] = -torch.inf
    check(q, k, v, bias, kind.joined, kind.lanes, pages)
    check_specification(q, k, v, bias, kind.joined, kind.lanes, pages)


def test_pages_in_order_are_bit_for_bit_a_plain_tensor():
    q, k, v = torch.randn(1, 2, 3, 32), *torch.randn(2, 1, 2, 640, 32)
    plain = decode(q, k, v, scale=0.2)
    pages = KeyPages(torch.arange(10)[None], 64, 0, 640)
    for found, wanted in zip(decode(q, k, v, scale=0.2, pages=pages), plain, strict=True):
        assert found.equal(wanted)


@pytest.mark.parametrize("rows", [1, 5])
def test_keys_after_the_last_visible_one_of_a_block_are_not_read(rows):
    """Rows of a batch that end apart: what follows their last token may be anything."""
    torch.manual_seed(0)
    pages, tokens = drawn_pages(64, 0, 300, 3)
    q, k, v = torch.randn(3, 2, rows, 32), *torch.randn(2, 1, 2, tokens, 32)
    lengths = torch.tensor([[300], [170], [13]])
    bias = torch.zeros(3, 1, 1, 300).masked_fill(
        (torch.arange(300) >= lengths)[:, None, None], -torch.inf
    )
    clean = decode(q, k, v, scale=0.2, bias=bias, pages=pages)
    for row, length in enumerate(lengths.flatten()):
        slots = torch.arange(int(length), 320)
        at = pages.table[row, slots // 64] * 64 + slots % 64
        k[:, :, at], v[:, :, at] = torch.nan, torch.inf
    found = decode(q, k, v, scale=0.2, bias=bias, pages=pages)
    assert found[0].equal(clean[0]) and found[1].equal(clean[1])


CODES = [  # lanes, rows, widths of keys and values, joined, bfloat16, bits of both, group
    (16, 4, 128, 128, False, False, 8, 8, 64),
    (16, 1, 64, 64, False, False, 4, 4, 32),
    (16, 4, 128, 64, False, True, 8, 4, 64),
    (16, 3, 48, 80, False, False, 4, 8, 6),
    (16, 16, 96, 64, True, False, 8, 8, 64),
    (16, 7, 112, 48, True, True, 4, 4, 64),
    (8, 2, 80, 48, False, True, 4, 4, 16),
    (8, 1, 96, 32, True, False, 8, 8, 2),
    (4, 6, 48, 48, False, True, 8, 8, 10),
    (4, 1, 96, 48, True, False, 4, 4, 128),
    (16, 4, 128, 128, False, True, 6, 4, 64),
    (16, 1, 48, 80, False, False, 6, 6, 16),
    (16, 3, 192, 112, False, False, 8, 6, 64),
    (8, 2, 80, 48, False, False, 6, 6, 64),
    (4, 3, 16, 48, False, True, 8, 6, 8),
]


@pytest.mark.parametrize("kind", few(CODES, 5), ids=str)
def test_codes_are_read_as_they_are_stored(kind):
    lanes, rows, width, values, joined, half, *bits, group = kind
    torch.manual_seed(0)
    q = torch.randn(1, 2, rows, width).to(torch.bfloat16 if half else torch.float32)
    k = quantized(torch.randn(1, 2, 517, width) + 3, bits[0], group)
    v = quantized(torch.randn(1, 2, 517, values) - 2, bits[1], group)
    v = torch.empty(values) if joined else v
    bias = torch.randn(1, 2, rows, 517)
    bias = bias.masked_fill(torch.rand(bias.shape) < 0.3, -torch.inf)
    bias[0, 0, 0] = bias[..., 64:160] = -torch.inf
    given = q, k, v, bias if group == 64 else None, joined, lanes
    check(*given)
    check_specification(*given)


@pytest.mark.parametrize("keys", [1, 2, 15, 16, 17, 255, 256, 257, 1025])
@pytest.mark.parametrize("bits", [8, 6, 4])
def test_every_number_of_keys_as_codes(keys, bits):
    q, k, v = torch.randn(1, 1, 3, 32), *torch.randn(2, 1, 1, keys, 32)
    check(q, quantized(k, bits, 16), quantized(v, bits, 16))


@pytest.mark.parametrize("bits", few([4, 8], 2))
def test_codes_of_any_strides(bits):
    """Views of growing buffers, of a cache with a fixed capacity, and tokens before heads."""
    whole = quantized(torch.randn(3, 2, 400, 32), bits, 16)
    apart = quantized(torch.randn(3, 300, 2, 32), bits, 16)
    apart = apart._replace(codes=apart.codes.transpose(1, 2), scales=apart.scales.transpose(1, 2))
    check(torch.randn(3, 2, 5, 32), whole.narrow(7, 300), apart)
    check_specification(torch.randn(3, 2, 5, 32), apart, whole.narrow(7, 300))


def test_keys_in_floating_point_and_values_as_codes():
    q, k, v = torch.randn(1, 2, 4, 64), *torch.randn(2, 1, 2, 300, 64)
    check(q, quantized(k, 8), v)
    check_specification(q, quantized(k, 8), v)
    check(q.bfloat16(), k.bfloat16(), quantized(v, 4))
    check_specification(q.bfloat16(), k.bfloat16(), quantized(v, 4))


@pytest.mark.parametrize("rows", few([1, 2, 3, 4, 5, 6, 7, 8, 16, 33], 3))
def test_every_number_of_rows(rows, streams):
    k, v = torch.randn(2, 2, 2, 333, 32)
    check(torch.randn(2, 2, rows, 32), k, v)


@pytest.mark.parametrize("rows", [16, 40])
def test_values_that_are_the_first_columns_of_the_keys(rows, streams):
    q, k = torch.randn(1, 1, rows, 96).bfloat16(), torch.randn(1, 1, 600, 96).bfloat16()
    check(q, k, k[..., :64], joined=True)


@pytest.mark.parametrize("keys", [1, 2, 15, 16, 17, 255, 256, 257, 1025])
def test_every_number_of_keys(keys, streams):
    q, k = torch.randn(1, 1, 3, 32), torch.randn(1, 1, keys, 32)
    v = torch.randn(1, 1, keys, 32)
    check(q, k, v)
    check_specification(q, k, v)


def test_many_ranges_are_merged_in_the_order_of_their_keys():
    torch.set_num_threads(2)
    q, k, v = (torch.randn(1, 1, n, 32) for n in (9, 1500, 1500))
    tile = tile_for(9, 32, 32, False, False, False, machine_lanes())
    assert tile.ranges(1500, 1, 2)[0] == 5
    check_specification(q, k, v)


def test_views_of_larger_buffers_and_other_orders():
    buffer = torch.randn(2, 3, 400, 32)
    k = buffer.narrow(2, 7, 300)
    v = torch.randn(2, 300, 3, 32).transpose(1, 2)  # tokens before heads
    q = torch.randn(2, 3, 3, 32).transpose(1, 2)
    check(q, k, v)
    check_specification(q, k, v)


@pytest.mark.parametrize("shape", [(2, 3, 4, 90), (1, 1, 4, 90), (2, 1, 1, 90), (1, 3, 1, 90)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_broadcast_and_hide(shape, dtype):
    q, k, v = (torch.randn(2, 3, n, 32).to(dtype) for n in (4, 90, 90))
    bias = torch.randn(shape)
    bias = bias.masked_fill(torch.rand(shape) < 0.3, -torch.inf)
    bias[0, 0, 0] = -torch.inf  # one fully masked row, or more
    check(q, k, v, bias)
    check_specification(q, k, v, bias)


@pytest.mark.parametrize("shape", [(2, 1, 1, 700), (2, 3, 4, 700)])
def test_blocks_of_keys_that_are_hidden_from_all_rows_are_not_read(shape):
    q, k, v = (torch.randn(2, 3, n, 32) for n in (4, 700, 700))
    bias = torch.zeros(shape)
    bias[0, ..., 100:400] = -torch.inf
    bias[1, ..., :690] = -torch.inf
    check(q, k, v, bias)
    k[0, :, 128:384], v[0, :, 128:384] = torch.nan, torch.inf
    k[1, :, :640], v[1, :, :640] = torch.inf, torch.nan
    assert decode(q, k, v, scale=0.1, bias=bias)[0].isfinite().all()


def test_large_scores():
    q, k = 60 * torch.randn(1, 2, 3, 32), torch.randn(1, 2, 500, 32)
    check(q, k, torch.randn(1, 2, 500, 32))


def test_nan_in_a_key_appears_in_the_output():
    q, k = torch.randn(1, 1, 3, 32), torch.randn(1, 1, 40, 32)
    k[0, 0, 7, 3] = torch.nan
    assert decode(q, k, k, scale=1.0)[0].isnan().any()


def test_the_same_bits_every_time_and_with_every_number_of_threads():
    q, k = torch.randn(1, 3, 3, 32), torch.randn(1, 3, 2000, 32)
    first = decode(q, k, k, scale=0.1)[0]
    assert all(decode(q, k, k, scale=0.1)[0].equal(first) for _ in range(5))
    torch.set_num_threads(2)
    second = decode(q, k, k, scale=0.1)[0]
    assert all(decode(q, k, k, scale=0.1)[0].equal(second) for _ in range(20))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
