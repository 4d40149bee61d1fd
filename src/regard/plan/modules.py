"""The shape of a layer of attention, read from the module: of regard, or of transformers.

Sizes are those of its weights; window, scale and rotation those that it holds or its configuration
gives it. A module of transformers need not be one that regard runs.
"""

import math
import sys
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

from regard.hf.families import rotating
from regard.hf.families.layers import rope_of
from regard.hf.families.recognising import family_of
from regard.hf.families.table import Family
from regard.hf.placing.placed import window_of
from regard.layers.attention import Attention
from regard.layers.forms.shared_kv import SharedKVAttention
from regard.layers.forms.tied_kv import TiedKeys, TiedKVAttention
from regard.layers.latent import LatentKVAttention, MultiHeadLatentAttention
from regard.layers.query_scale import UNSCALED
from regard.masks import AllOf, Causal
from regard.plan.shapes import LayerShape, Workload
from regard.plan.weights import parameters
from regard.rope import NO_ROPE, NoRotary, Rotary

# names of projections in modules of transformers, by those of regard
PROJECTIONS = {
    "q_proj": ("q_proj", "query"),
    "q_a_proj": ("q_a_proj",),
    "q_b_proj": ("q_b_proj",),
    "k_proj": ("k_proj", "key"),
    "v_proj": ("v_proj", "value"),
    "kv_a_proj": ("kv_a_proj",),
    "kv_a_proj_with_mqa": ("kv_a_proj_with_mqa",),
    "kv_b_proj": ("kv_b_proj",),
    "o_proj": ("o_proj", "dense", "out_proj", "c_proj"),
}
Q_NORMS = ("q_norm", "q_layernorm", "query_layernorm")
FUSED = ("qkv_proj", "query_key_value", "c_attn")  # queries, keys and values in one projection
NOTHING = torch.empty(0)  # in place of the weight of a module without one
KNOWN = (Attention, LatentKVAttention, MultiHeadLatentAttention, SharedKVAttention, TiedKVAttention)
WINDOWS_ROTATE = {  # of models with windows, these rotate in layers with a window alone
    *("Cohere2Attention", "Cohere2MoeAttention", "Exaone4Attention", "Exaone4_5Attention"),
    *("ExaoneMoeAttention", "AfmoeAttention", "FlintAttention", "Kolibri1Attention"),
}


def shape_of(layer: Any) -> LayerShape:
    """The sizes of a layer of regard. Raises a TypeError for one whose class is not in `KNOWN`,
    such as `DifferentialAttention`.

    Examples:
        >>> from regard import Causal, MultiHeadLatentAttention, Rotary
        >>> layer = MultiHeadLatentAttention(64, 4, kv_lora_rank=16, qk_nope_head_dim=8,
        ...     qk_rope_head_dim=4, v_head_dim=8, rope=Rotary(4), mask=Causal())
        >>> shape = shape_of(layer)
        >>> shape.kind, shape.head_dim, shape.kv_lora_rank
        ('MLA', 12, 16)
    """
    if not isinstance(layer, KNOWN):
        known = ", ".join(each.__name__ for each in KNOWN)
        raise TypeError(f"sizes are known of {known}, got {type(layer).__name__}")
    rules = layer.mask.parts if isinstance(layer.mask, AllOf) else (layer.mask,)
    common: dict[str, Any] = {
        "hidden_size": layer.hidden_size,
        "num_heads": layer.num_heads,
        "window": window_of(layer),
        "causal": Causal() in rules,
        "bias": _biases(layer),
        "rope": repr(layer.rope) if layer.rope.dim else "",
        "query_scale": "" if layer.query_scale is UNSCALED else repr(layer.query_scale),
        "sinks": layer.sinks is not None,
        "gate": _own_gate(layer),
    }
    head_dim = layer.qk_head_dim if isinstance(layer, MultiHeadLatentAttention) else layer.head_dim
    usual = head_dim**-0.5 * layer.rope.softmax_factor
    common["scale"] = None if math.isclose(layer.scale, usual) else layer.scale
    if isinstance(layer, MultiHeadLatentAttention):
        normed = not isinstance(layer.kv_a_layernorm, nn.Identity)
        return LayerShape(**common | _latent_sizes(layer, layer.num_heads), latent_norm=normed)
    return _shape_of_heads(layer, common)


def _shape_of_heads(layer: Any, common: dict[str, Any]) -> LayerShape:
    """The sizes of a layer of regard with key heads."""
    norm = "width" if getattr(layer, "norm_width", False) else "head"
    common |= {
        "num_kv_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "v_head_dim": layer.head_dim,
        "qk_rope_head_dim": layer.rope.dim,
        "qk_norm": None if layer.q_norm is None else norm,
        "softcap": layer.softcap,
    }
    if isinstance(layer, TiedKVAttention):
        beside = sum(layer.pieces[1:]) if layer.form == "absorbed" else 0
        return LayerShape(**common, tied_channels=beside, keys_by_position=layer.caches_positions)
    if isinstance(layer, SharedKVAttention):
        return LayerShape(**common, keys_of=-1)
    if isinstance(layer, LatentKVAttention):
        rank = layer.kv_lora_rank
        return LayerShape(**common, kv_lora_rank=rank, keys_by_position=True, latent_norm=False)
    return LayerShape(**common)


