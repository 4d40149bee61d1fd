"""The tensor-parallel plans of regard's layers: parameters that are split or replicated."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from regard.distributed.ranks import Ranks
from regard.distributed.tensor.heads import HeadLayout, HeadSplit, split_of
from regard.distributed.tensor.linear import (
    CopiedInput,
    CopiedOutput,
    LocalForward,
    SplitLinear,
    SummedSquares,
    SummedSquaresOfKeys,
)
from regard.distributed.tensor.placing import Placing
from regard.distributed.tensor.split_layers import SplitAttention, SplitLatent, SplitLayer
from regard.distributed.tensor.weights import SplitStyle, is_split
from regard.layers.attention import Attention
from regard.layers.latent import MultiHeadLatentAttention
from regard.layers.latent_kv import LatentKVAttention
from regard.matrices import matrix_objection
from regard.ops.bias import RelativeBias

Styles = dict[str, ParallelStyle]  # by the path of a module inside the layer
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def kind_of(layer: nn.Module) -> type[nn.Module] | None:
    """The class of regard that a layer belongs to; None if the layer is not one of regard's."""
    return next((kind for kind in STYLES if isinstance(layer, kind)), None)


def layout_of(layer: Any, size: int) -> HeadLayout:
    """The assignment of a layer's heads to `size` ranks."""
    # MLA rebuilds a key head for each query head
    latent = isinstance(layer, MultiHeadLatentAttention)
    return HeadLayout(layer.num_heads, layer.num_heads if latent else layer.num_kv_heads, size)


# objections


def objection(layer: Any, size: int) -> str | None:
    """Why a layer cannot be split over `size` ranks; None if it can.

    Examples:
        >>> from regard import SelfAttention
        >>> from regard.distributed.tensor.layers import objection
        >>> objection(SelfAttention(8), 2)
        'it has one head and no output projection; leave it out'
    """
    if isinstance(getattr(layer, "o_proj", None), nn.Identity):
        return "it has one head and no output projection; leave it out"
    children = [child for name, child in layer.named_children() if name != "score_bias"]
    if split_of(layer) is not None or any(map(is_split, children)):
        return "its parameters are split already; call this once, and before fully_shard"
    for name, child in layer.named_children():
        if "proj" in name and (why := matrix_objection(child)) is not None:
            return f"{name} {why}; call this before adapters, quantisation and hooks are added"
    return _norm_objection(layer, size) or _bias_objection(layer.score_bias)


def _norm_objection(layer: Any, size: int) -> str | None:
    layout = layout_of(layer, size)
    padded = layout.local_heads * size != layout.num_heads
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer, name, None)
        if norm is None:
            continue
        if layer.norm_width and type(norm) is not nn.RMSNorm:
            return f"{name} norms all heads at once and is no nn.RMSNorm, got {norm}"
        if padded and getattr(norm, "eps", None) == 0:
            return (
                f"{name} has eps=0 and would divide by the zeros of padding heads, which "
                f"num_heads={layout.num_heads} on {size} ranks need; give it an eps"
            )
    return None


def _bias_objection(bias: object) -> str | None:
    if not isinstance(bias, nn.Module) or isinstance(bias, RelativeBias):
        return None
    if not list(bias.parameters()):
        return None
    return (
        f"score_bias is a {type(bias).__name__} with parameters, whose heads are not known; use a "
        "tensor or RelativeBias"
    )


# styles


def split_styles(layer: Any, ranks: Ranks) -> tuple[HeadSplit, Styles]:
    """The heads of a layer and the styles for `parallelize_module`. All ranks make it together."""
    kind, layout = kind_of(layer), layout_of(layer, ranks.size)
    assert kind is not None
    split = HeadSplit(layout.num_heads, layout.num_kv_heads, ranks.size, ranks)
    place = Placing.of(split)
    styles = STYLES[kind](layer, place)
    if isinstance(layer.score_bias, RelativeBias):
        styles["score_bias"] = place.whole(LocalForward, summed=True)
    return split, styles


