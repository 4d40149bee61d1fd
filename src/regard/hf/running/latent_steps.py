"""Decoding steps of a placed joint latent as two calls of compiled code, as `steps` has them for
keys and values: rotate and append, then rebuild the keys and attend."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.cache import KVCache, Part, StaticCache
from regard.cache.parts import storage_of
from regard.heads import merge_heads, split_heads
from regard.hf.families.rotating import memoised
from regard.hf.families.table import Family
from regard.hf.running.steps import (
    InstalledStep,
    filled_layer,
    is_repeatable,
    most_keys,
    settings_of,
    sizes_of,
    step_of,
)
from regard.layers.inputs import check_int32
from regard.layers.latent_kv import AbsorbedValues, as_stream
from regard.ops.backends import BACKENDS
from regard.ops.backends.fused import reads_latents
from regard.ops.observed import report_backend
from regard.ops.prepared import Prepared
from regard.ops.rebuilt_keys import RebuiltKeys
from regard.rates import SPEED


def repeated(
    family: Family,
    module: Any,
    x: Float[Tensor, "B L E"],
    projected: tuple[Tensor, ...],
    given: Mapping[str, Any],
) -> Float[Tensor, "B L HD"] | None:
    """The merged outputs of a call that repeats the step before it; None, and the cache is as
    before, of other calls."""
    if torch.compiler.is_compiling():
        return None
    layer = filled_layer(family, module, x, given)
    step = step_of(layer, family, module, x, given)
    return None if step is None else _run(step, module, x, projected, given, layer.cache)


def _run(
    step: InstalledStep,
    module: Any,
    x: Tensor,
    projected: tuple[Tensor, ...],
    given: Mapping[str, Any],
    cache: Any,
) -> Tensor | None:
    """Run the step for one more token; None if a tensor is not as the step before had it."""
    from regard.ops.kernels.tiles import Latents  # imports numba

    (q, latent), (held, places), length = projected, step.held, cache.length
    positions = given.get("position_ids")
    if positions is None:
        positions = torch.full((1, 1), length, device=x.device)
    narrow = memoised("_in_int32", module, lambda: _in_int32(positions), positions)
    # in the slot after those held, which does not count before the step is done
    places.narrow(2, length, 1).copy_(as_stream(narrow, x.shape[0]))
    form = module.choose(1, None)
    keys, _ = form.rebuild((_part(step.held, length + 1),))[0].stored
    if not isinstance(keys, RebuiltKeys) or keys.tables is None:
        return None  # a weight is no plain matrix any more, or a position is beyond the tables
    new = split_heads(q, module.head_dim), latent.unsqueeze(1)
    latents = Latents(keys.by_head, keys.positions, *keys.tables)
    out = step.run_one(*new, held, length, latents, step.scale)
    if out is None:
        return None
    cache.count(1)
    report_backend(BACKENDS["fused"].run)
    return merge_heads(form.output(out.to(x.dtype)))


def _in_int32(positions: Tensor) -> Tensor:
    check_int32(positions)
    return positions.to(torch.int32)


def _part(held: tuple[Tensor, ...], length: int) -> Part:
    """The first tokens in the buffers of a cache."""
    return Part(0, length, tuple(each.narrow(2, 0, length) for each in held))


def record(
    family: Family, module: Any, x: Tensor, given: Mapping[str, Any], prepared: Prepared
) -> None:
    """Record a call that has just been run, if it is a step that the next call may repeat."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or module.q_norm is not None:
        return
    layer = filled_layer(family, module, x, given)
    if layer is None or type(layer.cache) not in (KVCache, StaticCache):
        return  # codes of latents are dequantised
    if prepared.call.dtype is not x.dtype:
        return
    cache, held = layer.cache, layer.cache.buffers
    form = module.choose(1, None)
    (part,) = form.rebuild((_part(held, cache.length),))
    if not isinstance(form, AbsorbedValues) or not reads_latents(part.stored):
        return
    here = prepared.stored_as(storage_of((part,)))
    if not is_repeatable(here, cache):
        return
    from regard.ops.kernels.latent_stepping import LatentPlan  # imports numba

    call, (cos, _) = here.call, part.stored[0].tables
    run_one = LatentPlan.of(*sizes_of(call), cos.shape[1]).run
    same = settings_of(family, module), x.shape, call.dtype, held, most_keys(here, held[0].shape[2])
    layer.step = InstalledStep(*same, run_one, call.scale, SPEED.version, biased=False)
