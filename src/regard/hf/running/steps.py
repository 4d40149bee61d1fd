"""Decoding steps of an installed layer that repeat: its projections, then `regard.ops.steps`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.hf.families import rotating
from regard.hf.families.table import Family
from regard.hf.running.calls import visible_in, weights_wanted
from regard.masks import EVERYTHING, Span
from regard.ops.prepared import Prepared
from regard.ops.steps import Step, has_fixed_slots, step_after

Projected = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, before rotation


class InstalledStep(NamedTuple):
    """A decoding step of an installed layer: what it depends on besides its cache."""

    settings: tuple[Any, ...]  # the module's
    shape: torch.Size  # of its input
    step: Step

    def run(
        self, family: Family, module: Any, heads: Projected, given: Mapping[str, Any]
    ) -> Tensor | None:
        """The heads' outputs `[B, H, 1, Dv]` for the new token, which is appended to the cache.

        None, and the cache is as before, if compiled code cannot read the queries, keys and values
        that the module has projected, or the model's angles.
        """
        cache = _layer_of(family, module, given).cache
        angles = given["position_embeddings"] if family.rotate is rotating.halves else None
        return self.step.run(cache, *heads, angles, signed=False)


def is_step(family: Family, module: Any, x: Tensor, given: Mapping[str, Any]) -> bool:
    """Whether a call may run as a step: self-attention of one token, halves rotated in float32 or
    nothing rotated, and a cache of regard whose keys stay where they are."""
    if x.shape[1] != 1 or family.returns_bias or given.get(family.context) is not None:
        return False
    angles = given.get("position_embeddings")
    if family.rotate is rotating.halves:
        if not isinstance(angles, tuple) or angles[0].dtype is not torch.float32:
            return False
    elif family.rotate is not rotating.not_rotated:
        return False
    return x.is_cpu and _layer_of(family, module, given) is not None


def _layer_of(family: Family, module: Any, given: Mapping[str, Any]) -> Any:
    """The layer of regard's cache that a call fills, if its keys stay where they are; else None."""
    cache: Any = given.get(family.cache)
    if not hasattr(cache, "append"):
        return None
    layer = cache.layers[module.layer_idx]
    return layer if has_fixed_slots(layer.cache) else None


def repeated_step(
    family: Family, module: Any, x: Tensor, given: Mapping[str, Any]
) -> InstalledStep | None:
    """The step that this call repeats, with one token more in the cache; None if it is another."""
    if torch.compiler.is_compiling() or not is_step(family, module, x, given):
        return None
    layer = _layer_of(family, module, given)
    found: InstalledStep | None = layer.step
    if found is None or x.shape != found.shape or found.settings != _settings(family, module):
        return None
    if weights_wanted(given) or not found.step.fits(layer.cache, x):
        return None
    return found if _shows_all(family, module, given, layer.cache) else None


def _shows_all(family: Family, module: Any, given: Mapping[str, Any], cache: Any) -> bool:
    """Whether the mask of a call, if it has one, shows the token all that the cache holds."""
    mask, held = given.get(family.mask), cache.length
    if mask is None:
        return True
    at = visible_in(family, module, given, 1, mask.shape[-1])
    if at.bias is not None or at.span.q_start != held:
        return False
    return at.mask.within(Span(held, held + 1, 0, held + 1)) is EVERYTHING


def record_step(
    family: Family, module: Any, x: Tensor, given: Mapping[str, Any], prepared: Prepared
) -> None:
    """Record a call that `is_step` and has just been run, if the next one may repeat it."""
    layer = _layer_of(family, module, given)
    step = step_after(prepared, layer.cache)
    if step is not None and x.dtype is step.dtype:
        layer.step = InstalledStep(_settings(family, module), x.shape, step)


def _settings(family: Family, module: nn.Module) -> tuple[Any, ...]:
    """What may change between two calls of a module."""
    options = family.scale(module), family.softcap(module), family.window_of(module)
    dropout = family.dropout(module) if module.training else 0.0
    return id(module), *options, dropout, getattr(module, "precision", "strict")
