"""What comes before attention in a decoding step, as one loop that numba compiles.

The queries and keys of one new token of each row are rotated (RoPE), and its keys and values are
written to the buffers of a cache, as they are or as codes. The arithmetic is that of `Rotary`:
float32, rounded once.
"""

import functools
import struct
from typing import Any, NamedTuple, no_type_check

import numba
import numpy as np
from numba import carray, types

from regard.compiling import compiled_from, part
from regard.ops.kernels import encoding
from regard.ops.kernels.encoding import SOURCES, Codes, keep, mix, number, widen
from regard.ops.kernels.intrinsics import floats, fused, halves, numbers

ROUND = np.int32(0x7FFF)  # added to a float32's bits to round to the nearest bfloat16, with the
QUIET_NAN = np.int16(0x7FC0)  # lowest bit that stays; a NaN's bits would overflow


class Append(NamedTuple):
    """One call. Addresses are in bytes, strides in elements of their tensor."""

    batch: int  # sequences, B
    heads: int  # query heads, H
    kv_heads: int  # key heads, G
    width: int  # of a query, D
    key_width: int  # of a key, D; of a latent that stands for keys, R
    value_width: int  # of a value, Dv
    key_rotated: int  # channels of a key that are rotated: the first ones
    rotated: int  # the same of a query
    sign: int  # -1 where the first sine of a pair is to be negated, 1 where it is negative already
    cos: int  # address of the cosines [1 or B, rotated] in float32
    sin: int  # address of the sines
    angles_batch: int  # stride of both; 0 where all rows have the same position
    q: int  # address of the queries [B, H, 1, D]
    q_batch: int
    q_head: int
    k: int  # address of the keys [B, G, 1, D], or of the latents [B, 1, 1, R]
    k_batch: int
    k_head: int
    v: int  # address of the values [B, G, 1, Dv]
    v_batch: int
    v_head: int
    out: int  # address of the rotated queries [B, H, D], contiguous
    keys: int  # address of the new keys' slot in the buffer
    keys_batch: int
    keys_head: int
    values: int  # address of the new values' slot in the buffer
    values_batch: int
    values_head: int
    slots: int  # address of [B] tokens in int64, counted from `keys` and `values`: the slot of each
    # row of the batch, which is then no stride apart; 0 where it is
    keys_row: int  # from the keys of a token to those of the next one
    values_row: int
    k_scales: int  # address of the slot of the keys' scales in bfloat16; all 0 without codes
    k_scales_batch: int
    k_scales_head: int
    v_scales: int  # the same of the values
    v_scales_batch: int
    v_scales_head: int
    spare: int  # address of memory for two rows of float32


RECORD = np.dtype([(name, np.int64) for name in Append._fields])  # as the kernel reads it
PACKED = struct.Struct(f"{len(Append._fields)}q")  # the same, as Python packs it
SIGNATURE = types.void(types.CPointer(numba.from_dtype(RECORD)))


@functools.cache
@no_type_check
def kernel(half: bool, neighbours: bool, keys: Codes, values: Codes) -> Any:
    """The machine code for bfloat16 or float32, for pairs of neighbouring channels or of channels
    half the rotated width apart, and for keys and values that are stored so: a C function of the
    address of one `Append` record."""
    item, wide = 2 if half else 4, widens(keys, values)
    out_item = 4 if wide else item
    k_item, v_item = 1 if keys.bits else item, 1 if values.bits else item
    k_bits, k_group, k_rotated = keys
    v_bits, v_group, v_rotated = values

    def append(data):
        call = carray(data, 1)[0]
        row = call.spare + 4 * max(call.width, call.key_width, call.value_width)
        for b in range(call.batch):
            cos = floats(call.cos + 4 * b * call.angles_batch)
            sin = floats(call.sin + 4 * b * call.angles_batch)
            sign = np.float32(call.sign)
            for h in range(call.heads):
                source = call.q + item * (b * call.q_batch + h * call.q_head)
                target = call.out + out_item * (b * call.heads + h) * call.width
                rotate(source, call.spare if wide else target, cos, sin, sign, call.rotated,
                       call.width, half, neighbours)  # fmt: skip
                if wide:
                    widen(call.spare, target, call.width, half)
                    mix(target, k_rotated)
            for g in range(call.kv_heads):
                source = call.k + item * (b * call.k_batch + g * call.k_head)
                row_at = slot(call.slots, b, call.keys_row, call.keys_batch)
                target = call.keys + k_item * (row_at + g * call.keys_head)
                rotate(source, call.spare if k_bits else target, cos, sin, sign,
                       call.key_rotated, call.key_width, half, neighbours)  # fmt: skip
                if k_bits:
                    scales = call.k_scales + 2 * (b * call.k_scales_batch + g * call.k_scales_head)
                    widen(call.spare, row, call.key_width, half)
                    keep(row, call.key_width, k_bits, k_group, k_rotated, target, scales)
                source = call.v + item * (b * call.v_batch + g * call.v_head)
                row_at = slot(call.slots, b, call.values_row, call.values_batch)
                target = call.values + v_item * (row_at + g * call.values_head)
                if v_bits:
                    scales = call.v_scales + 2 * (b * call.v_scales_batch + g * call.v_scales_head)
                    widen(source, row, call.value_width, half)
                    keep(row, call.value_width, v_bits, v_group, v_rotated, target, scales)
                else:
                    copy(source, target, 0, call.value_width, half)

    return compiled_from(append, SIGNATURE, encoding, *SOURCES)


def widens(keys: Codes, values: Codes) -> bool:
    """Whether queries stay float32: after a Hadamard rotation of a stream they are not rounded."""
    return bool(keys.rotated or values.rotated)


@part
@no_type_check
def rotate(source, target, cos, sin, sign, rotated, width, half, neighbours):
    """`(a cos - b sin, b cos + a sin)` of each pair, the second product not rounded, as torch's
    operator does; the channels after them are copied."""
    for i in range(rotated // 2):
        first = 2 * i if neighbours else i
        second = first + 1 if neighbours else i + rotated // 2
        a, b = number(source, first, half), number(source, second, half)
        put(target, first, fused(sign * b, sin[first], a * cos[first]), half)
        put(target, second, fused(a, sin[second], b * cos[second]), half)
    copy(source, target, rotated, width, half)


@part
@no_type_check
def slot(slots, b, row, batch):
    """Elements from a buffer's address to the slot of a row of the batch."""
    return numbers(slots)[b] * row if slots != 0 else b * batch


@part
@no_type_check
def copy(source, target, first, stop, half):
    """The channels from `first` to `stop`, bit by bit."""
    if half:
        words, copies = halves(source), halves(target)
        for i in range(first, stop):
            copies[i] = words[i]
    else:
        numbers, same = floats(source), floats(target)
        for i in range(first, stop):
            same[i] = numbers[i]


@part
@no_type_check
def put(address, i, x, half):
    """Write a number, rounded to the nearest bfloat16, of two to the even one."""
    if half:
        word = np.float32(x).view(np.int32)
        rounded = np.int16((word + ROUND + ((word >> 16) & 1)) >> 16)
        halves(address)[i] = rounded if x == x else QUIET_NAN
    else:
        floats(address)[i] = x
