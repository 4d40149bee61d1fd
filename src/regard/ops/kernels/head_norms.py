"""RMSNorms of few short rows in place (arXiv:1910.07467): of the heads of queries and keys before
rotation, and of the last hidden states. Squares are summed in float32, the result is rounded once.
"""

import functools
import math
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple, no_type_check

import numba
import numpy as np
import torch
from numba import carray, types

from regard.compiling import compiled_from, part
from regard.ops.kernels import appending, encoding, intrinsics
from regard.ops.kernels.appending import put
from regard.ops.kernels.chaining import Norm
from regard.ops.kernels.encoding import number


class HeadNorm(NamedTuple):
    """The norm of some rows: all heads of the queries, or of the keys. Addresses are in bytes."""

    x: int  # address of [rows, width], contiguous
    rows: int
    width: int
    weight: int  # address of [width]
    shift: float  # added to the weight
    eps: float  # added to the mean square


_FLOATS = ("shift", "eps")
_NORM = np.dtype([(name, np.float64 if name in _FLOATS else np.int64) for name in HeadNorm._fields])
RECORD = np.dtype([("each", _NORM, (2,))])  # as the kernel reads it
PACKED = struct.Struct("4q2d")  # each of the two, as Python packs it
Rows = tuple[int, int, int]  # address, number and width
SIGNATURE = types.void(types.CPointer(numba.from_dtype(RECORD)))


def record(norms: Iterable[tuple[Rows, Norm]]) -> bytes:
    """The record of at most two norms."""
    packed = (
        PACKED.pack(*rows, norm.weight.data_ptr(), norm.shift, norm.eps) for rows, norm in norms
    )
    return b"".join(packed).ljust(RECORD.itemsize, b"\0")


@functools.cache
@no_type_check
def kernel(half: bool) -> Any:
    """The machine code for bfloat16 or float32: a C function of the address of one record."""
    item = 2 if half else 4

    def norm_heads(data):
        call = carray(data, 1)[0]
        for i in range(2):
            norm = call.each[i]
            for row in range(norm.rows):
                norm_row(norm, norm.x + item * row * norm.width, half)

    return compiled_from(norm_heads, SIGNATURE, appending, encoding, intrinsics)


def address(dtype: torch.dtype) -> int:
    """The address of the machine code."""
    return int(kernel(dtype is torch.bfloat16).address)


@part
@no_type_check
def norm_row(norm, row, half):
    """A row over the root of its mean square, times the weight."""
    total = np.float32(0)
    for i in range(norm.width):
        x = number(row, i, half)
        total += x * x
    mean = total / np.float32(norm.width) + np.float32(norm.eps)
    factor = np.float32(1) / np.float32(math.sqrt(mean))
    for i in range(norm.width):
        weight = number(norm.weight, i, half) + np.float32(norm.shift)
        put(row, i, number(row, i, half) * factor * weight, half)
