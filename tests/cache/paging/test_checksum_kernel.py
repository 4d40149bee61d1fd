"""Hashes of rows in compiled code, against Python's integers."""

import pytest
import torch

pytest.importorskip("numba")

from regard.cache.paging.checksum_kernel import kernel


@pytest.mark.parametrize("count", [1, 5, 6, 17])
def test_rows_are_hashed_by_both_factors(count):
    row, limits = 5, torch.iinfo(torch.int64)
    factors = [torch.randint(limits.min, limits.max, (row + 1,)) for _ in range(2)]
    numbers = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32)
    out = torch.empty(2, -(-count // row), dtype=torch.int64)
    kernel(row)(numbers.data_ptr(), *(x.data_ptr() for x in factors), out.data_ptr(), count)
    for each, hashes in zip(factors, out, strict=True):
        first, *others = (x % 2**64 for x in each.tolist())
        for i, found in enumerate(hashes.tolist()):
            part = [x % 2**32 for x in numbers[i * row : (i + 1) * row].tolist()]
            total = first + sum(x * y for x, y in zip(part, others, strict=False))
            assert found == total % 2**64 >> 32
