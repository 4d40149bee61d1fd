"""Latent layers of regard as attention modules of a transformers model.

A model of transformers has no class for them. So each is an attention module itself: called as
transformers calls its attention, rotated by its own rope, cached by any cache.
"""

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.hf.families.table import Family, own, probability
from regard.hf.packages import cache_in
from regard.hf.running import latent
from regard.hf.running.calls import positions_of_queries
from regard.layers.latent import LatentKVAttention, MultiHeadLatentAttention
from regard.masks import AllOf, Causal, Mask, SlidingWindow

LatentLayer = LatentKVAttention | MultiHeadLatentAttention


def window_of(layer: Any) -> int | None:
    """The window in the mask of a layer of regard, or None."""
    rules = layer.mask.parts if isinstance(layer.mask, AllOf) else (layer.mask,)
    return min((rule.size for rule in rules if isinstance(rule, SlidingWindow)), default=None)


def _family(name: str, **facts: Any) -> Family:
    return Family(
        name,
        rotate=lambda module, x, positions: module.rope.rotate(x, positions),
        window=window_of,
        scale=own("scale"),
        dropout=probability("dropout"),
        **facts,
    )


class PlacedLatentKV(LatentKVAttention):
    """A `LatentKVAttention` that is called as transformers calls its attention."""

    family: ClassVar[Family] = _family("PlacedLatentKV", softcap=own("softcap"))
    layer_idx: int
    config: Any

    def forward(  # type: ignore[override]
        self,
        hidden_states: Float[Tensor, "B L E"],
        position_embeddings: Any = None,
        attention_mask: Any = None,
        **given: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and, if asked for, weights. The model's own angles are not read."""
        return latent.forward_joint(self, hidden_states, attention_mask=attention_mask, **given)


class PlacedMLA(MultiHeadLatentAttention):
    """A `MultiHeadLatentAttention` that is called as transformers calls its attention."""

    family: ClassVar[Family] = _family(
        "PlacedMLA",
        latent=True,
        sinks=own("sinks"),
        query_scale=own("query_scale"),
        gate=lambda module, x, out: module.gated(x, out),
    )
    layer_idx: int
    config: Any

    def forward(  # type: ignore[override]
        self,
        hidden_states: Float[Tensor, "B L E"],
        position_embeddings: Any = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "*B L"] | None = None,
        **given: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and, if asked for, weights. The model's own angles are not read."""
        cache = cache_in(given)
        positions = positions_of_queries(hidden_states, position_ids, cache, self.layer_idx)
        given |= {"position_embeddings": positions, "position_ids": positions}
        return latent.forward(self, hidden_states, attention_mask=attention_mask, **given)


def empty_copy(layer: LatentLayer) -> nn.Module:
    """A layer of the same sizes that transformers can call, its parameters not filled yet. Raises
    as `arguments_of`."""
    made_by = PlacedLatentKV if isinstance(layer, LatentKVAttention) else PlacedMLA
    with torch.device("meta"):
        return made_by(**arguments_of(layer))


def arguments_of(layer: LatentLayer) -> dict[str, Any]:
    """The constructor arguments that build a layer with the present attributes of this one.

    Raises:
        ValueError: if it has a score bias, or a mask other than `Causal()` with or without a
            `SlidingWindow`: no other mask has a form in transformers.
    """
    window = window_of(layer)
    other_order = Causal() if window is None else SlidingWindow(window) & Causal()
    if layer.mask not in (pattern_of(window), other_order):
        raise ValueError(
            f"a layer in a model of transformers has mask=Causal(), or Causal() & "
            f"SlidingWindow(size), got {layer.mask!r}"
        )
    if layer.score_bias is not None:
        raise ValueError("a layer in a model of transformers has no score_bias; set it to None")
    arguments = {name: getattr(layer, name, value) for name, value in layer.arguments.items()}
    projections = [(name, each) for name, each in layer.named_children() if "proj" in name]
    biased = {name for name, each in projections if getattr(each, "bias", None) is not None}
    if isinstance(layer, LatentKVAttention):
        kind = None if layer.k_norm is None else "width" if layer.norm_width else "head"
        bias = {"bias": bool(biased - {"o_proj"}), "out_bias": "o_proj" in biased}
        return arguments | bias | {"qk_norm": kind, "norm_eps": _eps_of(layer.k_norm)}
    norm, sinks = layer.kv_a_layernorm, layer.sinks is not None
    arguments |= {"bias": biased - {"gate_proj"}, "latent_norm": not isinstance(norm, nn.Identity)}
    return arguments | {"norm_eps": getattr(norm, "eps", None) or 1e-6, "sinks": sinks}


def pattern_of(window: int | None) -> Mask:
    """The mask of a decoder's layer with this window, or none."""
    return Causal() if window is None else Causal() & SlidingWindow(window)


def _eps_of(norm: Any) -> float:
    """The epsilon of an RMS norm; that of its dtype where it is left to torch, 1e-6 without one."""
    if not isinstance(norm, nn.RMSNorm):
        return 1e-6
    return torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