def _own_gate(layer: Any) -> Literal["head", "channel"] | None:
    """The gate of a layer of regard."""
    if (gate := getattr(layer, "gate_proj", None)) is None:
        return None
    return "head" if gate.out_features == layer.num_heads else "channel"


def shape_of_module(
    module: nn.Module, config: Any, kind: str, *, rotates: bool, keys_of: int | None
) -> LayerShape:
    """The shape of an attention module of transformers, or of what stands in its place, on any
    device.

    `config` is that of the model's text, `kind` that of the layer, as in `layer_types`, or `""`;
    `rotates` tells whether the model computes angles for RoPE, and `keys_of` the layer whose keys
    and values this one uses. A ValueError is raised if sizes do not follow from the module.
    """
    inner: Any = dict(module.named_children()).get("self", module)  # BERT's, without its output
    if (state := _state(inner)) is not None:
        return LayerShape(hidden_size=config.hidden_size, **state)
    family = family_of(inner)
    reader = family or Family(type(inner).__name__)
    latent = getattr(inner, "kv_lora_rank", None) is not None
    if latent:
        sizes = _latent_sizes(inner, inner.config.num_attention_heads)
    else:
        sizes = _head_sizes(inner, reader)
    rope: Rotary | NoRotary = NO_ROPE
    if rotates and _is_rotated(inner, config, kind, family):
        rope = _rope(inner, config, kind, sizes)
    usual = sizes["head_dim"] ** -0.5 * (rope.softmax_factor if latent else 1.0)
    scale: float | None = float(reader.scale(inner))
    if math.isclose(reader.scale(inner), usual):  # layers of regard scale by RoPE's factor, too
        scale = None if latent or rope.softmax_factor == 1.0 else usual
    shape = LayerShape(
        hidden_size=config.hidden_size,
        **{"qk_rope_head_dim": rope.dim} | sizes,
        window=_window(inner, config, kind, family),
        chunk=config.attention_chunk_size if kind == "chunked_attention" else None,
        causal=bool(getattr(inner, "is_causal", True)),
        keys_of=keys_of,
        tied_channels=_tied(inner, family),
        query_scale="" if (scaled := reader.query_scale(inner)) is UNSCALED else repr(scaled),
        bias=_biases(module),
        qk_norm=_qk_norm(inner, sizes),
        sinks=getattr(inner, "sinks", None) is not None,
        gate=_gate(inner, sizes),
        softcap=getattr(inner, "attn_logit_softcapping", None),
        scale=scale,
        rope=repr(rope) if rope.dim else "",
    )
    norms = (each for name, each in module.named_parameters() if "output.LayerNorm" in name)  # BERT
    held = sum(each.numel() for each in module.parameters()) - sum(each.numel() for each in norms)
    counted = parameters(shape, Workload(context=1))
    differs = f"it has {held:,} parameters, where a layer of these sizes has {counted:,}"
    why = _unsupported(shape, module, config) or differs * (held != counted)
    return replace(shape, extra_parameters=max(0, held - counted), unsupported=why)


