"""The same for MLA: what is cached is the latent and the rotary key; decoding absorbs.

regard's caches hold the two joined, as one stream. transformers' own hold them in two slots; then
the rotary product is a bias on the scores of the latents, and nothing is joined or copied.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.cache import Part
from regard.constants import accumulating_dtype
from regard.heads import merge_heads
from regard.hf.running.attending import (
    FROM_THE_MODULE,
    known,
    named,
    precision_of,
    refuse,
    total,
    weights_wanted,
)
from regard.hf.running.masks import visible
from regard.layers.latent_forms import ABSORBED, Form, absorb_queries, choose_form, project_latent
from regard.ops.attend import prepare
from regard.ops.explain import weights_of


class Read(NamedTuple):
    """Queries, the parts they read, and what is added to their scores."""

    q: Tensor
    parts: tuple[Part, ...]
    bias: Tensor | None = None


def forward(self: Any, hidden_states: Float[Tensor, "B L E"], *args: Any, **given: Any) -> Any:
    """What a DeepSeek module's own forward does, in the form that is less work."""
    family = known(self)
    given = named(self, args, given)
    refuse(given, also=FROM_THE_MODULE)
    q_nope, q_rope, latent, k_rope = project_latent(self, hidden_states)
    angles = given["position_embeddings"]  # or positions, where the module turns by itself
    q_rope, k_rope = (family.rotate(self, x, angles) for x in (q_rope, k_rope))
    parts = _held(given.get(family.cache), self.layer_idx, latent, k_rope)
    mask, added, span = visible(
        self,
        given.get(family.mask),
        q_rope.shape[2],
        sum(part.kv_stop - part.kv_start for part in parts),
        window=family.window_of(self),
        is_causal=given.get("is_causal"),
    )
    form, _ = choose_form(self, span)
    scale = family.scale(self)
    q, parts, bias = _read(self, form, q_nope, q_rope, parts, scale)
    call = prepare(
        q,
        *_outline(self, form, parts),
        mask=mask,
        span=span,
        scale=scale,
        score_bias=total(added, bias),
        dropout=family.dropout(self) if self.training else 0.0,
        precision=precision_of(self),
    )
    out = family.output(self, merge_heads(form.read(self, call.run(q, parts))))
    return out, weights_of(call, q, parts) if weights_wanted(given) else None


def _held(cache: Any, layer: int, latent: Tensor, k_rope: Tensor) -> tuple[Part, ...]:
    """What may be read once these are cached: joined where regard holds it, in two slots else."""
    if cache is None:
        return (Part(0, latent.shape[2], (latent, k_rope)),)
    append = getattr(cache, "append", None)
    if append is not None:
        parts: tuple[Part, ...] = append(layer, torch.cat([latent, k_rope], dim=-1))
        return from_zero(parts)
    latent, k_rope = cache.update(latent, k_rope, layer)
    return (Part(0, latent.shape[2], (latent, k_rope)),)


def from_zero(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The parts numbered from their first key, as transformers numbers what a window has left."""
    first = parts[0].kv_start
    return tuple(Part(start - first, stop - first, each) for start, stop, each in parts)


def _read(
    module: Any,
    form: Form,
    q_nope: Tensor,
    q_rope: Tensor,
    parts: tuple[Part, ...],
    scale: float,
) -> Read:
    if form is not ABSORBED or len(parts[0].streams) == 1:
        return Read(form.queries(module, q_nope, q_rope), form.parts(module, parts))
    (start, stop, (latent, k_rope)) = parts[0]
    wide = absorb_queries(module, q_nope, q_rope[..., :0])
    dtype = accumulating_dtype(q_rope.dtype)
    bias = (q_rope.to(dtype) * scale) @ k_rope.to(dtype).mT
    return Read(wide, (Part(start, stop, (latent,)),), bias)


def _outline(module: Any, form: Form, parts: tuple[Part, ...]) -> tuple[Tensor, Tensor]:
    """Keys and values as `prepare` wants them: it reads shapes only."""
    streams = parts[0].streams
    if form is ABSORBED:
        return streams[0], streams[0][..., : module.kv_lora_rank]
    return streams[0], streams[1]
