"""A decoding step in two calls of compiled code: rotate and append one token, then attend.

The operators that do the same take several times as long as their work in a small layer.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regard.cache.codes import QuantizedStream
from regard.cache.parts import AnyStream
from regard.ops.kernels import appending
from regard.ops.kernels.appending import widens
from regard.ops.kernels.encoding import NUMBERS, Codes, mix_all, stored_as
from regard.ops.kernels.launching import (
    LOG2E,
    NO_LATENTS,
    NOWHERE,
    Place,
    compiled,
    is_plain,
    lanes_for,
    memory,
    place_if_readable,
)
from regard.ops.kernels.threads import launch
from regard.ops.kernels.tiles import PACKED, Format, Tile
from regard.ops.kernels.vectors import multiplies_words

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
    keys: Codes
    values: Codes
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
        keys: Codes = NUMBERS,
        values: Codes = NUMBERS,
        *,
        biased: bool = False,
    ) -> "Plan":
        """The plan for tensors of these sizes, and buffers of numbers or of codes; `biased` for
        steps with a `bias`."""
        lanes, group = lanes_for(width, value_width, dtype, joined=False), heads // kv_heads
        half = dtype is torch.bfloat16 and not widens(keys, values)
        forms = [Format(each.bits, each.group) if each.bits else None for each in (keys, values)]
        keys_and_values = *forms, 0, dtype is torch.bfloat16 and multiplies_words(lanes)
        machine_code = compiled(
            group, width, value_width, half, False, biased, lanes, *keys_and_values
        )
        return cls(dtype, batch, heads, kv_heads, width, value_width, keys, values, *machine_code)

    @property
    def item(self) -> int:
        """Bytes of a rotated query's number."""
        return 4 if widens(self.keys, self.values) else self.dtype.itemsize

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: AnyStream,
        values: AnyStream,
        length: int,
        *,
        angles: Angles | None = None,
        neighbours: bool = False,
        signed: bool = True,
        scale: float,
        bias: Float[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B H 1 Dv"] | None:
        """Append k and v to the `length` tokens in the buffers `keys` and `values`; attend to all.

        q is `[B, H, 1, D]`, k and v `[B, G, 1, D]`, the buffers `[B, G, room, D]` or codes of as
        many. Queries and keys are rotated before, by `angles`; `neighbours` says whether a pair is
        two neighbouring channels, and `signed` whether the sine of a pair's first channel is
        negative already. `bias` is added to the scores of all heads: 0, or -inf of keys that are
        hidden; contiguous, in float32. None, and nothing is written, if a tensor has other sizes,
        or does not lie as the kernel reads it.
        """
        dtype, b, h, g, d, dv = self[:6]
        rotation = rotation_of(angles, b, d, signed)
        at = _places(q, k, v, keys, values, length, self)
        if rotation is None or at is None:
            return None
        assert (bias is not None) == self.tile.biased
        added = NOWHERE if bias is None else (bias.data_ptr(), length + 1, 0, 0)
        m, threads = h // g, torch.get_num_threads()
        ranges, range_keys = self.tile.ranges(length + 1, b * g, threads)
        threads = min(threads, b * g * ranges)
        queries, spare = self.query_bytes, self.spare_bytes
        *places, rotated = memory(self.tile, m, b * g, ranges, threads, 4 * h * b + queries + spare)
        append_kernel(dtype is torch.bfloat16, neighbours, self.keys, self.values)(
            self.append_record(at, length, rotation, rotated)
        )
        out = torch.empty(b, h, 1, dv, dtype=torch.float32, device="cpu")
        results = out.data_ptr(), rotated + queries + spare
        data = self.attend_record(
            at[3:], length + 1, rotated, added, (*results, *places), (ranges, range_keys), scale
        )
        launch(self.address, data, threads)
        if self.values.rotated:
            mix_all(out.data_ptr(), b * h, dv, self.values.rotated)
        return out.to(dtype)

    @property
    def query_bytes(self) -> int:
        """Of the rotated queries."""
        return self.item * self.heads * self.width * self.batch

    @property
    def spare_bytes(self) -> int:
        """Of two rows of float32, in which codes are made."""
        return 8 * max(self.width, self.value_width)

    def append_record(
        self, at: Sequence[Place], length: int, rotation: Rotation, target: int, slots: int = 0
    ) -> bytes:
        """The call that appends, as its kernel reads it. `at` has the places of queries, keys,
        values, both buffers and their scales; rotated queries are written to the address `target`,
        before `spare_bytes`, keys and values to the slot `length`, or to those in int64 at the
        address `slots`, counted from there."""
        q, k, v, keys, values, of_keys, of_values = at
        dtype, b, h, g, d, dv = self[:6]
        item = dtype.itemsize
        return appending.PACKED.pack(
            b, h, g, d, d, dv, rotation[0], *rotation, *q[:3], *k[:3], *v[:3], target,
            *slot(keys, length, 1 if self.keys.bits else item),
            *slot(values, length, 1 if self.values.bits else item), slots, keys[3], values[3],
            *slot(of_keys, length, 2), *slot(of_values, length, 2), target + self.query_bytes,
        )  # fmt: skip

    def attend_record(
        self, buffers: Sequence[Place], keys: int, rotated: int, added: Place,
        memory: Sequence[int], ranges: tuple[int, int], scale: float, table: Place = NOWHERE,
    ) -> bytes:  # fmt: skip
        """The call that attends to so many `keys`, as its kernel reads it. `memory` has the
        addresses of outputs, log-sum-exps, zeroed counters, partial results and scratch; `table` is
        of pages, as `table_of` has it."""
        _, b, h, g, d, _ = self[:6]
        m = h // g
        return PACKED.pack(
            b, g, m, keys, rotated, h * d, m * d, d, *(x for place in buffers for x in place),
            *table, *NO_LATENTS, *added, *memory, *ranges, scale * LOG2E,
        )  # fmt: skip


def _places(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: AnyStream,
    values: AnyStream,
    length: int,
    plan: Plan,
) -> tuple[Place, ...] | None:
    """The addresses and strides of queries, keys, values, both buffers, and the scales of both;
    None if unusable."""
    dtype, b, h, g, d, dv = plan[:6]
    of_keys = places_of_buffer(keys, plan.keys, length, dtype, (b, g, d))
    of_values = places_of_buffer(values, plan.values, length, dtype, (b, g, dv))
    found = (
        place_if_readable(q, dtype, (b, h, 1, d)),
        place_if_readable(k, dtype, (b, g, 1, d)),
        place_if_readable(v, dtype, (b, g, 1, dv)),
        of_keys[0],
        of_values[0],
        of_keys[1],
        of_values[1],
    )
    return None if None in found else cast("tuple[Place, ...]", found)


def places_of_buffer(
    x: AnyStream,
    codes: Codes,
    length: int,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
) -> tuple[Place | None, Place | None]:
    """Where the rows of a buffer lie, and where their scales."""
    if codes == NUMBERS:
        place = place_of_buffer(x, length, dtype, sizes) if isinstance(x, Tensor) else None
        return place, NOWHERE
    if not isinstance(x, QuantizedStream) or x.width != sizes[2] or stored_as(x) != codes:
        return None, None
    b, g, width = sizes
    bytes, groups = Format(codes.bits).bytes(width), -(-width // codes.group)
    return (
        place_of_buffer(x.codes, length, torch.uint8, (b, g, bytes)),
        place_of_buffer(x.scales, length, torch.bfloat16, (b, g, 2 * groups)),
    )


def place_of_buffer(
    x: Tensor, length: int, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> Place | None:
    """The address and strides of a buffer `[B, G, room, W]`; None if it has no room for another
    token, or if elements share memory, as in an expanded tensor."""
    shape, (batch, heads, width) = x.shape, sizes
    if len(shape) != 4 or shape[2] <= length or not x.is_contiguous():
        return None
    return place_if_readable(x, dtype, (batch, heads, shape[2], width))


def slot(place: Place, length: int, item: int) -> tuple[int, int, int]:
    """The address of a buffer's slot, and the strides of batch and heads."""
    address, batch, head, row = place
    return address + item * length * row, batch, head


def rotation_of(angles: Angles | None, batch: int, width: int, signed: bool) -> Rotation | None:
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
def append_kernel(
    half: bool, neighbours: bool, keys: Codes = NUMBERS, values: Codes = NUMBERS
) -> Callable[[bytes], None]:
    """A C function of one packed `Append` record, for bfloat16 or float32."""
    address = append_address(half, neighbours, keys, values)
    return ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)


def append_address(
    half: bool, neighbours: bool, keys: Codes = NUMBERS, values: Codes = NUMBERS
) -> int:
    """The address of its machine code."""
    return int(appending.kernel(half, neighbours, keys, values).address)
