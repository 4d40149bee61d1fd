"""Multilinear hashes of rows of numbers, as one loop compiled by numba."""

import functools
from typing import Any, no_type_check

import numpy as np
from numba import carray, types

from regard.compiling import compiled_from

SIGNATURE = types.void(*[types.voidptr] * 4, types.int64)
HALF = np.uint64(32)  # bits


@functools.cache
@no_type_check
def kernel(row: int) -> Any:
    """A C function of the addresses of numbers of 32 bits, of both factors, each of `row + 1`
    numbers of 64 bits, and of the hashes [2, rows], then of the count of the numbers."""

    def hash_rows(numbers, first, second, hashes, count):
        rows = (count + row - 1) // row
        x, out = carray(numbers, (count,), np.uint32), carray(hashes, (2, rows), np.uint64)
        one = carray(first, (row + 1,), np.uint64)
        other = carray(second, (row + 1,), np.uint64)
        for r in range(rows):
            a, b, begin = one[0], other[0], r * row
            for i in range(min(row, count - begin)):
                number = np.uint64(x[begin + i])
                a += number * one[i + 1]
                b += number * other[i + 1]
            out[0, r], out[1, r] = a >> HALF, b >> HALF

    compiled = compiled_from(hash_rows, SIGNATURE)
    run = compiled.ctypes
    run.owner = compiled  # the machine code, alive as long as the function
    return run
