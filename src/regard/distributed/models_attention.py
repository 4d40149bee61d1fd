"""Attention modules of transformers models on shards: the same projections, rotated by the model's
own angles, then `attend_shards`.

What the modules of one call share travels where the call's mask would: transformers hands a mask
of four dimensions to every attention module as it is.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.distributed.context.attending import attend_shards
from regard.distributed.context.plan import ContextParallel
from regard.distributed.context.sending import Call, Sending, reading_latents, send
from regard.distributed.tensor.heads import split_of
from regard.heads import merge_heads
from regard.hf.families.table import Family, is_placed
from regard.hf.running.calls import arrive, of_one_dtype, options_of
from regard.layers.latent import LatentKVAttention
from regard.layers.latent_forms import choose_form, project_latent
from regard.masks import Mask, Span

_HELD = "_call_of_regard"  # attribute of the stand-in of a mask: the call it belongs to


@dataclass(frozen=True)
class ShardedCall:
    """The arguments that all attention modules share in one call of a model."""

    plan: ContextParallel  # which ranks hold the sequence, and how its keys and values travel
    call: Call  # the mask of this batch (padding, documents), the shards, this rank's positions
    masks: dict[Mask, Mask] = field(default_factory=dict)

    def with_pattern(self, pattern: Mask) -> Mask:
        """A layer's mask and that of this batch, intersected once for all layers with that mask."""
        return self.masks.setdefault(pattern, pattern & self.call.mask)

    def as_mask(self) -> Tensor:
        """A tensor that transformers takes for a finished mask, and that holds this call."""
        carrier = self.call.positions.new_ones(1, 1, 1, 1, dtype=torch.bool)
        setattr(carrier, _HELD, self)
        return carrier


def forward(self: Any, hidden_states: Float[Tensor, "B L E"], *args: Any, **given: Any) -> Any:
    """The forward of an attention module on this rank's tokens."""
    family, given = arrive(self, args, given)
    shared = _call_in(self, given.get(family.mask))
    plan, call, options = shared.plan, shared.call, options_of(family, self)
    assert not options.pop("dropout")  # the model's hook has refused it
    angles = call.positions if is_placed(self) else given.get("position_embeddings")
    q, streams, read, made = _send(family, self, hidden_states, angles, call)
    mask = shared.with_pattern(family.pattern_of(self))
    options |= {"ranks": plan.ranks, "exchange": plan.exchange, "shards": call.shards, **made}
    heads = attend_shards(q, streams, mask=mask, **options)
    return family.output(self, merge_heads(read(heads))), None


def _call_in(module: nn.Module, mask: Any) -> ShardedCall:
    call = getattr(mask, _HELD, None)
    if not isinstance(call, ShardedCall):
        raise ValueError(
            f"{type(module).__name__} is context-parallel and was not called by its model; call "
            "the model that context_parallel was given, or remove() the plan"
        )
    return call


def _send(family: Family, module: Any, x: Tensor, angles: Any, call: Call) -> Sending:
    if isinstance(module, LatentKVAttention):
        return send(module, x, call)
    if family.latent:
        return _send_latent(family, module, x, angles, call.span)
    return _send_keys(family, module, x, angles)


def _send_keys(family: Family, module: Any, x: Tensor, angles: Any) -> Sending:
    """Keys and values of each head, after rotation."""
    q, k, v = family.project.both(module, x)
    q, k = family.rotate(module, q, angles), family.rotate(module, k, angles)
    q, k, v = of_one_dtype(q, k, v)
    return Sending(q, (k, v), lambda out: out)


def _send_latent(family: Family, module: Any, x: Tensor, angles: Any, span: Span) -> Sending:
    q_nope, q_rope, latent, k_rope = project_latent(module, x)
    q_rope, k_rope = (family.rotate(module, each, angles) for each in (q_rope, k_rope))
    form, joined = choose_form(module, span), torch.cat([latent, k_rope], dim=-1)
    if (split := split_of(module)) is not None:  # each rank reads it for its heads
        joined = split.shared(joined)
    q = form.queries(q_nope, q_rope)
    return Sending(q, (joined,), form.output, reading_latents(module, form))
