"""`codes.quantize` as one loop over rows of numbers, compiled by numba."""

import functools
from typing import Any, no_type_check

import numba
import numpy as np
from numba import carray, types

from regard.compiling import compiled_from

LOW = np.int32(0xFFFF)  # the bits of a float32 that a bfloat16 does not have
SIGNATURE = types.void(
    types.CPointer(types.int16), types.CPointer(types.uint8), types.CPointer(types.int16),
    types.int64, types.int64,
)  # fmt: skip
part = numba.njit(inline="always")  # compiled as a part of the kernel that calls it


@functools.cache
@no_type_check
def kernel(bits: int, group: int, half: bool) -> Any:
    """The machine code: a C function of the addresses of numbers, codes and scales, the number of
    rows, and the width of a row."""
    levels = np.float32(2**bits - 1)

    def quantize(numbers, codes, scales, rows, width):
        groups = (width + group - 1) // group
        held = bytes_of(width, bits)
        x = carray(numbers, rows * width if half else 2 * rows * width)
        out, pairs = carray(codes, rows * held), carray(scales, 2 * rows * groups)
        values = x if half else x.view(np.float32)
        for row in range(rows):
            for g in range(groups):
                first, stop = g * group, min(width, (g + 1) * group)
                start = row * width
                low, high = span_of(values, start + first, start + stop, half)
                zero = rounded_down(low)
                scale = rounded_up((high - zero) / levels)
                at = 2 * (row * groups + g)
                pairs[at], pairs[at + 1] = word_of(scale) >> 16, word_of(zero) >> 16
                step = scale if scale != np.float32(0) else np.float32(1)
                for i in range(first, stop):
                    code = np.rint((number(values, start + i, half) - zero) / step)
                    store(out, row * held, i, width, min(max(code, np.float32(0)), levels), bits)

    return compiled_from(quantize, SIGNATURE)


@part
@no_type_check
def number(values, i, half):
    """One number as float32; of bfloat16, the words."""
    return np.int32(np.int32(values[i]) << 16).view(np.float32) if half else values[i]


@part
@no_type_check
def span_of(values, first, stop, half):
    """The least and the greatest number; NaN if one is not finite."""
    low = high = number(values, first, half)
    nothing = np.float32(0)
    for i in range(first, stop):
        x = number(values, i, half)
        low, high = min(low, x), max(high, x)
        nothing += x * np.float32(0)
    if nothing != nothing:
        return nothing, nothing
    return low, high


@part
@no_type_check
def word_of(x):
    return np.float32(x).view(np.int32)


@part
@no_type_check
def rounded_up(x):
    """The next bfloat16 that is not less, of x >= 0."""
    return np.int32((word_of(x) + LOW) & ~LOW).view(np.float32)


@part
@no_type_check
def rounded_down(x):
    """The next bfloat16 that is not greater: negative numbers grow in size, others shrink."""
    word = word_of(x)
    return np.int32((word + ((word >> 31) & LOW)) & ~LOW).view(np.float32)


@part
@no_type_check
def bytes_of(width, bits):
    """As `codes.bytes_of`."""
    if bits == 8:
        return width
    rest = width % 32
    high = (rest + 3) // 4 if bits == 6 else 0
    return width // 32 * 4 * bits + (rest + 1) // 2 + high


@part
@no_type_check
def store(out, start, i, width, code, bits):
    """Write the code of channel `i`, packed as in `codes._packed`."""
    word = np.uint8(code)
    if bits == 8:
        out[start + i] = word
        return
    n = 32 if i < width // 32 * 32 else width % 32
    first, j, half, quarter = start + i // 32 * 4 * bits, i % 32, (n + 1) // 2, (n + 3) // 4
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
