"""Decoding steps of a layer that repeat: the projections, then `regard.ops.steps`."""

from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.heads import merge_heads
from regard.layers.cache_use import RestoredOnError, step_of, store_step
from regard.masks import EVERYTHING, Mask
from regard.ops.prepared import Prepared
from regard.ops.steps import Step, has_fixed_slots, step_after
from regard.rope import NoRotary, Rotary

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, before rotation


class LayerStep(NamedTuple):
    """A decoding step of a layer: what it depends on besides the cache."""

    settings: tuple[Any, ...]  # the layer's
    shape: torch.Size  # of its input
    step: Step

    def forward(self, layer: Any, x: Tensor, heads: Heads, cache: Any) -> Tensor | None:
        """The layer's output for the new token, which is appended to the cache.

        None, and the cache is as before, if compiled code cannot read the queries, keys and values
        that the layer has projected.
        """
        rope = layer.rope
        angles = rope._held_row(cache.length) if rope.dim else None
        neighbours = angles is not None and rope.pairing == "pairs"
        with RestoredOnError(cache):
            out = self.step.run(cache, *heads, angles, neighbours=neighbours)
            if out is None:
                return None
            result: Tensor = layer.o_proj(merge_heads(layer.gated(x, out)))
            return result


def repeated_step(
    layer: nn.Module, x: Tensor, context: object, mask: Mask, cache: Any, positions: Tensor | None
) -> LayerStep | None:
    """The step that this call repeats, with one token more in the cache; None if it is another."""
    if torch.compiler.is_compiling():
        return None
    found: LayerStep | None = step_of(cache, layer)
    if found is None or mask is not EVERYTHING or context is not None or positions is not None:
        return None
    if not isinstance(x, Tensor) or x.shape != found.shape or not found.step.fits(cache, x):
        return None
    return found if all(map(is_, found.settings, _settings(layer))) else None


def record_step(layer: Any, x: Tensor, cache: Any, prepared: Prepared) -> None:
    """Record the call that has just been run, if the next one may repeat it."""
    step = step_after(prepared, cache) if prepared.call.step else None
    if step is not None and x.dtype is step.dtype:
        store_step(cache, layer, LayerStep(_settings(layer), x.shape, step))


def is_step(layer: Any, x: Tensor, cache: object, positions: Tensor | None) -> bool:
    """Whether a call may run as a step: one token, at the next position, rotated by a table."""
    if x.shape[1] != 1 or positions is not None or not has_fixed_slots(cache):
        return False
    if not layer.has_steps or torch.compiler.is_compiling():
        return False
    rope = layer.rope
    if type(rope) is NoRotary:
        return True
    return type(rope) is Rotary and (rope.scaling is None or not rope.scaling.uses_length)


def _settings(layer: Any) -> tuple[Any, ...]:
    """What may change between two calls of a layer; compared by identity."""
    return (
        layer.mask,
        layer.rope,
        layer.scale,
        layer.score_bias,
        layer.softcap,
        layer.sinks,
        layer.dropout if layer.training else 0.0,
        layer.backend,
        layer.precision,
        getattr(getattr(layer.q_proj, "weight", None), "dtype", None),
    )
