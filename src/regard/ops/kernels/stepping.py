"""A decoding step in two calls of compiled code: rotate and append one token, then attend.

The operators that do the same take several times as long as their work in a small layer.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.ops.kernels import appending
from regard.ops.kernels.launching import (
    LOG2E,
    NOWHERE,
    Place,
    compiled,
    lanes_for,
    memory,
    place_of,
)
from regard.ops.kernels.threads import launch
from regard.ops.kernels.tiles import PACKED

Angles = tuple[Tensor, Tensor]  # cosines and signed sines in float32: [rotated] or [B, rotated]


class Buffers(NamedTuple):
    """Where a cache holds keys and values, `[B, G, room, D]` and `[B, G, room, Dv]`."""

    dtype: torch.dtype
    batch: int
    kv_heads: int
    room: int  # tokens
    width: int
    value_width: int
    keys: Place
    values: Place

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> "Buffers":
        """The buffers that these tensors are; they must live as long as this."""
        (b, g, room, d), dv = keys.shape, values.shape[3]
        shapes = (b, g, room, d), (b, g, room, dv)
        pairs = zip((keys, values), shapes, strict=True)
        places = [place_of("buffer", each, keys.dtype, shape) for each, shape in pairs]
        return cls(keys.dtype, b, g, room, d, dv, *places)


def step(
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B G 1 D"],
    v: Float[Tensor, "B G 1 Dv"],
    buffers: Buffers,
    length: int,
    *,
    angles: Angles | None = None,
    neighbours: bool = False,
    scale: float,
) -> Float[Tensor, "B H 1 Dv"]:
    """Append keys and values to the `length` tokens of the buffers; attend to all of them.

    Queries and keys are rotated before, by `angles`; `neighbours` says whether a pair is two
    neighbouring channels. The output has the dtype of the queries.
    """
    dtype, b, g, room, d, dv, keys, values = buffers
    h = q.shape[1]
    half, item, m = dtype is torch.bfloat16, dtype.itemsize, h // g
    assert h == g * m and 0 <= length < room, (h, g, length, room)
    lanes = lanes_for(d, dv, dtype, joined=False)
    tile, address = compiled(m, d, dv, half, False, False, lanes)
    threads = torch.get_num_threads()
    ranges, range_keys = tile.ranges(length + 1, b * g, threads)
    threads = min(threads, b * g * ranges)
    *places, rotated = memory(tile, m, b * g, ranges, threads, (4 * m * g + item * h * d) * b)
    lse = rotated + item * h * d * b
    _append(q, k, v, buffers, length, angles, neighbours, rotated)
    out = torch.empty(b, h, 1, dv, dtype=torch.float32, device="cpu")
    data = PACKED.pack(
        b, g, m, length + 1, rotated, h * d, m * d, d, *keys, *values, *NOWHERE, *NOWHERE,
        *NOWHERE, *NOWHERE, out.data_ptr(), lse, *places, ranges, range_keys, scale * LOG2E,
    )  # fmt: skip
    launch(address, data, threads)
    return out.to(dtype) if half else out


def _append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buffers: Buffers,
    length: int,
    angles: Angles | None,
    neighbours: bool,
    target: int,
) -> None:
    """Rotated queries at the address `target`; keys and values in the slot `length`."""
    dtype, b, g, _, d, dv, keys, values = buffers
    h, item = q.shape[1], dtype.itemsize
    rotated, *tables = _tables(angles, b)
    data = appending.PACKED.pack(
        b, h, g, d, dv, rotated,
        *place_of("q", q, dtype, (b, h, 1, d))[:3],
        *place_of("k", k, dtype, (b, g, 1, d))[:3],
        *place_of("v", v, dtype, (b, g, 1, dv))[:3],
        *tables, target,
        keys[0] + item * length * keys[3], keys[1], keys[2],
        values[0] + item * length * values[3], values[1], values[2],
    )  # fmt: skip
    _appender(dtype is torch.bfloat16, neighbours)(data)


def _tables(angles: Angles | None, batch: int) -> tuple[int, int, int, int]:
    """The channels that are rotated, the addresses of cosines and sines, and their row stride."""
    if angles is None:
        return 0, 0, 0, 0
    cos, sin = angles
    rows = cos.stride(0) if cos.dim() == 2 and cos.shape[0] > 1 else 0
    assert cos.dtype is sin.dtype is torch.float32 and cos.stride() == sin.stride()
    assert cos.shape == sin.shape and cos.stride(-1) == 1 and (not rows or len(cos) == batch)
    return cos.shape[-1], cos.data_ptr(), sin.data_ptr(), rows


@functools.cache
def _appender(half: bool, neighbours: bool) -> Callable[[bytes], None]:
    address = appending.kernel(half, neighbours).address
    return ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)
