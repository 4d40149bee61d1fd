"""Decoding steps of a placed joint latent as two calls of compiled code, as `steps` has them for
keys and values: rotate and append, then rebuild the keys and attend."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

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
from regard.matrices import matrix_of
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
    (q, latent), (held, places), length = projected, step.held, cache.length
    positions = given.get("position_ids")
    if positions is None:
        positions = torch.full((1, 1), length, device=x.device)
    narrow = memoised("_in_int32", module, lambda: _in_int32(positions), positions)
    # in the slot after those held, which does not count before the step is done
    places.narrow(2, length, 1).copy_(as_stream(narrow, x.shape[0]))
    if (found := _form_and_keys(module, step.held, length + 1)) is None:
        return None
    (form, keys), new = found, (split_heads(q, module.head_dim), latent.unsqueeze(1))
    out = step.run_one(*new, held, length, keys, step.scale)
    if out is None:
        return None
    cache.count(1)
    report_backend(BACKENDS["fused"].run)
    return merge_heads(form.output(out.to(x.dtype)))


def _form_and_keys(module: Any, held: tuple[Tensor, ...], length: int) -> Any:
    """The form of the values, and the first keys in the buffers of a cache as the kernels read
    them; None if a weight is no plain matrix, or a position is beyond the tables."""
    from regard.ops.kernels.tiles import Latents  # imports numba

    form = module.choose(1, None)
    keys, _ = form.rebuild((_part(held, length),))[0].stored
    if not isinstance(keys, RebuiltKeys) or keys.tables is None:
        return None
    return form, Latents(keys.by_head, keys.positions, *keys.tables)


def attention_of(module: Any, step: InstalledStep, length: int) -> Any:
    """The attention of a step over a joint latent, for a step of all layers; None if a weight is no
    plain matrix any more."""
    from regard.ops.kernels.layer_steps import LatentsStep  # imports numba

    if (found := _form_and_keys(module, step.held, length)) is None:
        return None
    (form, keys), (latents, positions), run_one = found, step.held, cast(Any, step.run_one)
    assert isinstance(form, AbsorbedValues)
    keys, matrix = keys._replace(positions=positions), matrix_of(module.kv_b_proj)
    return LatentsStep(run_one.plan, latents, keys, matrix, step.scale)


class LatentStep(NamedTuple):
    """The function of a step over a joint latent."""

    plan: Any  # of the kernels

    def __call__(self, *given: Any, **options: Any) -> Tensor | None:
        out: Tensor | None = self.plan.run(*given, **options)
        return out


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
    plan = LatentPlan.of(*sizes_of(call), cos.shape[1])
    # the kernel reads whole vectors of a latent, which may end in the slot after it
    most = most_keys(here, held[0].shape[2] - (plan.tile.value_width > plan.rank))
    same, run_one = (settings_of(family, module), x.shape, call.dtype, held, most), LatentStep(plan)
    layer.step = InstalledStep(*same, cast(Any, run_one), call.scale, SPEED.version, biased=False)
