"""Attention over keys in several places: the kernel runs on each, and their results are merged.

All of that is one call of compiled code. Queries of codes that stand for rotated channels are
rotated alike, and the outputs over them back.
"""

import ctypes
import functools
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, no_type_check

import numba
import numpy as np
import torch
from jaxtyping import Float
from numba import carray, types
from torch import Tensor

from regard.cache.codes import QuantizedStream
from regard.compiling import compiled_from
from regard.ops.kernels import encoding, intrinsics
from regard.ops.kernels.encoding import MIXED, TURNED, mix_kernel, turn_kernel
from regard.ops.kernels.intrinsics import floats
from regard.ops.kernels.launching import (
    LOG2E,
    NOWHERE,
    Place,
    Stored,
    bytes_of,
    counters_of,
    decode,
    empty_results,
    place_of,
    stored,
    workspace,
)
from regard.ops.kernels.sequencing import Kernel, KernelSequence
from regard.ops.kernels.tiles import LINE, PACKED, KeyPages

LOWEST = np.float32(-3e38)  # instead of the log-sum-exp of no key, -inf: shares stay numbers


class Source(NamedTuple):
    """Keys and values that the kernel reads, all of them or those in some pages."""

    k: Tensor | QuantizedStream
    v: Tensor | QuantizedStream | None  # None: the first columns of the keys
    pages: KeyPages | None = None

    @property
    def rotations(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The blocks of channels that are rotated in keys, and in values."""
        values = self.k if self.v is None else self.v
        k, v = (() if isinstance(x, Tensor) else x.rotation for x in (self.k, values))
        return k, v


def decode_all(
    q: Float[Tensor, "B G M D"], sources: Sequence[Source], *, scale: float, width: int
) -> Float[Tensor, "B G M Dv"]:
    """Attention over the keys of all sources, in float32; `width` is that of a value."""
    first, *others = sources
    if not others and first.rotations == ((), ()):
        return decode(q, first.k, first.v, scale=scale, width=width, pages=first.pages)[0]
    q = q if all(not source.rotations[0] for source in sources) else q.contiguous()
    threads, (b, g, m, d) = torch.get_num_threads(), q.shape
    readings = [Reading.of(source, (b, g, m, d), q.dtype, width) for source in sources]
    sizes = [reading.bytes(threads) for reading in readings]
    counters = sum(each["counters"] for each in sizes)
    start = workspace(sum(sum(each.values()) for each in sizes))
    ctypes.memset(start, 0, counters)
    at: list[dict[str, int]] = [{} for _ in sizes]
    for name in sizes[0]:  # the counters of all sources first
        for place, each in zip(at, sizes, strict=True):
            place[name], start = start, start + each[name]
    results = empty_results((b, g, m, readings[0].stored.code[0].value_width))
    q_at, into = place_of("q", q, q.dtype, (b, g, m, d)), tuple(x.data_ptr() for x in results)
    kernels = [
        kernel
        for i, (reading, place) in enumerate(zip(readings, at, strict=True))
        for kernel in reading.kernels(q_at, into, place, threads, scale, adds=i > 0).values()
    ]
    KernelSequence(kernels).run(threads)
    return results[0][..., :width]


class Reading(NamedTuple):
    """A source, for queries of given sizes and a dtype."""

    source: Source
    sizes: tuple[int, int, int, int, int]  # B, G, M, S, D
    half: bool  # queries are bfloat16
    rotated: tuple[int, int]  # channels of the queries, and of the outputs
    stored: Stored

    @classmethod
    def of(
        cls, source: Source, sizes: tuple[int, int, int, int], dtype: torch.dtype, width: int
    ) -> "Reading":
        """The reading of a source for queries `[B, G, M, D]`; `width` is that of a value."""
        (k, v, pages), (b, g, m, d) = source, sizes
        keys = (k if isinstance(k, Tensor) else k.codes).shape[2] if pages is None else pages.keys
        rotated = sum(source.rotations[0]), sum(source.rotations[1])
        kind, half = torch.float32 if rotated[0] else dtype, dtype is torch.bfloat16
        at = stored(k, v, (b, g, m, keys), kind, d, width, pages=pages, integers=half)
        return cls(source, (b, g, m, keys, d), half, rotated, at)

    @property
    def keys(self) -> int:
        """The number of keys, S."""
        return self.sizes[3]

    def bytes(self, threads: int) -> dict[str, int]:
        """Bytes of zeroed counters, and of what the kernels write, by name; whole cache lines."""
        (b, g, m, keys, d), tile = self.sizes, self.stored.code[0]
        of_part, of_thread = bytes_of(tile, m)
        found = {
            "counters": counters_of(b * g),
            "queries": 4 * b * g * m * d if self.rotated[0] else 0,
            "out": 4 * b * g * m * tile.value_width,
            "lse": 4 * b * g * m,
            "parts": b * g * tile.ranges(keys, b * g, threads)[0] * of_part,
            "scratch": threads * of_thread,
        }
        return {name: -(-size // LINE) * LINE for name, size in found.items()}

    def kernels(
        self,
        q: Place,
        into: tuple[int, ...],
        at: Mapping[str, int],
        threads: int,
        scale: float,
        *,
        adds: bool,
    ) -> dict[str, Kernel]:
        """The kernels in order. `into` is the addresses of outputs and log-sum-exps, to
        which those of other keys have been written already where it `adds`; `at` is where the parts
        of `bytes` lie. Queries that are rotated are contiguous."""
        (b, g, m, keys, d), (tile, code) = self.sizes, self.stored.code
        out, lse = (at["out"], at["lse"]) if adds else into
        (of_queries, of_outputs), rows, found = self.rotated, b * g * m, {}
        if of_queries:
            turned = TURNED.pack(q[0], at["queries"], rows, d, of_queries)
            found["turn"] = Kernel(int(turn_kernel(self.half).address), turned, True)
            q = at["queries"], g * m * d, m * d, d
        memory = out, lse, at["counters"], at["parts"], at["scratch"]
        ranges = tile.ranges(keys, b * g, threads)
        record = PACKED.pack(
            b, g, m, keys, *q, *self.stored.places, *NOWHERE, *memory, *ranges, scale * LOG2E
        )
        found["attend"] = Kernel(code, record, False)
        if of_outputs:
            mixed = MIXED.pack(out, rows, tile.value_width, of_outputs)
            found["mix"] = Kernel(int(mix_kernel().address), mixed, True)
        if adds:
            merged = MERGED.pack(*into, out, lse, rows, tile.value_width)
            found["merge"] = Kernel(int(merge_kernel().address), merged, True)
        return found


class Merge(NamedTuple):
    """One call. Addresses are in bytes."""

    out: int  # address of outputs [rows, width] in float32, to which the others are added
    lse: int  # address of their log-sum-exps [rows]
    other: int  # address of the outputs over other keys
    other_lse: int
    rows: int
    width: int


MERGE = np.dtype([(name, np.int64) for name in Merge._fields])  # as the kernel reads it
MERGED = struct.Struct(f"{len(Merge._fields)}q")  # the same, as Python packs it
SIGNATURE = types.void(types.CPointer(numba.from_dtype(MERGE)))


@functools.cache
@no_type_check
def merge_kernel() -> Any:
    """The machine code that merges the results over other keys into those over some: a C function
    of the address of one `Merge` record."""

    def merge(data):
        call = carray(data, 1)[0]
        lses, others = floats(call.lse), floats(call.other_lse)
        for row in range(call.rows):
            # a source of infinite keys may have all log-sum-exps -inf
            one = LOWEST if lses[row] < LOWEST else lses[row]
            other = LOWEST if others[row] < LOWEST else others[row]
            highest = max(one, other)
            share, rest = math.exp(one - highest), math.exp(other - highest)
            total = share + rest
            lses[row] = highest + math.log(total)
            x = floats(call.out + 4 * row * call.width)
            y = floats(call.other + 4 * row * call.width)
            for i in range(call.width):
                x[i] = (share * x[i] + rest * y[i]) / total

    return compiled_from(merge, SIGNATURE, encoding, intrinsics)
