"""Products of codes as integers against float64, of the values that codes stand for."""

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("numba")

from covering import few
from kernel_checks import gathered, of_stream, quantized
from regard.cache.codes import QuantizedStream, quantize_channels
from regard.ops.kernels import integers
from regard.ops.kernels.launching import compiled, decode
from regard.ops.kernels.tiles import Format, KeyPages, tile_for
from regard.ops.kernels.vectors import machine_lanes, multiplies_words

HALF_STEP = 2.0**-16  # of integers of 16 bits, over the largest of a row
KEYS = 197  # three blocks, the last of them odd


class Kind(NamedTuple):
    """Codes, and the sizes that decide how they are read."""

    bits: tuple[int, int]
    rows: int
    widths: tuple[int, int]
    group: int = 64


KINDS = [
    Kind((8, 8), 4, (128, 128)),
    Kind((4, 4), 3, (64, 64)),
    Kind((8, 4), 1, (64, 128), 32),
    Kind((4, 8), 6, (128, 64)),
    Kind((8, 8), 2, (96, 32), 32),
    Kind((4, 4), 4, (32, 64), 128),
    Kind((8, 8), 9, (64, 64)),  # three tiles
    Kind((4, 8), 16, (128, 128)),
    Kind((8, 4), 7, (64, 64)),  # rows of a tile each: dequantised
    Kind((6, 4), 2, (64, 64)),  # keys of 6 bits are dequantised
    Kind((4, 6), 2, (64, 64)),
]


pytestmark = pytest.mark.skipif(
    not multiplies_words(machine_lanes()), reason="this processor has no such products"
)


def streams(kind, keys=KEYS):
    """Queries in bfloat16, and codes of keys and values that are far from 0."""
    torch.manual_seed(0)
    (d, dv), (of_k, of_v) = kind.widths, kind.bits
    q = torch.randn(2, 2, kind.rows, d).bfloat16()
    k, v = torch.randn(2, 2, keys, d) + 0.5, torch.randn(2, 2, keys, dv) - 1
    return q, quantized(k, of_k, kind.group), quantized(v, of_v, kind.group)


def judge(q, keys, values, scale, bias=None):
    """Attention in float64, its log-sum-exps, and the errors that 16 bits allow for both."""
    q, keys, values = q.double(), keys.double(), values.double()
    scores = scale * q @ keys.mT + (0 if bias is None else bias.double())
    sizes = scale * (q.abs().amax(-1, True) * keys.abs().sum(-1)[:, :, None]).amax().item()
    bound = 2 * HALF_STEP * values.abs().max().item() * (1 + sizes)
    return scores.softmax(-1) @ values, scores.logsumexp(-1), bound, HALF_STEP * (1 + sizes)


def check(q, k, v, bias=None, pages=None, stand_for=None):
    """Both results against float64; `stand_for` is what the codes of keys do."""
    (keys, _), (values, _) = of_stream(k) if stand_for is None else (stand_for, None), of_stream(v)
    keys, values = gathered(keys, pages), gathered(values, pages)
    wanted, sums, bound, of_lse = judge(q, keys, values, 0.1, bias)
    out, lse = decode(q, k, v, scale=0.1, bias=bias, pages=pages)
    assert (out - wanted).abs().max() <= bound
    assert (lse - sums).abs().max() <= of_lse
    return out


@pytest.mark.parametrize("kind", few(KINDS, 2), ids=str)
def test_attention_from_integers(kind):
    check(*streams(kind))


def test_it_is_integers_that_are_multiplied():
    """Else the tests here show nothing: float32 differs in the last bits."""
    q, k, v = streams(KINDS[0])
    own, exact = (decode(q, k, v, scale=0.1, integers=x)[0] for x in (True, False))
    rows = 4, 128, 128, True, False, False, machine_lanes(), Format(8, 64), Format(8, 64), 0
    assert compiled(*rows, True)[0].k_integers
    assert compiled(*rows, True)[0].v_integers
    assert not own.equal(exact)
    decided = decode(q, k, v, scale=0.1)[0]
    assert decided.equal(own)  # of bfloat16, by default
    full = decode(q.float(), k, v, scale=0.1)[0]
    assert (full - exact).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("kind", "page"), [(KINDS[0], 64), (KINDS[1], 48), (KINDS[3], 32)], ids=str
)
def test_keys_that_are_hidden_and_pages(kind, page):
    q, k, v = streams(kind, 6 * page)
    k, v = (x._replace(codes=x.codes[:1], scales=x.scales[:1]) for x in (k, v))
    pages = KeyPages(torch.randperm(6).view(1, 6).expand(2, -1), page, 5, 5 * page)
    bias = torch.randn(2, 2, kind.rows, 5 * page)
    bias = bias.masked_fill(torch.rand(bias.shape) < 0.3, -torch.inf)
    bias[..., 64:160] = -torch.inf
    check(q, k, v, bias, pages=pages)


@pytest.mark.parametrize(("bits", "width", "values"), [(8, 576, 512), (4, 192, 128), (8, 96, 32)])
@pytest.mark.parametrize("rows", [3, 16])
def test_values_that_are_the_first_columns_of_the_keys(bits, width, values, rows):
    torch.manual_seed(0)
    q, group = torch.randn(1, 1, rows, width).bfloat16(), 32 if width == 96 else 64
    k = quantized(torch.randn(1, 1, KEYS, width) + 0.5, bits, group)
    form = Format(bits, group)
    tile = tile_for(rows, width, values, True, True, False, machine_lanes(), form, integers=True)
    assert tile.k_integers
    assert tile.v_integers
    keys, _ = of_stream(k)
    wanted, sums, bound, of_lse = judge(q, keys, keys[..., :values], 0.05)
    out, lse = decode(q, k, scale=0.05, width=values)
    assert (out - wanted).abs().max() <= bound
    assert (lse - sums).abs().max() <= of_lse


