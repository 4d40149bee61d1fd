"""A decoding step over pages: rotate and append the new token of each row to its last page, in
compiled code, then attend to all pages."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from regard.ops.kernels.encoding import NUMBERS
from regard.ops.kernels.launching import (
    NO_LATENTS,
    NOWHERE,
    Place,
    attend_at,
    compiled,
    empty_results,
    lanes_for,
    place_if_readable,
    table_of,
)
from regard.ops.kernels.merging import Source, decode_all
from regard.ops.kernels.stepping import (
    Angles,
    Plan,
    Rotation,
    append_kernel,
    place_of_buffer,
    rotation_of,
)
from regard.ops.kernels.tiles import BFLOAT16, FLOAT32, KeyPages, Tile


def slots_of(pages: KeyPages) -> Int64[Tensor, " B"]:
    """The token of the last key of each row, in the memory of all pages."""
    last = pages.skipped + pages.keys - 1
    return pages.table[:, last // pages.size] * pages.size + last % pages.size


class Appended(NamedTuple):
    """The rotated queries of a step whose keys and values have been written to pages."""

    rotated: Float[Tensor, "B G M D"]
    places: tuple[Place, Place, Place]  # of the memory of keys and values, and the table of pages


class PagedPlan(NamedTuple):
    """The sizes of a step over pages. It holds no address, stride or shape of a tensor."""

    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    width: int
    value_width: int

    def append(
        self,
        q: Float[Tensor, "B H 1 D"],
        k: Float[Tensor, "B G 1 D"],
        v: Float[Tensor, "B G 1 Dv"],
        source: Source,
        *,
        angles: Angles | None = None,
        signed: bool = True,
    ) -> Appended | None:
        """Write k and v to the last key of a source, which is pages of numbers.

        Queries and keys are rotated before, as by `Plan.run`. None, and nothing is written, if a
        tensor has other sizes, or does not lie as the kernel reads it.
        """
        dtype, b, h, g, d, _ = self
        keys, values, pages = source
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or pages is None:
            return None
        rotation, at = rotation_of(angles, b, d, signed), self._places(q, k, v, keys, values)
        if rotation is None or at is None:
            return None
        table = table_of(pages, b, keys.shape[2])
        rotated = torch.empty(b, g, h // g, d, dtype=dtype, device="cpu")
        self._append(pages, at, rotation, rotated.data_ptr())
        return Appended(rotated, (at[3], at[4], table))

    def attend(
        self, appended: Appended, sources: Sequence[Source], scale: float
    ) -> Float[Tensor, "B H 1 Dv"]:
        """Attend to all sources, the last of which has the new token."""
        dtype, b, h, g, d, dv = self
        (rotated, (keys, values, table)), pages = appended, sources[-1].pages
        if len(sources) > 1:
            out = decode_all(rotated, sources, scale=scale, width=dv)
        else:
            assert pages is not None
            m, nothing = h // g, (*NOWHERE, *NOWHERE)
            places = (rotated.data_ptr(), h * d, m * d, d, *keys, *values, *nothing, *table,
                      *NO_LATENTS, *NOWHERE)  # fmt: skip
            results, sizes = empty_results((b, g, m, dv)), (b, g, m, pages.keys)
            out, _ = attend_at(self._code(pages.size), sizes, places, scale, results)
        return out.view(b, h, 1, dv).to(dtype)

    def plan_of(self, page: int) -> Plan:
        """The plan of a step over pages of so many tokens."""
        return Plan(*self, NUMBERS, NUMBERS, *self._code(page))

    def _append(
        self, pages: KeyPages, at: tuple[Place, ...], rotation: Rotation, target: int
    ) -> None:
        """Rotated queries of all rows at the address `target`; the last key of each row, and its
        value, in the row's last page."""
        slots, nowhere = slots_of(pages), (NOWHERE, NOWHERE)  # numbers have no scales
        data = self.plan_of(pages.size).append_record(
            (*at, *nowhere), 0, rotation, target, slots.data_ptr()
        )
        append_kernel(self.dtype is torch.bfloat16, False)(data)

    def _code(self, page: int) -> tuple[Tile, int]:
        """The code for pages of so many tokens, as `decode` has it."""
        dtype, _, h, g, d, dv = self
        lanes, half = lanes_for(d, dv, dtype, joined=False), dtype is torch.bfloat16
        form = BFLOAT16 if half else FLOAT32
        return compiled(h // g, d, dv, half, False, False, lanes, form, form, page)

    def _places(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Place, ...] | None:
        """The addresses and strides of queries, keys, values and the memory of both; None if one of
        them is unusable."""
        dtype, b, h, g, d, dv = self
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