def projection_styles(place: Placing, head_dim: int, names: Sequence[str] = PROJECTIONS) -> Styles:
    """The styles of the projections of queries, keys, values and outputs, by these names."""
    queries, rows = (
        place.linear(SplitLinear, of(head_dim)) for of in (place.heads, place.kv_heads)
    )
    return dict(zip(names, (queries, rows, rows, place.output(head_dim)), strict=True))


def _attention(layer: Any, place: Placing) -> Styles:
    return {
        **projection_styles(place, layer.head_dim),
        **_norms(layer, place),
        **_gate(layer, place),
        "": SplitStyle(place.split, SplitAttention, {"sinks": place.heads(1)}),
    }


def _gate(layer: Any, place: Placing) -> Styles:
    if getattr(layer, "gate_proj", None) is None:  # transformers' MLA has no such attribute
        return {}
    channels = layer.gate_proj.out_features // layer.num_heads
    return {"gate_proj": place.linear(SplitLinear, place.heads(channels))}


def latent_styles(layer: Any, place: Placing) -> Styles:
    """The styles of MLA: a layer of regard, or a module of transformers."""
    queries = place.linear(CopiedInput, place.heads(layer.qk_head_dim))
    rebuilt = layer.qk_nope_head_dim + layer.v_head_dim
    styles: Styles = {
        "kv_a_proj_with_mqa": place.whole(SplitLinear),
        "kv_a_layernorm": place.whole(LocalForward),
        "kv_b_proj": place.linear(SplitLinear, place.heads(rebuilt)),
        "o_proj": place.output(layer.v_head_dim),
        **_gate(layer, place),
        "": SplitStyle(place.split, SplitLatent, {"sinks": place.heads(1)}),
    }
    if layer.q_lora_rank is None:
        return {"q_proj": queries, **styles}
    low = {"q_a_proj": place.whole(SplitLinear), "q_a_layernorm": place.whole(LocalForward)}
    return {**low, "q_b_proj": queries, **styles}


def _latent_kv(layer: Any, place: Placing) -> Styles:
    size = layer.head_dim
    return {
        "q_proj": place.linear(CopiedInput, place.heads(size)),
        "kv_a_proj": place.whole(CopiedOutput),
        "kv_b_proj": place.linear(SplitLinear, place.keys_then_values(size)),
        "o_proj": place.output(size),
        **_norms(layer, place),
        "": SplitStyle(place.split, SplitLayer, {}),
    }


def _norms(layer: Any, place: Placing) -> Styles:
    if layer.q_norm is None:
        return {}
    if not layer.norm_width:
        return dict.fromkeys(("q_norm", "k_norm"), place.whole(LocalForward, summed=True))
    of_queries, of_keys = place.heads(layer.head_dim), place.kv_heads(layer.head_dim)
    return {
        "q_norm": SplitStyle(place.split, SummedSquares, {"weight": of_queries}),
        "k_norm": SplitStyle(place.split, SummedSquaresOfKeys, {"weight": of_keys}),
    }


STYLES: dict[type[nn.Module], Callable[[Any, Placing], Styles]] = {
    Attention: _attention,
    MultiHeadLatentAttention: latent_styles,
    LatentKVAttention: _latent_kv,
}


class Plan:
    """The tensor-parallel plan of one module. Models of other libraries have subclasses."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self.module, self.ranks = module, ranks

    def objection(self) -> str | None:
        """Why the module cannot be split; None if it can. Changes and sends nothing."""
        return objection(self.module, self.ranks.size)

    def apply(self, mesh: DeviceMesh) -> None:
        """Split the module."""
        split, styles = split_styles(self.module, self.ranks)
        parallelize_module(self.module, mesh, styles)
        self.module.head_split = split  # type: ignore[assignment]