@pytest.mark.parametrize(("rows", "width"), [(4, 64), (8, 128)])
def test_scales_of_the_channels_of_a_page(rows, width):
    torch.manual_seed(0)
    q = torch.randn(1, 2, rows, width).bfloat16()
    k, v = torch.randn(1, 2, 192, width) + torch.randn(width), torch.randn(1, 2, 192, width)
    k = QuantizedStream(*quantize_channels(k, 4, 64), 4, 1, width, k.dtype, run=64)
    pages = KeyPages(torch.tensor([[2, 0, 1]]), 64, 0, 170)
    values = k._replace(dtype=torch.float32).to_tensor()
    check(q, k, quantized(v, 4), pages=pages, stand_for=values)


def test_rows_of_zeros_and_numbers_of_any_size():
    q, k, v = streams(KINDS[0])
    q[:, :, 0], q[:, :, 1], q[:, :, 2] = 0, q[:, :, 1] * 1e-20, q[:, :, 2] * 1e4
    check(q, k, v)
    large = quantized(torch.randn(2, 2, KEYS, 128) * 1e20)
    check(q, k, large)


@pytest.mark.parametrize("size", [1, 8, 64, 1000])
@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
def test_scores_of_any_size(kind, size):
    """The error of strict attention in bfloat16 does not grow with the scores; the largest here
    have 16 bits more, and lose what float32 does."""
    q, k, v = streams(kind)
    q = (q * size).bfloat16()
    (keys, _), (values, _) = of_stream(k), of_stream(v)
    wanted = judge(q, keys, values, 0.1)[0]
    error = (decode(q, k, v, scale=0.1)[0] - wanted).abs().max()
    largest = values.abs().max().item()
    assert error <= largest * 2**-10  # a quarter of what rounding to bfloat16 may take
    exact = (decode(q, k, v, scale=0.1, integers=False)[0] - wanted).abs().max()
    if size >= 64:
        assert error <= 4 * exact + largest * 1e-5  # weights are rounded to 16 bits


def test_scores_of_the_channels_of_a_page_of_any_size():
    torch.manual_seed(0)
    q = 30 * torch.randn(1, 2, 4, 64)
    k, v = torch.randn(1, 2, 128, 64), torch.randn(1, 2, 128, 64)
    k = QuantizedStream(*quantize_channels(k, 4, 64), 4, 1, 64, k.dtype, run=64)
    pages, v = KeyPages(torch.tensor([[1, 0]]), 64, 0, 128), quantized(v, 8)
    found, exact = (
        decode(q.bfloat16(), k, v, scale=1.0, pages=pages, integers=x)[0] for x in (True, False)
    )
    assert (found - exact).abs().max() < 1e-4


def test_weights_of_many_blocks_add_up():
    """Each token has so small a share that all of them would round to 0, were one the measure."""
    torch.manual_seed(0)
    q = torch.zeros(1, 1, 4, 64).bfloat16()
    q[..., 0] = 200
    k = torch.zeros(1, 1, 20_000, 64)
    k[0, 0, 0, 0] = 0.7
    v = quantized(torch.ones(1, 1, 20_000, 64) + torch.rand(1, 1, 20_000, 64))
    check(q, quantized(k, group=32), v)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("of", ["k", "v"])
def test_what_is_not_finite_stays_so(number, of):
    q, k, v = streams(KINDS[0])
    (k if of == "k" else v).scales[0, 0, 70, 2] = number
    out, _ = decode(q, k, v, scale=0.1)
    assert not out[0, 0].isfinite().all()
    assert out[1].isfinite().all()
    q[1, 1, 2, 3] = number
    assert not decode(q, k, v, scale=0.1)[0][1, 1, 2].isfinite().any()


@pytest.mark.parametrize("group", [256, 1024])
def test_sums_of_the_largest_products(group):
    """All numbers of a query and all codes are the largest: 32 bits hold the sum of 256 channels,
    and keys in larger groups are dequantised."""
    q = torch.ones(1, 1, 4, 512).bfloat16()
    k = torch.ones(1, 1, 40, 512)
    k[..., ::group] = 0  # the zero of each group
    k = quantized(k, 8, group)
    keys, _ = of_stream(k)
    wanted, sums, bound, of_lse = judge(q, keys, keys[..., :64], 0.01)
    out, lse = decode(q, k, scale=0.01, width=64)
    assert (out - wanted).abs().max() <= bound
    assert (lse - sums).abs().max() <= of_lse


def test_groups_across_vectors_are_dequantised():
    form = Format(8, 48)
    tile = tile_for(2, 96, 96, True, False, False, 16, form, form, 0, True)
    assert not tile.k_integers
    assert not tile.v_integers


@pytest.mark.parametrize("width", range(32, 129, 32))
@pytest.mark.parametrize("page", [0, 16, 32])
def test_the_memory_is_that_of_a_dequantised_block(width, page):
    for group in (32, 64, 128):
        for rows in range(1, 7):
            form = Format(8, group)
            tile = tile_for(rows, width, width, True, False, False, 16, form, form, page, True)
            if tile.k_integers or tile.v_integers:
                assert integers.of_rows(tile).size <= tile.integer_bytes
                assert integers.of_block(tile).size <= tile.block_bytes
