"""The kernel on keys in several places, merged: attention over all of them, by definition."""

import pytest
import torch

pytest.importorskip("numba")

from covering import few
from regard.cache.codes import QuantizedStream
from regard.cache.quantizing import quantized
from regard.ops.kernels.merging import Source, decode_all
from regard.ops.kernels.tiles import KeyPages

HEADS, ROWS, WIDTH, V_WIDTH, SCALE = 2, 6, 48, 32, 0.3


def codes_of(x, bits, group, rotation=()):
    codes, scales = quantized(x, bits, group, rotation)
    return QuantizedStream(codes, scales, bits, group, x.shape[-1], x.dtype, rotation)


def check(found, q, keys, values):
    """Compare with attention in float64, by the numeric contract."""
    scores = SCALE * q.double() @ keys.double().mT
    unit = torch.finfo(torch.float32).eps / 2
    largest = SCALE * q.double().abs().sum(-1).amax() * keys.double().abs().amax()
    wanted = scores.softmax(-1) @ values.double()
    assert (found - wanted).abs().amax() <= 2 * unit * (1 + largest) * values.abs().amax()


@pytest.mark.parametrize("dtype", few([torch.bfloat16, torch.float32], 2), ids=str)
def test_numbers_pages_and_rotated_codes(dtype):
    torch.manual_seed(0)
    q = torch.randn(2, HEADS, ROWS, WIDTH).to(dtype)
    k, v = (torch.randn(2, HEADS, 300, w).to(dtype) for w in (WIDTH, V_WIDTH))
    coded = codes_of(k[:, :, 40:170], 8, 16), codes_of(v[:, :, 40:170], 4, 16, (32,))
    memory = [torch.randn(1, HEADS, 320, w).to(dtype) for w in (WIDTH, V_WIDTH)]
    table = torch.randperm(20)[:12].view(2, 6)
    slots = (table[:, :, None] * 16 + torch.arange(16)).flatten(1)[:, 3:90]
    sources = [
        Source(k[:, :, :40], v[:, :, :40]),
        Source(*coded),
        Source(*memory, KeyPages(table, 16, 3, 87)),
    ]
    pages = [x[0][:, slots].transpose(0, 1) for x in memory]
    keys = torch.cat([k[:, :, :40].double(), coded[0].to_tensor().double(), pages[0].double()], 2)
    # of rotated values the exact ones: `to_tensor` rounds to the dtype after it turns them back
    exact = coded[1]._replace(dtype=torch.float32).to_tensor().double()
    values = torch.cat([v[:, :, :40].double(), exact, pages[1].double()], 2)
    if dtype is torch.bfloat16:  # codes stand for numbers that are not rounded to bfloat16
        keys[:, :, 40:170] = coded[0]._replace(dtype=torch.float32).to_tensor().double()
    check(decode_all(q, sources, scale=SCALE, width=V_WIDTH), q, keys, values)


def test_values_within_the_keys():
    q, k = torch.randn(1, HEADS, ROWS, WIDTH), torch.randn(1, HEADS, 70, WIDTH)
    sources = [Source(k[:, :, :9], None), Source(k[:, :, 9:], None)]
    check(decode_all(q, sources, scale=SCALE, width=V_WIDTH), q, k, k[..., :V_WIDTH])
    check(decode_all(q, [Source(k, None)], scale=SCALE, width=V_WIDTH), q, k, k[..., :V_WIDTH])


def test_a_source_of_infinite_keys_has_no_share():
    q = torch.rand(1, HEADS, ROWS, WIDTH) + 1
    k, v = torch.randn(1, HEADS, 70, WIDTH), torch.randn(1, HEADS, 70, V_WIDTH)
    infinite = Source(torch.full_like(k, -torch.inf), v)
    found = decode_all(q, [infinite, Source(k, v)], scale=SCALE, width=V_WIDTH)
    check(found, q, k, v)
    nothing = decode_all(q, [infinite, infinite], scale=SCALE, width=V_WIDTH)
    assert torch.equal(nothing, torch.zeros_like(nothing))
