"""Attention modules of transformers models on shards: the same projections, rotated by the model's
own angles, then `attend_shards`.

What the modules of one call share travels where the call's mask would: transformers hands a mask
of four dimensions to every attention module as it is.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.distributed.context.attending import attend_shards
from regard.distributed.context.exchanging import Kind
from regard.distributed.context.sending import Call, Sending, making_keys, send
from regard.distributed.ranks import Ranks
from regard.distributed.shards import Shards
from regard.distributed.tensor.heads import split_of
from regard.heads import merge_heads
from regard.hf.families.table import Family, is_placed
from regard.hf.running.calls import arrive, of_one_dtype, options_of
from regard.layers.latent import LatentKVAttention
from regard.layers.latent_forms import Expanded, choose_form, project_latent
from regard.masks import EVERYTHING, Mask, Span

_HELD = "_call_of_regard"  # attribute of the stand-in of a mask: the call it belongs to


@dataclass(frozen=True)
class ShardedCall:
    """The arguments that all attention modules share in one call of a model.

    Args:
        ranks: that hold the sequence.
        shards: of the sequence.
        positions: of this rank's tokens, `[1 or B, L]`.
        mask: of this batch (padding, documents), about the whole sequence.
        exchange: how keys and values travel, as `attend_shards` takes it.
    """

    ranks: Ranks
    shards: Shards
    positions: Int[Tensor, "B L"]
    mask: Mask = EVERYTHING
    exchange: Kind = "ring"
    masks: dict[Mask, Mask] = field(default_factory=dict)

    def with_pattern(self, pattern: Mask) -> Mask:
        """The mask of this batch with that of a layer: one object for all layers of a pattern."""
        return self.masks.setdefault(pattern, pattern & self.mask)

    @property
    def span(self) -> Span:
        """The queries of one rank by all keys of the sequence."""
        return Span(0, max(self.shards.lengths), 0, self.shards.length)

    def as_mask(self) -> Tensor:
        """A tensor that transformers takes for a finished mask, and that holds this call."""
        carrier = self.positions.new_ones(1, 1, 1, 1, dtype=torch.bool)
        setattr(carrier, _HELD, self)
        return carrier


def forward(self: Any, hidden_states: Float[Tensor, "B L E"], *args: Any, **given: Any) -> Any:
    """The forward of an attention module on this rank's tokens."""
    family, given = arrive(self, args, given)
    call = _call_in(self, given.get(family.mask))
    options = options_of(family, self)
    assert not options.pop("dropout")  # the model's hook has refused it
    angles = call.positions if is_placed(self) else given.get("position_embeddings")
    q, streams, read, made = _send(family, self, hidden_states, angles, call)
    heads = attend_shards(
        q,
        streams,
        ranks=call.ranks,
        shards=call.shards,
        mask=call.with_pattern(family.pattern_of(self)),
        exchange=call.exchange,
        **options,
        **made,
    )
    return family.output(self, merge_heads(read(heads))), None


def _call_in(module: nn.Module, mask: Any) -> ShardedCall:
    call = getattr(mask, _HELD, None)
    if not isinstance(call, ShardedCall):
        raise ValueError(
            f"{type(module).__name__} is context-parallel and was not called by its model; call "
            "the model that context_parallel was given, or remove() the plan"
        )
    return call


def _send(family: Family, module: Any, x: Tensor, angles: Any, call: ShardedCall) -> Sending:
    if isinstance(module, LatentKVAttention):
        last = call.shards.length - 1  # ropes that depend on the length are refused
        return send(module, x, Call(call.mask, call.shards, call.positions, last))
    sending = _send_latent if family.latent else _send_keys
    return sending(family, module, x, angles, call)


def _send_keys(family: Family, module: Any, x: Tensor, angles: Any, call: ShardedCall) -> Sending:
    """Keys and values of each head, after rotation."""
    q, k, v = family.project.both(module, x)
    q, k = family.rotate(module, q, angles), family.rotate(module, k, angles)
    q, k, v = of_one_dtype(q, k, v)
    return Sending(q, (k, v), lambda out: out)


def _send_latent(family: Family, module: Any, x: Tensor, angles: Any, call: ShardedCall) -> Sending:
    """MLA: latents and rotary keys for all heads; the receiver expands or attends to them."""
    q_nope, q_rope, latent, k_rope = project_latent(module, x)
    q_rope, k_rope = (family.rotate(module, each, angles) for each in (q_rope, k_rope))
    form, joined = choose_form(module, call.span), torch.cat([latent, k_rope], dim=-1)
    if (split := split_of(module)) is not None:  # each rank reads it for its heads
        joined = split.shared(joined)
    q = form.queries(q_nope, q_rope)
    if isinstance(form, Expanded):
        return Sending(q, (joined,), form.output, making_keys(module, form.rebuild))
    return Sending(q, (joined,), form.output, {"v_head_dim": module.kv_lora_rank})
