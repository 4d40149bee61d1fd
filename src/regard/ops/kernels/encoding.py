"""Parts of a decoding step for caches of codes: Hadamard rotation and quantisation of one row.

They are compiled into the kernel that appends a token; `cache/rotation.py` and `cache/codes.py`
define what they compute.
"""

import ctypes
import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, cast, no_type_check

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

SIGNATURE = types.void(types.CPointer(types.int64))
MIXED = struct.Struct("4q")  # address of rows, their number and width, channels that are rotated
TURNED = struct.Struct("5q")  # addresses of rows and of the results; as `MIXED`
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
def mix_kernel() -> Any:
    """The machine code that rotates rows of float32 numbers in place: a C function of the address
    of `MIXED`."""

    def mix_rows(data):
        rows, count, width, channels = data[0], data[1], data[2], data[3]
        for i in range(count):
            mix(rows + 4 * i * width, channels)

    return compiled_from(mix_rows, SIGNATURE, *SOURCES)


@functools.cache
@no_type_check
def turn_kernel(half: bool) -> Any:
    """The machine code that writes rows of bfloat16 or float32 numbers in float32, rotated: a C
    function of the address of `TURNED`."""

    def turn_rows(data):
        source, target, count, width, channels = data[0], data[1], data[2], data[3], data[4]
        for i in range(count):
            row = target + 4 * i * width
            widen(source + (2 if half else 4) * i * width, row, width, half)
            mix(row, channels)

    return compiled_from(turn_rows, SIGNATURE, *SOURCES)


def mix_all(rows: int, count: int, width: int, channels: int) -> None:
    """Rotate so many rows at an address, each of `width` numbers: the first `channels` of them."""
    run = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(mix_kernel().address)
    run(MIXED.pack(rows, count, width, channels))
