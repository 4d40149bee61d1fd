"""Parts of a decoding step for caches of codes: Hadamard rotation and quantisation of one row.

They are compiled into the kernel that appends a token; `cache/rotation.py` and `cache/codes.py`
define what they compute.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast, no_type_check

import numpy as np
from numba import carray, types
from torch import Tensor

from regard.cache import codes as layout
from regard.cache import quantizing_kernel
from regard.cache.codes import QuantizedStream
from regard.cache.parts import AnyStream
from regard.cache.quantizing_kernel import bytes_of, encode
from regard.cache.rotation import blocks_of
from regard.compiling import compiled_from, part
from regard.ops.kernels import intrinsics
from regard.ops.kernels.intrinsics import floats, halves, octets

SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)
SOURCES = intrinsics, quantizing_kernel, layout  # modules whose code `keep` and `mix` contain


class Codes(NamedTuple):
    """How the rows of a stream are stored."""

    bits: int = 0  # of a code; 0 where the numbers are stored as they are
    group: int = 0  # channels that have one scale and one zero
    rotated: int = 0  # channels that are multiplied by a Hadamard matrix first


NUMBERS = Codes()


def codes_of(streams: Sequence[AnyStream]) -> tuple[Codes, Codes] | None:
    """How keys and values are stored; None where the kernels do not read one of them, or there are
    not two."""
    found = [stored_as(each) for each in streams]
    return None if len(found) != 2 or None in found else cast("tuple[Codes, Codes]", tuple(found))


def stored_as(stream: AnyStream) -> Codes | None:
    """How a stream is stored; None of codes of fewer than 8 bits that fill no whole vectors, and
    where several tokens have the same scales."""
    if isinstance(stream, Tensor):
        return NUMBERS
    if not isinstance(stream, QuantizedStream) or stream.run > 1 or stream.skipped:
        return None
    if stream.bits < 8 and stream.width % layout.NIBBLES:
        return None
    rotated = sum(stream.rotation)
    return (
        Codes(stream.bits, stream.group, rotated) if stream.rotation == blocks_of(rotated) else None
    )


@part
@no_type_check
def widen(source, target, width, half):
    """A row of numbers as float32."""
    numbers = floats(target)
    for i in range(width):
        numbers[i] = number(source, i, half)


@part
@no_type_check
def number(address, i, half):
    """One number of a row, of bfloat16 where it is `half`, as float32."""
    if half:
        return np.int32(np.int32(halves(address)[i]) << 16).view(np.float32)
    return floats(address)[i]


@part
@no_type_check
def keep(row, width, bits, group, rotated, codes, scales):
    """Rotate a row of float32 numbers in place, and write its codes, scales and zeros."""
    mix(row, rotated)
    x = carray(floats(row), (width,))
    out = carray(octets(codes), (bytes_of(width, bits),))
    pairs = carray(halves(scales), ((width + group - 1) // group, 2))
    encode(x, out, pairs, width, bits, group)


@part
@no_type_check
def mix(row, channels):
    """Multiply blocks of channels by Hadamard matrices in place: `log2(block)` rounds of sums and
    differences, for blocks of the powers of two that add up to `channels`."""
    x, start, block = floats(row), 0, 1
    while 2 * block <= channels:
        block *= 2
    while block > 1:
        if channels & block:
            step = 1
            while step < block:
                for i in range(start, start + block, 2 * step):
                    for j in range(i, i + step):
                        a, b = x[j], x[j + step]
                        x[j], x[j + step] = a + b, a - b
                step *= 2
            root = np.float32(1 / math.sqrt(block))
            for j in range(start, start + block):
                x[j] *= root
            start += block
        block //= 2


@functools.cache
@no_type_check
def mixing() -> Callable[[int, int, int, int], None]:
    """A C function that rotates rows of float32 numbers in place: of their address, their number,
    their width, and the number of channels that are rotated."""

    def mix_rows(rows, count, width, channels):
        for i in range(count):
            mix(rows + 4 * i * width, channels)

    compiled = compiled_from(mix_rows, SIGNATURE, *SOURCES)
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(compiled.address)
    run.owner = compiled  # the machine code, alive as long as the function
    return run
