"""`codes.quantize` as one loop over rows of numbers, compiled by numba."""

import functools
import inspect
from typing import Any, no_type_check

import numpy as np
from numba import carray, types

from regard.cache import codes as layout
from regard.compiling import compiled_from, part

LOW = np.int32(0xFFFF)  # the bits of a float32 that a bfloat16 does not have
SIGNATURE = types.void(types.voidptr, types.voidptr, types.voidptr, types.int64, types.int64)
bytes_of = part(inspect.unwrap(layout.bytes_of))  # numba compiles no check of annotations


@functools.cache
@no_type_check
def kernel(bits: int, group: int) -> Any:
    """A C function of the addresses of numbers, codes and scales, then of rows and their width."""

    def quantize(numbers, codes, scales, rows, width):
        groups = (width + group - 1) // group
        x = carray(numbers, (rows, width), np.float32)
        out = carray(codes, (rows, bytes_of(width, bits)), np.uint8)
        pairs = carray(scales, (rows, groups, 2), np.int16)
        for row in range(rows):
            encode(x[row], out[row], pairs[row], width, bits, group)

    compiled = compiled_from(quantize, SIGNATURE, layout)
    run = compiled.ctypes
    run.owner = compiled  # the machine code, alive as long as the function
    return run


@part
@no_type_check
def encode(x, out, pairs, width, bits, group):
    """The codes of a row of numbers, and the scale and zero of each of its groups."""
    levels = np.float32(2**bits - 1)
    for g in range((width + group - 1) // group):
        first, stop = g * group, min(width, (g + 1) * group)
        low, high = x[first:stop].min(), x[first:stop].max()  # NaN if any is
        zero = round_down(low)
        scale = round_up((high - zero) / levels)
        pairs[g, 0] = np.float32(scale).view(np.int32) >> 16
        pairs[g, 1] = np.float32(zero).view(np.int32) >> 16
        step = scale if scale != np.float32(0) else np.float32(1)
        for i in range(first, stop):
            code = np.rint((x[i] - zero) / step)
            store(out, i, width, min(max(code, np.float32(0)), levels), bits)


@part
@no_type_check
def round_up(x):
    """The next bfloat16 that is not less, of x >= 0."""
    return np.int32((np.float32(x).view(np.int32) + LOW) & ~LOW).view(np.float32)


@part
@no_type_check
def round_down(x):
    """The next bfloat16 that is not greater: negative numbers grow in size, others shrink."""
    word = np.float32(x).view(np.int32)
    return np.int32((word + ((word >> 31) & LOW)) & ~LOW).view(np.float32)


@part
@no_type_check
def store(out, i, width, code, bits):
    """Write the code of channel `i`, packed as in `codes._pack`."""
    word = np.uint8(code)
    if bits == 8:
        out[i] = word
        return
    n = 32 if i < width // 32 * 32 else width % 32
    first, j, half, quarter = i // 32 * 4 * bits, i % 32, (n + 1) // 2, (n + 3) // 4
    place(out, first + j % half, word & 15, j // half * 4)
    if bits == 6:
        place(out, first + half + j % quarter, word >> 4, j // quarter * 2)


@part
@no_type_check
def place(out, at, field, shift):
    """Write bits of a byte; the lowest are written first, and clear the others."""
    if shift == 0:
        out[at] = field
    else:
        out[at] |= np.uint8(field << shift)
