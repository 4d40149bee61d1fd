"""A decoding step in two calls of compiled code: rotate and append one token, then attend.

The operators that do the same take several times as long as their work in a small layer.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regard.ops.kernels import appending
from regard.ops.kernels.launching import (
    LOG2E,
    NOWHERE,
    Place,
    compiled,
    is_plain,
    lanes_for,
    memory,
    place_if_readable,
)
from regard.ops.kernels.threads import launch
from regard.ops.kernels.tiles import PACKED, Tile

Angles = tuple[Tensor, Tensor]  # cosines and sines, [rotated] or [1 or B, 1, rotated], float32
Rotation = tuple[int, int, int, int, int]  # as `Append` has it


class Plan(NamedTuple):
    """The compiled code of a decoding step for tensors of given sizes, which any number of steps
    and layers share. It holds no address, stride or shape of a tensor."""

    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    tile: Tile
    address: int

    @classmethod
    def of(
        cls, dtype: torch.dtype, batch: int, heads: int, kv_heads: int, width: int, value_width: int
    ) -> "Plan":
        """The plan for tensors of these sizes."""
        lanes, half = lanes_for(width, value_width, dtype, joined=False), dtype is torch.bfloat16
        group = heads // kv_heads
        machine_code = compiled(group, width, value_width, half, False, False, lanes)
        return cls(dtype, batch, heads, kv_heads, width, value_width, *machine_code)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        length: int,
        *,
        angles: Angles | None = None,
        neighbours: bool = False,
        signed: bool = True,
        scale: float,
    ) -> Float[Tensor, "B H 1 Dv"] | None:
        """Append k and v to the `length` tokens in the buffers `keys` and `values`; attend to all.

        q is `[B, H, 1, D]`, k and v `[B, G, 1, D]`, the buffers `[B, G, room, D]`. Queries and keys
        are rotated before, by `angles`; `neighbours` says whether a pair is two neighbouring
        channels, and `signed` whether the sine of a pair's first channel is negative already. None,
        and nothing is written, if a tensor has other sizes, or does not lie as the kernel reads it.
        """
        dtype, b, h, g, d, dv, tile, address = self
        rotation = _rotation(angles, b, d, signed)
        at = _places(q, k, v, keys, values, length, self)
        if rotation is None or at is None:
            return None
        half, item, m = dtype is torch.bfloat16, dtype.itemsize, h // g
        threads = torch.get_num_threads()
        ranges, range_keys = tile.ranges(length + 1, b * g, threads)
        threads = min(threads, b * g * ranges)
        *places, rotated = memory(tile, m, b * g, ranges, threads, (4 * m * g + item * h * d) * b)
        lse = rotated + item * h * d * b
        _append(at, length, self, rotation, neighbours, rotated)
        out = torch.empty(b, h, 1, dv, dtype=torch.float32, device="cpu")
        data = PACKED.pack(
            b, g, m, length + 1, rotated, h * d, m * d, d, *at[3], *at[4], *NOWHERE, *NOWHERE,
            *NOWHERE, *NOWHERE, out.data_ptr(), lse, *places, ranges, range_keys, scale * LOG2E,
        )  # fmt: skip
        launch(address, data, threads)
        return out.to(dtype) if half else out


def _places(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, length: int, plan: Plan
) -> tuple[Place, ...] | None:
    """The addresses and strides of queries, keys, values and buffers; None if unusable."""
    dtype, b, h, g, d, dv = plan[:6]
    found = (
        place_if_readable(q, dtype, (b, h, 1, d)),
        place_if_readable(k, dtype, (b, g, 1, d)),
        place_if_readable(v, dtype, (b, g, 1, dv)),
        _place_of_buffer(keys, length, dtype, (b, g, d)),
        _place_of_buffer(values, length, dtype, (b, g, dv)),
    )
    return None if None in found else cast("tuple[Place, ...]", found)


def _place_of_buffer(
    x: Tensor, length: int, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> Place | None:
    """The address and strides of a buffer `[B, G, room, W]`; None if it has no room for another
    token, or if elements share memory, as in an expanded tensor."""
    shape, (batch, heads, width) = x.shape, sizes
    if len(shape) != 4 or shape[2] <= length or not x.is_contiguous():
        return None
    return place_if_readable(x, dtype, (batch, heads, shape[2], width))


def _append(
    at: tuple[Place, ...],
    length: int,
    plan: Plan,
    rotation: Rotation,
    neighbours: bool,
    target: int,
) -> None:
    """Rotated queries at the address `target`; keys and values in the slot `length`."""
    q, k, v, keys, values = at
    dtype, b, h, g, d, dv = plan[:6]
    item = dtype.itemsize
    data = appending.PACKED.pack(
        b, h, g, d, dv, *rotation, *q[:3], *k[:3], *v[:3], target,
        keys[0] + item * length * keys[3], keys[1], keys[2],
        values[0] + item * length * values[3], values[1], values[2],
    )  # fmt: skip
    _appender(dtype is torch.bfloat16, neighbours)(data)


def _rotation(angles: Angles | None, batch: int, width: int, signed: bool) -> Rotation | None:
    """The channels that are rotated, the sign of the first sine of a pair, and where the angles
    lie: cosines, sines, and the stride of their rows. None if the kernel cannot read them."""
    if angles is None:
        return 0, 1, 0, 0, 0
    cos, sin = angles
    shape, stride, rotated = cos.shape, cos.stride(), cos.shape[-1]
    rows = 1 if len(shape) == 1 else shape[0]
    if sin.shape != shape or sin.stride() != stride or stride[-1] != 1:
        return None
    if cos.numel() != rows * rotated or rows not in (1, batch) or rotated % 2 or rotated > width:
        return None
    if cos.dtype is not torch.float32 or sin.dtype is not torch.float32 or not is_plain(cos, sin):
        return None
    apart = stride[0] if rows > 1 else 0
    return rotated, 1 if signed else -1, cos.data_ptr(), sin.data_ptr(), apart


@functools.cache
def _appender(half: bool, neighbours: bool) -> Callable[[bytes], None]:
    address = appending.kernel(half, neighbours).address
    return ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)
