"""Decoding steps that repeat: one new token in each row, and in the cache one key more.

What the step before checked and chose still holds. So the next one needs no description of its own,
and two calls of compiled code rotate, append and attend.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.cache import KVCache, StaticCache
from regard.masks import EVERYTHING, AllOf, Causal, Everything, Mask, SlidingWindow
from regard.ops.observed import BACKEND_RUNS, CALLS
from regard.ops.prepared import Prepared
from regard.ops.rates import SPEED
from regard.tracing import in_backward, is_immediate

FEW = 64  # keys: up to them, and up to twice as many as now, the backend stays the choice: its
# lead over torch's kernels grows with the number of keys
Angles = tuple[Tensor, Tensor]  # cosines and sines, [rotated] or [1 or B, 1, rotated], float32


class Step(NamedTuple):
    """A decoding step that has been run, and what the next one must have in common with it.

    Attributes:
        held: the buffers of the cache. Their addresses, shapes and strides are not part of a step,
            since each of them may be moved or changed in place before the next one.
        most: keys up to which the choice of the backend holds and no key is hidden.
        dtype: of queries, keys and values.
        run_one: the backend's function for these sizes.
        scale: of the scores.
        version: of the rates that it was chosen by.
    """

    held: tuple[Tensor, ...]
    most: int
    dtype: torch.dtype
    run_one: Callable[..., Tensor | None]
    scale: float
    version: int

    def fits(self, cache: KVCache | StaticCache, x: Tensor) -> bool:
        """Whether a call of the same shape with this cache repeats the step; `x` is its input."""
        if cache.buffers is not self.held or cache.length >= self.most or cache.is_ragged:
            return False
        if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled() or in_backward():
            return False
        if x.dtype is not self.dtype or not x.is_cpu or not is_immediate(x):
            return False
        return not (CALLS or BACKEND_RUNS) and SPEED.version == self.version

    def run(
        self,
        cache: KVCache | StaticCache,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: Angles | None,
        *,
        neighbours: bool = False,
        signed: bool = True,
    ) -> Float[Tensor, "B H 1 Dv"] | None:
        """Rotate queries `[B, H, 1, D]` and keys `[B, G, 1, D]`, append keys and values
        `[B, G, 1, Dv]` to the cache, attend to all it holds.

        `angles` are those of `Rotary.row`, or as the kernel takes them, which also explains
        `neighbours` and `signed`. None, and the cache is as before, where compiled code cannot read
        a tensor as it lies: one with strides or of a type or dtype of its own, or a buffer that was
        changed.
        """
        out = self.run_one(
            q,
            k,
            v,
            *self.held,
            length=cache.length,
            angles=angles,
            neighbours=neighbours,
            signed=signed,
            scale=self.scale,
        )
        if out is not None:
            cache.count(1)
        return out


def step_after(prepared: Prepared, cache: KVCache | StaticCache) -> Step | None:
    """The step that the call just run is, if the next call may repeat it; else None."""
    call, held = prepared.call, cache.buffers
    if prepared.backend.step is None or not call.step or not call.immediate:
        return None
    if torch.is_grad_enabled():
        return None
    if call.sinks is not None or call.score_bias is not None or cache.is_ragged:
        return None
    reads = call.span.kv_start, call.span.kv_stop
    if reads != (0, cache.length) or call.mask is not EVERYTHING or not _is_dataless(call.asked):
        return None
    if len(held) != 2 or any(each.dtype is not call.dtype for each in held):
        return None
    windows = (part.size for part in _parts(call.asked) if isinstance(part, SlidingWindow))
    most = min(max(FEW, 1 << call.num_keys.bit_length()), held[0].shape[2], *windows)
    heads = call.num_heads, call.num_kv_heads, call.head_dim, call.v_head_dim
    run_one = prepared.backend.step(call.dtype, call.batch, *heads)
    return Step(held, most, call.dtype, run_one, call.scale, SPEED.version)


def has_fixed_slots(cache: object) -> bool:
    """Whether a cache holds keys and values as they are, in places that do not move."""
    return type(cache) is KVCache or type(cache) is StaticCache


def _parts(mask: Mask) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, AllOf) else (mask,)


def _is_dataless(mask: Mask) -> bool:
    return all(type(part) in (Everything, Causal, SlidingWindow) for part in _parts(mask))
