"""Hashes of rows of numbers, as one loop compiled by numba."""

import functools
from typing import Any, no_type_check

import numpy as np
from numba import carray, types

from regard.compiling import compiled_from

SIGNATURE = types.void(*[types.voidptr] * 4, types.int64)
LOW = np.uint64((1 << 32) - 1)


@functools.cache
@no_type_check
def kernel(half: int) -> Any:
    """The machine code: a C function of the addresses of rows of `2 * half` numbers of 32 bits, of
    both keys, each as long as a row, and of the hashes [2, rows] of 64 bits, then of the count of
    rows."""

    def hash_rows(numbers, first, second, hashes, rows):
        x = carray(numbers, (rows, 2 * half), np.uint32)
        one, other = carray(first, (2 * half,), np.uint32), carray(second, (2 * half,), np.uint32)
        out = carray(hashes, (2, rows), np.uint64)
        for r in range(rows):
            a, b = np.uint64(0), np.uint64(0)
            for i in range(half):
                left, right = np.uint64(x[r, i]), np.uint64(x[r, i + half])
                a += ((left + one[i]) & LOW) * ((right + one[i + half]) & LOW)
                b += ((left + other[i]) & LOW) * ((right + other[i + half]) & LOW)
            out[0, r], out[1, r] = a, b

    return compiled_from(hash_rows, SIGNATURE)