def _linear(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """The first child, or grandchild, of one of these names that has a matrix."""
    for path, child in module.named_modules():
        if path.rpartition(".")[2] in names and getattr(child, "weight", NOTHING).dim() == 2:
            return child
    return None


def _biases(module: nn.Module) -> tuple[str, ...]:
    """The projections that have a bias."""
    fused = _linear(module, FUSED)
    joined = ("q_proj", "k_proj", "v_proj") if fused is not None else ()
    of_each = {name: _linear(module, own) for name, own in PROJECTIONS.items()}
    of_each |= dict.fromkeys(joined, fused)
    return tuple(name for name, each in of_each.items() if getattr(each, "bias", None) is not None)


def _outputs(module: nn.Module, name: str) -> int | None:
    """The output channels of a projection of its own; None if it is fused with others."""
    linear: Any = _linear(module, PROJECTIONS[name])
    return None if linear is None else int(linear.weight.shape[0])


def _head_sizes(module: Any, family: Family) -> dict[str, int]:
    heads, kv_heads, head_dim = family.sizes(module)
    values = _outputs(module, "v_proj")
    return {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": head_dim if values is None else values // kv_heads,
    }


def _latent_sizes(module: Any, heads: int) -> dict[str, Any]:
    """The sizes of MLA, which have the same names in regard and in transformers."""
    width = module.qk_nope_head_dim + module.qk_rope_head_dim
    same = ("v_head_dim", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
    own = {name: getattr(module, name) for name in same}
    return {"num_heads": heads, "num_kv_heads": heads, "head_dim": width, **own}


def _state(module: Any) -> dict[str, Any] | None:
    """The sizes of linear attention or of a state space, by the attributes that it has; None of
    other modules."""
    names = vars(module)
    kernel = names.get("conv_kernel_size")
    if kernel is None:
        return None
    if "head_k_dim" in names:
        heads, keyed, valued = module.num_v_heads, module.head_k_dim, module.head_v_dim
        state = heads * keyed * valued + module.conv_dim * kernel
        sizes = (heads, module.num_k_heads, keyed, valued)
        what = "linear attention (gated delta net)"
    elif "ssm_state_size" in names:
        inner, size = module.intermediate_size, module.ssm_state_size
        several = "conv_dim" in names  # Mamba 2: heads, whose inputs are convolved with the state's
        state = inner * size + (module.conv_dim if several else inner) * kernel
        sizes = (
            (module.num_heads,) * 2 + (size, module.head_dim) if several else (1, 1, size, inner)
        )
        what = f"state space layers (Mamba{' 2' * several})"
    else:
        raise ValueError(f"the state of {type(module).__name__} is not known")
    found = dict(zip(("num_heads", "num_kv_heads", "head_dim", "v_head_dim"), sizes, strict=True))
    return found | {"state_elements": state, "unsupported": f"regard has no {what}"}


def _window(module: Any, config: Any, kind: str, family: Family | None) -> int | None:
    """The window of the module's own attribute, or of its configuration for layers of its kind."""
    if family is not None and family.attention == type(module).__name__:
        return family.window_of(module) or None
    if kind in ("full_attention", "chunked_attention"):
        return None
    if "sliding_window" in vars(module):
        return module.sliding_window or None
    known = {each.name for each in fields(config)}  # of its class, and not only of a file
    return config.sliding_window if "sliding_window" in known else None


def _is_rotated(module: Any, config: Any, kind: str, family: Family | None) -> bool:
    """Whether the layer rotates queries and keys, in a model that computes angles."""
    if family is not None and family.rotate is rotating.not_rotated:
        return False
    if getattr(config, "alibi", False):
        return False
    if type(module).__name__ in WINDOWS_ROTATE and kind == "full_attention":
        return config.sliding_window is None
    return bool(getattr(module, "use_rope", True))


def _rope(module: Any, config: Any, kind: str, sizes: dict[str, Any]) -> Rotary:
    """The rotary embedding of a layer."""
    parameters = dict(config.rope_parameters)
    parameters = dict(parameters.get(kind) or parameters)
    if parameters.get("low_freq_factor") == parameters.get("high_freq_factor") is not None:
        # the ramp is a step (Llama 4 Scout), which Llama3 computes from the next larger number
        parameters["high_freq_factor"] = math.nextafter(parameters["low_freq_factor"], math.inf)
    view = SimpleNamespace(
        rope_parameters=parameters,
        max_position_embeddings=config.max_position_embeddings,
        rope_interleave=_pairs_neighbours(module),
    )
    return rope_of(view, sizes.get("qk_rope_head_dim") or sizes["head_dim"])


def _pairs_neighbours(module: Any) -> bool:
    """Whether neighbouring channels are rotated together: by the functions of the file that defines
    the module, of which `rotate_half` is called, and complex numbers are neighbours."""
    if (interleaved := getattr(module.config, "rope_interleave", None)) is not None:
        return bool(interleaved)
    functions = vars(sys.modules[type(module).__module__])
    if (rotate := functions.get("rotate_half")) is not None:
        with torch.device("cpu"):
            return rotate(torch.arange(4.0)).tolist() == [-1.0, 0.0, -3.0, 2.0]
    family = family_of(module)
    return family is None or family.rotate in (
        rotating.complex_pairs,
        rotating.complex_pairs_where_used,
    )


def _qk_norm(module: Any, sizes: dict[str, Any]) -> Literal["head", "width"] | None:
    if (weight := _norm_weight(module)) is None:
        return None
    return "head" if weight.numel() == sizes["head_dim"] else "width"


def _norm_weight(module: Any) -> torch.Tensor | None:
    """The weight of the norm of queries; None without one."""
    weights = (getattr(getattr(module, name, None), "weight", None) for name in Q_NORMS)
    return next((each for each in weights if each is not None), None)


def _tied(module: Any, family: Family | None) -> int | None:
    """The channels of a key that are cached beside its value, where both are one projection."""
    runs = None if family is None else family.tied(module)
    return None if runs is None else TiedKeys(module.k_norm.weight, runs).pieces[1]


def _gate(module: nn.Module, sizes: dict[str, Any]) -> Literal["head", "channel"] | None:
    """The gate that is the other half of the projection of queries (Qwen3-Next)."""
    outputs = _outputs(module, "q_proj")
    return "channel" if outputs == 2 * sizes["num_heads"] * sizes["head_dim"] else None


def _unsupported(shape: LayerShape, module: nn.Module, config: Any) -> str:
    """The reason why no layer of regard computes the module; `""` if one does, as far as known."""
    names, weight = {name for name, _ in module.named_children()}, _norm_weight(module)
    for holds, reason in (
        ("v_norm" in names and shape.tied_channels is None, "values are normalised"),
        (weight is not None and weight.dim() > 1, "each head has a LayerNorm of its own"),
        (names & {"qk_norm", "query_layernorm"}, "queries and keys are normalised after RoPE"),
        (getattr(config, "clip_qkv", None) is not None, "clip_qkv clips queries, keys and values"),
    ):
        if holds:
            return reason
    return ""
