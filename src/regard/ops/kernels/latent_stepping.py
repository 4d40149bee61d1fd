"""A decoding step over a joint latent in two calls of compiled code: rotate the queries and append
the latent, then rebuild the keys of each block of tokens and attend.

Values are the latents themselves, as the weights of the values are absorbed.
"""

from collections.abc import Sequence
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
    has_beyond,
    is_plain,
    lanes_of_latents,
    latent_format,
    memory,
    place_if_readable,
)
from regard.ops.kernels.stepping import (
    Rotation,
    append_kernel,
    place_of_buffer,
    rotation_of,
    slot,
)
from regard.ops.kernels.threads import launch
from regard.ops.kernels.tiles import PACKED, Latents, Tile

_NONE = NOWHERE[:3]  # of values and scales, which the step does not append


class LatentPlan(NamedTuple):
    """The compiled code of a step over latents of given sizes, as `Plan` is of keys and values."""

    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    width: int
    rank: int
    rotated: int
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
        rank: int,
        rotated: int,
    ) -> "LatentPlan":
        """The plan for queries and keys of this width, of which so many channels are rotated."""
        lanes = lanes_of_latents(width, rank, rotated)
        half, keys = dtype is torch.bfloat16, latent_format(dtype, rank, rotated, lanes)
        whole = -(-rank // lanes) * lanes
        tile = compiled(heads // kv_heads, width, whole, half, False, False, lanes, keys, None, 0)
        return cls(dtype, batch, heads, kv_heads, width, rank, rotated, *tile)

    def run(
        self, q: Tensor, latent: Tensor, held: Tensor, length: int, keys: Latents, scale: float
    ) -> Float[Tensor, "B H 1 R"] | None:
        """Append the latent to the `length` tokens in the buffer `held`; attend to all.

        q is `[B, H, 1, D]`, rotated by the angles of the new token, the last of `keys.positions`;
        latent is `[B, 1, 1, R]`, the buffer `[B, 1, room, R]`. The output is the sum of latents of
        each head, in float32. None, and nothing is written, if a tensor has other sizes, or does
        not lie as the kernel reads it.
        """
        dtype, b, h, g, d, rank, rotated, tile, address = self
        at = self._places(q, latent, held, length, keys)
        if at is None:
            return None
        of_q, of_latent, of_held, *_ = at
        new = keys.positions[:, 0, -1, 0].long()
        # alive until the kernel has read them
        angles = (keys.cos[new], keys.sin[new]) if rotated else None
        rotation = rotation_of(angles, b, d, signed=True)
        assert rotation is not None
        m, threads = h // g, torch.get_num_threads()
        ranges, range_keys = tile.ranges(length + 1, b * g, threads)
        threads = min(threads, b * g * ranges)
        queries, spare = self.query_bytes, self.spare_bytes
        *places, turned = memory(tile, m, b * g, ranges, threads, 4 * m * g * b + queries + spare)
        append_kernel(dtype is torch.bfloat16, False)(
            self.append_record(of_q, of_latent, of_held, length, rotation, turned)
        )
        out = torch.empty(b, h, 1, tile.value_width, dtype=torch.float32, device="cpu")
        results = out.data_ptr(), turned + queries + spare, *places
        record = self.attend_record(
            of_held, length + 1, turned, keys, results, (ranges, range_keys), scale
        )
        launch(address, record, threads)
        return out[..., :rank]

    @property
    def query_bytes(self) -> int:
        """Of the rotated queries."""
        return self.dtype.itemsize * self.heads * self.width * self.batch

    @property
    def spare_bytes(self) -> int:
        """Of two rows of float32, which appending may use."""
        return 8 * max(self.width, self.rank)

    def append_record(
        self, q: Sequence[int], latent: Sequence[int], held: Place, length: int,
        rotation: Rotation, target: int,
    ) -> bytes:  # fmt: skip
        """The call that rotates queries to the address `target` and appends a latent."""
        return appending.PACKED.pack(
            self.batch, self.heads, 1, self.width, self.rank, 0, 0, *rotation, *q[:3], *latent[:3],
            *_NONE, target, *slot(held, length, self.dtype.itemsize), *_NONE, *_NONE, *_NONE,
            *_NONE, target + self.query_bytes,
        )  # fmt: skip

    def attend_record(
        self, held: Place, keys: int, rotated: int, latents: Latents, memory: Sequence[int],
        ranges: tuple[int, int], scale: float,
    ) -> bytes:  # fmt: skip
        """The call that attends to so many `keys`; `memory` is as in `Plan.attend_record`."""
        b, h, g, d = self[1:5]
        m, of_keys = h // g, (held[0], held[1], 0, held[3])  # all heads read the same latents
        weights, positions, cos, sin = latents
        batch, row = positions.stride(0) if b > 1 else 0, positions.stride(2)
        where = weights.data_ptr(), cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), batch, row
        return PACKED.pack(
            b, g, m, keys, rotated, h * d, m * d, d, *of_keys, *of_keys, *NOWHERE, *NOWHERE,
            *NOWHERE, *where, *NOWHERE, *memory, *ranges, scale * LOG2E,
        )  # fmt: skip

    def _places(
        self, q: Tensor, latent: Tensor, held: Tensor, length: int, keys: Latents
    ) -> tuple[Place, ...] | None:
        """The addresses and strides of queries, latent, buffer, weights and positions; None if one
        of them, or a table, is unusable."""
        dtype, b, h, g, d, rank, rotated, tile, _ = self
        found = (
            place_if_readable(q, dtype, (b, h, 1, d)),
            place_if_readable(latent, dtype, (b, 1, 1, rank)),
            place_of_buffer(held, length, dtype, (b, 1, rank)),
            place_if_readable(keys.weights, dtype, (g, d, rank)),
            place_if_readable(keys.positions, torch.int32, (b, 1, length + 1, 1)),
        )
        assert keys.cos.shape[1] == rotated and keys.cos.is_contiguous() and is_plain(keys.cos)
        assert keys.sin.shape == keys.cos.shape and keys.sin.is_contiguous() and is_plain(keys.sin)
        if None in found:
            return None
        beyond = tile.value_width - rank  # the kernel reads whole vectors of a latent
        if beyond and not has_beyond(held.narrow(2, 0, length + 1), beyond):
            return None
        return cast("tuple[Place, ...]", found)
