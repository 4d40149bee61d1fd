"""Outputs of heads from their sums of latents: products with the weights of the values, which were
absorbed. Sums are in float32, as the outputs are.
"""

import functools
import struct
from typing import Any, NamedTuple, no_type_check

import numba
import numpy as np
from numba import carray, types

from regard.compiling import compiled_from, summing_part
from regard.ops.kernels import encoding, intrinsics
from regard.ops.kernels.encoding import number
from regard.ops.kernels.intrinsics import floats, next_number


class AbsorbedValues(NamedTuple):
    """One call. Addresses are in bytes."""

    rows: int  # query heads of all sequences; those that share a key head are neighbours
    heads: int  # key heads, G
    group: int  # query heads of a key head
    rank: int  # numbers of a latent, R
    apart: int  # from the sums of a row to those of the next one, in numbers
    width: int  # of a value, Dv
    sums: int  # address of the sums of latents, in float32
    weights: int  # address of the weights [G, Dv, R], contiguous
    out: int  # address of the outputs [rows, Dv], contiguous float32
    counter: int  # address of a zeroed int64 counter of rows


RECORD = np.dtype([(name, np.int64) for name in AbsorbedValues._fields])  # as the kernel reads it
PACKED = struct.Struct(f"{len(AbsorbedValues._fields)}q")  # the same, as Python packs it
SIGNATURE = types.void(types.CPointer(numba.from_dtype(RECORD)))


@functools.cache
@no_type_check
def kernel(half: bool) -> Any:
    """The machine code for weights of bfloat16 or float32: a C function of the address of a record,
    which any number of threads run together."""
    item = 2 if half else 4

    def apply(data):
        call = carray(data, 1)[0]
        while True:
            row = next_number(call.counter)
            if row >= call.rows:
                break
            head = row // call.group % call.heads
            sums, out = call.sums + 4 * row * call.apart, floats(call.out + 4 * row * call.width)
            weights = call.weights + item * head * call.width * call.rank
            for i in range(call.width):
                out[i] = product(sums, weights + item * i * call.rank, call.rank, half)

    return compiled_from(apply, SIGNATURE, encoding, intrinsics)


@summing_part
@no_type_check
def product(x, weights, count, half):
    """The sum of the products of numbers with weights."""
    numbers, total = floats(x), np.float32(0)
    for i in range(count):
        total += numbers[i] * number(weights, i, half)
    return total
