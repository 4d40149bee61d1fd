"""The attention of one layer in a decoding step of a model: its kernels, and the memory of these.

It reads the rows that the products before it have written, and writes the outputs of the heads in
float32: `HeadsStep` from keys and values, `LatentsStep` from a joint latent of both.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.ops.kernels import absorbed_values, head_norms
from regard.ops.kernels.chaining import Held, Norm, is_plain
from regard.ops.kernels.encoding import MIXED, mix_kernel
from regard.ops.kernels.latent_stepping import LatentPlan
from regard.ops.kernels.launching import NOWHERE, Place, bytes_of, counters_of, table_of
from regard.ops.kernels.merging import Reading
from regard.ops.kernels.sequencing import Kernel
from regard.ops.kernels.stepping import (
    Plan,
    Rotation,
    append_address,
    place_of_buffer,
    places_of_buffer,
)
from regard.ops.kernels.tiles import LINE, TASKS_A_THREAD, KeyPages, Latents

UNROTATED: Rotation = (0, 1, 0, 0, 0)
NO_SLOTS = [0, 0, 0, 0]  # bytes from a token to the next one: of keys, values, scales of both


class HeadsStep(NamedTuple):
    """Attention to the keys and values of heads, which lie in buffers or in pages."""

    plan: Plan  # of rotating, appending and attending
    buffers: tuple[Any, Any]  # streams of keys and values
    scale: float  # of the scores
    rotates: bool  # whether queries and keys are rotated
    norms: tuple[Norm, ...]  # of the heads of queries and of keys, before rotation; or none
    pages: KeyPages | None = None  # with room for the new token; None of other buffers
    others: tuple[Reading, ...] = ()  # keys and values in other pages, before the new token

    @property
    def sizes(self) -> tuple[object, ...]:
        """All that must be equal in two layers of a model."""
        others = [(x.sizes, x.half, x.rotated, x.stored.code) for x in self.others]
        return self.plan, len(self.norms), others

    @property
    def widths(self) -> tuple[tuple[int, ...], int]:
        """Of queries, keys and values, and of the outputs of all heads."""
        _, _, h, g, d, dv = self.plan[:6]
        return (h * d, g * d, g * dv), h * dv

    @property
    def rotations(self) -> tuple[bool, bool]:
        """Whether queries are rotated, and keys before they are appended."""
        return self.rotates, self.rotates

    @property
    def elsewhere(self) -> int:
        """The number of keys that are not where the new token lies."""
        return sum(each.keys for each in self.others)

    @property
    def held(self) -> Held:
        """The tensors whose addresses the records contain."""
        streams = [*self.buffers, *(x for each in self.others for x in each.source[:2])]
        tensors = [(x,) if isinstance(x, Tensor) else (x.codes, x.scales) for x in streams]
        return Held.of((*chain.from_iterable(tensors), *(norm.weight for norm in self.norms)))

    def is_readable(self, most: int) -> bool:
        """Whether the kernels read all tensors, with room for so many tokens."""
        plan, weights = self.plan, [norm.weight for norm in self.norms]
        if not all(is_plain(x, plan.dtype) and x.shape == (plan.width,) for x in weights):
            return False
        if any(x.stored.code[0].value_width != plan.value_width for x in self.others):
            return False
        return self._places(most - 1) is not None

    def slots(self) -> list[int]:
        """Bytes from a token to the next one in the buffers of keys, of values, and of the scales
        of both; 0 in pages."""
        plan, places = self.plan, self._places(0)
        assert places is not None
        if self.pages is not None:
            return NO_SLOTS
        items = [1 if codes.bits else plan.dtype.itemsize for codes in (plan.keys, plan.values)]
        return [item * place[3] for item, place in zip((*items, 2, 2), places, strict=True)]

    def counters(self, threads: int) -> dict[str, int]:
        """Bytes of the counters of its kernels."""
        others = {f"counters {i}": x.bytes(threads)["counters"] for i, x in enumerate(self.others)}
        return {"of_attend": counters_of(self.plan.batch * self.plan.kv_heads), **others}

    def shared(self, threads: int) -> dict[str, int]:
        """Bytes of memory that all layers use one after the other."""
        plan, others = self.plan, enumerate(self.others)
        elsewhere = {f"{name} {i}": n for i, x in others for name, n in x.bytes(threads).items()}
        return {
            "rotated": plan.query_bytes + plan.spare_bytes,
            "lse": 4 * plan.heads * plan.batch,
            **memory_of(plan, threads),
            **{name: n for name, n in elsewhere.items() if not name.startswith("counters")},
        }

    def kernels(self, at: Mapping[str, int], threads: int, slots: int) -> dict[str, Kernel]:
        """The kernels in order, before the first token; `slots` is as in `Append`."""
        (dtype, b, h, g, d, dv), found = self.plan[:6], {}
        plan, buffers, results = self.plan, self._places(0), (at["merged"], at["lse"])
        assert buffers is not None
        if self.norms:
            rows = (at["q"], b * h, d), (at["k"], b * g, d)
            record = head_norms.record(zip(rows, self.norms, strict=True))
            found["norms"] = Kernel(head_norms.address(dtype), record, True)
        heads = (at["q"], h * d, d, 0), (at["k"], g * d, d, 0), (at["v"], g * dv, dv, 0)
        record = plan.append_record((*heads, *buffers), 0, UNROTATED, at["rotated"], slots)
        code = append_address(dtype is torch.bfloat16, False, plan.keys, plan.values)
        found["append"] = Kernel(code, record, True)
        memory = *results, at["of_attend"], at["parts"], at["scratch"]
        table = NOWHERE
        if self.pages is not None:
            table = table_of(self.pages, b, self.buffers[0].shape[2])
        last = buffers, 1, at["rotated"], NOWHERE, memory, (1, 1), self.scale, table
        found["attend"] = Kernel(plan.address, plan.attend_record(*last), False)
        if plan.values.rotated:
            mixed = MIXED.pack(at["merged"], b * h, dv, plan.values.rotated)
            found["mix"] = Kernel(int(mix_kernel().address), mixed, True)
        q = at["rotated"], h * d, (h // g) * d, d
        for i, each in enumerate(self.others):
            own = {x.removesuffix(f" {i}"): y for x, y in at.items() if x.endswith(f" {i}")}
            others = each.kernels(q, results, own, threads, self.scale, adds=True)
            found |= {f"{name} {i}": kernel for name, kernel in others.items()}
        return found

    def _places(self, length: int) -> tuple[Place, ...] | None:
        """Where keys, values and the scales of both lie; None if the kernels do not read them."""
        plan, sizes = self.plan, (self.plan.batch, self.plan.kv_heads)
        if self.pages is not None:
            length, sizes = 0, (1, plan.kv_heads)  # the memory of all pages
        found = [
            places_of_buffer(stream, codes, length, plan.dtype, (*sizes, width))
            for stream, codes, width in zip(
                self.buffers, (plan.keys, plan.values), (plan.width, plan.value_width), strict=True
            )
        ]
        places = *(place for place, _ in found), *(scales for _, scales in found)
        return None if None in places else cast("tuple[Place, ...]", places)


class LatentsStep(NamedTuple):
    """Attention to joint latents, of which keys are rebuilt, and values are sums of them."""

    plan: LatentPlan
    latents: Tensor  # the buffer [B, 1, room, R]
    keys: Latents  # the positions of all slots of the buffer, too
    matrix: Tensor  # the parameter [2 G D, R]: the weights of all keys, then those of all values
    scale: float  # of the scores

    @property
    def pages(self) -> None:
        """None: latents lie in buffers."""

    @property
    def rotations(self) -> tuple[bool, bool]:
        """As of `HeadsStep`: keys are rotated when they are read."""
        return True, False

    @property
    def elsewhere(self) -> int:
        """As of `HeadsStep`."""
        return 0

    @property
    def sizes(self) -> tuple[object, ...]:
        """As of `HeadsStep`."""
        return self.plan, self.keys.cos.shape

    @property
    def widths(self) -> tuple[tuple[int, ...], int]:
        """Of queries and latents, and of the outputs of all heads."""
        plan = self.plan
        return (plan.heads * plan.width, plan.rank), plan.heads * plan.width

    @property
    def held(self) -> Held:
        """As of `HeadsStep`."""
        return Held.of((self.latents, *self.keys, self.matrix))

    def is_readable(self, most: int) -> bool:
        """As of `HeadsStep`."""
        plan, (b, g, d, rank) = self.plan, (self.plan.batch, *self.plan[3:6])
        sizes, half = (b, 1, self.latents.shape[2], 1), plan.dtype
        if self.keys.positions.shape != sizes or not is_plain(self.keys.positions, torch.int32):
            return False
        weights = is_plain(self.matrix, half) and self.matrix.shape == (2 * g * d, rank)
        return weights and place_of_buffer(self.latents, most - 1, half, (b, 1, rank)) is not None

    def slots(self) -> list[int]:
        """As of `HeadsStep`."""
        return [self.plan.dtype.itemsize * self.latents.stride(2), 0, 0, 0]

    def counters(self, threads: int) -> dict[str, int]:
        """As of `HeadsStep`."""
        return {"of_attend": counters_of(self.plan.batch * self.plan.kv_heads), "of_values": LINE}

    def shared(self, threads: int) -> dict[str, int]:
        """As of `HeadsStep`."""
        plan = self.plan
        rows = plan.heads * plan.batch
        return {
            "rotated": plan.query_bytes + plan.spare_bytes,
            "sums": 4 * rows * plan.tile.value_width,
            "lse": 4 * rows,
            **memory_of(plan, threads),
        }

    def kernels(self, at: Mapping[str, int], threads: int, slots: int) -> dict[str, Kernel]:
        """As of `HeadsStep`."""
        plan, half = self.plan, self.plan.dtype is torch.bfloat16
        b, h, g, d, rank = plan[1:6]
        held = place_of_buffer(self.latents, 0, plan.dtype, (b, 1, rank))
        assert held is not None
        rows = (at["q"], h * d, d), (at["k"], rank, 0)
        append = plan.append_record(*rows, held, 0, UNROTATED, at["rotated"])
        memory = at["sums"], at["lse"], at["of_attend"], at["parts"], at["scratch"]
        attend = plan.attend_record(held, 1, at["rotated"], self.keys, memory, (1, 1), self.scale)
        apart = plan.tile.value_width
        values = self.matrix.data_ptr() + plan.dtype.itemsize * g * d * rank
        products = absorbed_values.PACKED.pack(
            b * h, g, h // g, rank, apart, d, at["sums"], values, at["merged"], at["of_values"]
        )
        code = int(absorbed_values.kernel(half).address)
        return {
            "append": Kernel(append_address(half, False), append, True),
            "attend": Kernel(plan.address, attend, False),
            "values": Kernel(code, products, False),
        }


AttentionStep = HeadsStep | LatentsStep


def memory_of(plan: Plan | LatentPlan, threads: int) -> dict[str, int]:
    """Bytes of the partial results of attention, and of the scratch of its threads."""
    pairs = plan.batch * plan.kv_heads
    of_task, of_thread = bytes_of(plan.tile, plan.heads // plan.kv_heads)
    ranges = max(1, TASKS_A_THREAD * threads // pairs)
    return {"parts": pairs * ranges * of_task, "scratch": threads * of_thread}
