"""A decoding step over pages in compiled code: rotate and append the new token of each row to its
page, then attend to the pages of all rows."""

from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from regard.ops.kernels import appending
from regard.ops.kernels.launching import (
    LOG2E,
    NO_LATENTS,
    NOWHERE,
    Place,
    compiled,
    lanes_for,
    memory,
    place_if_readable,
    table_of,
)
from regard.ops.kernels.stepping import (
    Angles,
    Rotation,
    append_kernel,
    place_of_buffer,
    rotation_of,
    slot,
)
from regard.ops.kernels.threads import launch
from regard.ops.kernels.tiles import PACKED, KeyPages, Tile

_NONE = NOWHERE[:3]  # of scales, which numbers do not have


class PagedPlan(NamedTuple):
    """The compiled code of a step over pages of given sizes, as `Plan` is over a buffer."""

    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    page: int  # tokens
    tile: Tile
    address: int

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        batch: int,
        heads: int,
        kv_heads: int,
        width: int,
        value_width: int,
        page: int,
    ) -> "PagedPlan":
        """The plan for tensors of these sizes, and pages of so many tokens."""
        lanes, half = lanes_for(width, value_width, dtype, joined=False), dtype is torch.bfloat16
        tile = compiled(
            heads // kv_heads, width, value_width, half, False, False, lanes, None, None, page
        )
        return cls(dtype, batch, heads, kv_heads, width, value_width, page, *tile)

    def run(
        self,
        q: Float[Tensor, "B H 1 D"],
        k: Float[Tensor, "B G 1 D"],
        v: Float[Tensor, "B G 1 Dv"],
        keys: Float[Tensor, "1 G tokens D"],
        values: Float[Tensor, "1 G tokens Dv"],
        table: Int64[Tensor, "B pages"],
        length: int,
        *,
        angles: Angles | None = None,
        signed: bool = True,
        scale: float,
    ) -> Float[Tensor, "B H 1 Dv"] | None:
        """Append k and v to the `length` tokens of each row in the pages of `table`; attend to all.

        Queries and keys are rotated before, as by `Plan.run`. None, and nothing is written, if a
        tensor has other sizes, or does not lie as the kernel reads it.
        """
        dtype, b, h, g, d, dv, page, tile, address = self
        rotation, at = rotation_of(angles, b, d, signed), self._places(q, k, v, keys, values)
        if rotation is None or at is None:
            return None
        pages = table_of(KeyPages(table, page, 0, length + 1), b, keys.shape[2])
        m, threads = h // g, torch.get_num_threads()
        ranges, range_keys = tile.ranges(length + 1, b * g, threads)
        threads = min(threads, b * g * ranges)
        queries, spare = dtype.itemsize * h * d * b, 8 * max(d, dv)
        *places, rotated = memory(tile, m, b * g, ranges, threads, 4 * m * g * b + queries + spare)
        append = append_kernel(dtype is torch.bfloat16, False)
        for row, number in enumerate(table[:, length // page].tolist()):
            append(self._record(row, page * number + length % page, at, rotation, rotated))
        out = torch.empty(b, h, 1, dv, dtype=torch.float32, device="cpu")
        launch(address, PACKED.pack(
            b, g, m, length + 1, rotated, h * d, m * d, d, *at[3], *at[4], *NOWHERE, *NOWHERE,
            *pages, *NO_LATENTS, *NOWHERE, out.data_ptr(), rotated + queries + spare, *places,
            ranges, range_keys, scale * LOG2E,
        ), threads)  # fmt: skip
        return out.to(dtype)

    def _places(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Place, ...] | None:
        """The addresses and strides of queries, keys, values and the memory of both; None if one of
        them is unusable."""
        dtype, b, h, g, d, dv = self[:6]
        found = (
            place_if_readable(q, dtype, (b, h, 1, d)),
            place_if_readable(k, dtype, (b, g, 1, d)),
            place_if_readable(v, dtype, (b, g, 1, dv)),
            place_of_buffer(keys, 0, dtype, (1, g, d)),
            place_of_buffer(values, 0, dtype, (1, g, dv)),
        )
        if None in found or keys.shape[2] != values.shape[2]:
            return None
        return cast("tuple[Place, ...]", found)

    def _record(
        self, row: int, new: int, at: tuple[Place, ...], rotation: Rotation, target: int
    ) -> bytes:
        """The `Append` record of one row, whose new token is that of number `new` in the memory;
        rotated queries of all rows go to the address `target`."""
        dtype, b, h, g, d, dv = self[:6]
        rotated, sign, cos, sin, apart = rotation
        item, size = dtype.itemsize, dtype.itemsize * h * d
        q, k, v = ((place + item * row * batch, 0, head) for place, batch, head, _ in at[:3])
        return appending.PACKED.pack(
            1, h, g, d, d, dv, rotated, rotated, sign, cos + 4 * row * apart, sin + 4 * row * apart,
            0, *q, *k, *v, target + row * size, *slot(at[3], new, item), *slot(at[4], new, item),
            *_NONE, *_NONE, target + b * size,
        )  # fmt: skip
