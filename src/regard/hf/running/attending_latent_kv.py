"""The same for a joint latent: it is cached; keys are rebuilt, normed and rotated when read.

regard's caches hold the latent and its positions, exactly. transformers' own hold the latent where
keys go and nothing where values go; positions are then counted from the slots.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.cache import Part
from regard.heads import merge_heads
from regard.hf.running import positions
from regard.hf.running.attending import (
    FROM_THE_MODULE,
    known,
    named,
    precision_of,
    refuse,
    weights_wanted,
)
from regard.hf.running.attending_latent import from_zero
from regard.hf.running.masks import visible
from regard.layers.latent_kv import check_int32
from regard.ops.attend import prepare
from regard.ops.explain import weights_of


def forward(self: Any, hidden_states: Float[Tensor, "B L E"], *args: Any, **given: Any) -> Any:
    """Attention over latents, called as transformers calls its attention."""
    family = known(self)
    given = named(self, args, given)
    refuse(given, also=FROM_THE_MODULE)
    cache = given.get(family.cache)
    check_int32(given.get("position_ids"))
    where = positions.of_queries(hidden_states, given.get("position_ids"), cache, self.layer_idx)
    where = where.to(torch.int32)
    q = family.rotate(self, self.queries(hidden_states), where)
    parts = self.rebuild(_held(cache, self.layer_idx, self.kv_a_proj(hidden_states), where))
    mask, added, span = visible(
        self,
        given.get(family.mask),
        q.shape[2],
        sum(part.kv_stop - part.kv_start for part in parts),
        window=family.window_of(self),
        is_causal=given.get("is_causal"),
    )
    call = prepare(
        q,
        *parts[0].streams,
        mask=mask,
        span=span,
        scale=family.scale(self),
        score_bias=added,
        softcap=family.softcap(self),
        dropout=family.dropout(self) if self.training else 0.0,
        precision=precision_of(self),
    )
    out = family.output(self, merge_heads(call.run(q, parts)))
    return out, weights_of(call, q, parts) if weights_wanted(given) else None


def _held(
    cache: Any, layer: int, latent: Float[Tensor, "B L R"], where: Int[Tensor, "*B L"]
) -> tuple[Part, ...]:
    """Latents and their positions, of the past and of these tokens."""
    latent = latent.unsqueeze(1)
    if cache is None:
        return (Part(0, latent.shape[2], (latent, _stream(where))),)
    append = getattr(cache, "append", None)
    if append is not None:
        stream = _stream(where.expand(latent.shape[0], -1))
        return from_zero(append(layer, latent, stream))
    stream = _stream(positions.of_keys(where, cache, layer))
    latents, _ = cache.update(latent, latent[..., :0], layer)
    return (Part(0, latents.shape[2], (latents, stream)),)


def _stream(where: Int[Tensor, "*B S"]) -> Int[Tensor, "*B 1 S 1"]:
    return where[:, None, :, None]
