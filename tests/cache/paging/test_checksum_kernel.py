"""Hashes of rows in compiled code, against Python's integers."""

import pytest
import torch

pytest.importorskip("numba")

from regard.cache.paging.checksum_kernel import kernel

WIDTH = 2**32


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("half", [1, 5, 32])
def test_rows_are_hashed_by_both_keys(half, rows):
    drawn = (torch.randint(-(2**31), 2**31, (n, 2 * half), dtype=torch.int32) for n in (2, rows))
    keys, numbers = drawn
    out = torch.empty(2, rows, dtype=torch.int64)
    places = (x.data_ptr() for x in (numbers, *keys, out))
    kernel(half).ctypes(*places, rows)
    for key, hashes in zip(keys.tolist(), out.tolist(), strict=True):
        for row, found in zip(numbers.tolist(), hashes, strict=True):
            sums = [(a + b) % WIDTH for a, b in zip(row, key, strict=True)]
            total = sum(a * b for a, b in zip(sums[:half], sums[half:], strict=True))
            assert found % 2**64 == total % 2**64
