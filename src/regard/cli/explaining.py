"""The calls of a model's layers, each described on tensors of one element: nothing is computed."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from regard.cli.describe import by_words
from regard.cli.loading import device_named
from regard.layers.latent_forms import Absorbed, choose_form
from regard.masks import EVERYTHING, Causal, Chunked, Mask, SlidingWindow, Span
from regard.ops.attend import prepare
from regard.ops.explain import Explanation, explanation
from regard.plan.from_sizes import model_from_sizes
from regard.plan.shapes import LayerShape, ModelShape
from regard.see.grammar import mask_from

MOST_NUMBERS = 2**62  # of a tensor: torch counts them in 64 bits
STATE = "their state is no cache of keys and values"


@dataclass(frozen=True)
class Explained:
    """A call of some layers, or of none in particular."""

    layers: tuple[int, ...]  # their indices
    kind: str  # of their attention
    phase: str  # what the call does, in words
    form: str  # of MLA, the form that it is computed in, and why
    call: Explanation  # which backend runs it


@dataclass(frozen=True)
class Tensors:
    """The rows, dtype and device of the tensors of a call."""

    batch: int
    dtype: str
    device: str

    def __call__(self, *shape: int) -> Tensor:
        """A tensor of zeros that takes the memory of one."""
        at = device_named(self.device)
        return torch.zeros((), dtype=getattr(torch, self.dtype), device=at).expand(shape)


def of_sizes(
    sizes: dict[str, Any], rule: str, queries: int, keys: int, tensors: Tensors
) -> list[Explained]:
    """The call of a layer of these sizes, for the newest queries of so many keys."""
    mask, span = mask_from(rule), _span(queries, keys)
    (layer,) = model_from_sizes(hidden_size=sizes["num_heads"], **sizes).layers
    return [Explained((), "", "", "", _call(layer, mask, span, tensors))]


def of_model(model: ModelShape, context: int, queries: int, tensors: Tensors) -> list[Explained]:
    """The prefill and a decoding step of the layers that regard computes; equal layers are one."""
    step = "a token" if queries == 1 else f"{queries:,} tokens"
    phases = {
        f"Prefill of {context:,} tokens": _span(context, context),
        f"Decoding {step} at {context:,}": _span(queries, context),
    }
    layers: dict[Explained, list[int]] = {}
    for phase, span in phases.items():
        for layer, indices in model.distinct().items():
            if not _refusal(layer):
                layers.setdefault(_of_layer(layer, phase, span, tensors), []).extend(indices)
    return [replace(each, layers=tuple(sorted(found))) for each, found in layers.items()]


def refused(model: ModelShape) -> dict[str, list[int]]:
    """Layers that regard does not compute by attention, by the reason."""
    return by_words(model, _refusal)


def _refusal(layer: LayerShape) -> str:
    return layer.unsupported or STATE * (layer.kind == "linear")


def _span(queries: int, keys: int) -> Span:
    """The newest queries of so many tokens."""
    if queries > keys:
        raise ValueError(
            f"the queries are the newest of the keys, so at most as many; got {queries:,} queries "
            f"and {keys:,} keys"
        )
    return Span(keys - queries, keys, 0, keys)


def _of_layer(layer: LayerShape, phase: str, span: Span, tensors: Tensors) -> Explained:
    form, given = "", layer
    if layer.kind == "MLA":
        chosen = choose_form(_latent(layer, tensors.dtype), span)
        form = f"{chosen.name}: {chosen.why}"
        if isinstance(chosen, Absorbed):  # one key head, whose values are the latent
            wide = layer.latent + layer.qk_rope_head_dim
            usual = layer.head_dim**-0.5 if layer.scale is None else layer.scale
            given = replace(
                layer, num_kv_heads=1, head_dim=wide, v_head_dim=layer.latent, scale=usual
            )
    return Explained((), layer.kind, phase, form, _call(given, mask_of(layer), span, tensors))


def mask_of(layer: LayerShape) -> Mask:
    """The mask of a layer: what its tokens may attend to, whatever the call."""
    mask: Mask = Causal() if layer.causal else EVERYTHING
    if layer.window is not None:
        mask &= SlidingWindow(layer.window)
    return mask if layer.chunk is None else mask & Chunked(layer.chunk)


def _latent(layer: LayerShape, dtype: str) -> Any:
    """The sizes of an MLA layer by the names of a module, with a weight that takes no memory."""
    nope = layer.head_dim - layer.qk_rope_head_dim
    width = layer.num_heads * (nope + layer.v_head_dim)
    up = nn.Linear(layer.latent, width, bias=False, device="meta", dtype=getattr(torch, dtype))
    return SimpleNamespace(
        kv_lora_rank=layer.latent,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=layer.qk_rope_head_dim,
        v_head_dim=layer.v_head_dim,
        kv_b_proj=up,
    )


def _call(layer: LayerShape, mask: Mask, span: Span, tensors: Tensors) -> Explanation:
    """The call of a layer, on tensors of one element each."""
    batch, keys, widest = tensors.batch, span.num_keys, max(layer.head_dim, layer.v_head_dim)
    if batch * layer.num_heads * keys * widest > MOST_NUMBERS:
        raise ValueError(
            f"a tensor has at most {MOST_NUMBERS:.1e} numbers, got {batch:,} rows x "
            f"{layer.num_heads:,} heads x {keys:,} keys x {widest:,} channels"
        )
    prepared = prepare(
        tensors(batch, layer.num_heads, span.num_queries, layer.head_dim),
        tensors(batch, layer.num_kv_heads, keys, layer.head_dim),
        tensors(batch, layer.num_kv_heads, keys, layer.v_head_dim),
        mask=mask,
        span=span,
        scale=layer.head_dim**-0.5 if layer.scale is None else layer.scale,
        softcap=layer.softcap,
        sinks=tensors(layer.num_heads) if layer.sinks else None,
    )
    return explanation(prepared)
