"""Rotation of rows in compiled code, and the streams that a step reads."""

import ctypes

import pytest
import torch

pytest.importorskip("numba")

from regard import QuantizedCache
from regard.cache.quantized import streams_with_room
from regard.ops.kernels.encoding import TURNED, Codes, codes_of, mix_all, turn_kernel


def sylvester(width):
    """The orthonormal matrix, in float64: the sign of entry (i, j) is the parity of i & j."""
    at = torch.arange(width)
    ones = torch.tensor([[bin(i & j).count("1") for j in at.tolist()] for i in at.tolist()])
    return (1.0 - 2.0 * (ones % 2)).double() * width**-0.5


@pytest.mark.parametrize(
    ("channels", "blocks"), [(0, []), (2, [2]), (7, [4, 2]), (12, [8, 4]), (64, [64])]
)
def test_blocks_of_channels_are_multiplied_by_their_matrices(channels, blocks):
    rows = torch.randn(3, channels + 2)
    expected = rows.double()
    start = 0
    for block in blocks:
        piece = expected[:, start : start + block]
        expected[:, start : start + block] = piece @ sylvester(block)
        start += block
    got = rows.clone()
    mix_all(got.data_ptr(), 3, channels + 2, channels)
    assert (got.double() - expected).abs().max() <= 1e-6 * rows.abs().max()
    assert got[:, start:].equal(rows[:, start:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_written_elsewhere_in_float32_and_rotated(dtype):
    rows, channels = torch.randn(3, 20).to(dtype), 8
    kept, got = rows.clone(), torch.empty(3, 20)
    run = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(turn_kernel(dtype is torch.bfloat16).address)
    run(TURNED.pack(rows.data_ptr(), got.data_ptr(), 3, 20, channels))
    expected = rows.double()
    expected[:, :channels] = expected[:, :channels] @ sylvester(channels)
    assert (got.double() - expected).abs().max() <= 1e-6 * rows.abs().max()
    assert rows.equal(kept)


def test_codes_that_no_kernel_reads_have_no_step():
    cache = QuantizedCache(bits=4)
    cache.update(torch.randn(1, 2, 3, 24), torch.randn(1, 2, 3, 24))
    stream = streams_with_room(cache)[0]._replace(width=32)
    assert codes_of(streams_with_room(cache)) is None
    assert codes_of((stream, stream)) == (Codes(4, 64), Codes(4, 64))
    assert codes_of((torch.ones(1), stream)) == (Codes(), Codes(4, 64))
    assert codes_of((stream,)) is None
    for other in ({"run": 2}, {"skipped": 1}, {"rotation": (8, 16)}):
        assert codes_of((stream, stream._replace(**other))) is None
