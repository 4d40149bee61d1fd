"""A model's attention module as a layer of regard that shares its weights."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from regard.hf.families import rotating
from regard.hf.families.projecting import Separate
from regard.hf.families.recognising import family_of
from regard.hf.families.table import FAMILIES, Family, is_placed
from regard.layers.attention import Attention
from regard.rope import NO_ROPE, NoRotary, Pairing, Rotary
from regard.rope.scaling import NTK, LinearScaling, Llama3, LongRope, Scaling, Yarn

# rotations that a layer computes from positions it counts itself
COUNTED = (rotating.halves, rotating.half_angles, rotating.halves_where_used)


def attention_of(module: Any) -> Attention:
    """A layer of regard that computes what this module does, with the same parameters.

    The layer counts positions and has the mask itself: it takes hidden states and a cache.

    Args:
        module: an attention module of a transformers model.

    Raises:
        ValueError: if the module is of no known family or does what no single layer does, or its
            rope is scaled in an unknown way.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.hf import attention_of
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=1, intermediate_size=16, num_key_value_heads=1)
        >>> model = LlamaForCausalLM(config)
        >>> layer = attention_of(model.model.layers[0].self_attn)
        >>> layer.kind, layer.mask, layer.rope
        ('MQA', Causal(), Rotary(8))
        >>> layer.q_proj is model.model.layers[0].self_attn.q_proj
        True
    """
    family = family_of(module)
    if family is None:
        raise ValueError(
            f"{type(module).__name__} has no row in regard.hf.families; it has "
            f"{', '.join(FAMILIES)}"
        )
    if FAMILIES.get(type(module).__name__) is not family and not is_placed(module):
        raise ValueError(
            f"{type(module).__name__} is known by its source, which does not say at what angles "
            "its model rotates; regard.hf.install runs the module as it is"
        )
    if is_placed(module):
        raise ValueError(f"this {module.kind} layer is regard's own already, and no Attention")
    children = _children(family, module)
    heads, kv_heads, head_dim = family.sizes(module)
    norm = family.project.children.norm if family.project.children else None
    biased = {name for name in children if getattr(children[name], "bias", None) is not None}
    with torch.device("meta"):  # all parameters are replaced by the module's own
        layer = Attention(
            children["q_proj"].in_features,
            heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            bias=biased or False,
            qk_norm=norm,
            dropout=family.dropout(module),
            rope=_rope(module, head_dim),
            mask=family.pattern_of(module),
            scale=family.scale(module),
            softcap=family.softcap(module),
            query_scale=family.query_scale(module),
            sinks=family.sinks(module) is not None,
        )
    for name, child in children.items():
        setattr(layer, name, child)
    if family.sinks(module) is not None:
        layer.sinks = family.sinks(module)
    return layer.train(module.training)


def _children(family: Family, module: nn.Module) -> dict[str, Any]:
    """The children that an `Attention` has too, by name."""
    of, output = family.project.children, FAMILIES["LlamaAttention"].output
    differs = of is None or of != Separate(norm=of.norm) or family.output is not output
    if of is None or differs or family.latent:
        raise ValueError(
            f"{type(module).__name__} projects or outputs in a way that no single layer of regard "
            "does; regard.hf.install runs it as it is"
        )
    if family.rotate not in COUNTED:
        raise ValueError(
            f"{type(module).__name__} does not rotate halves by positions that a layer can "
            "count; regard.hf.install runs it as it is"
        )
    names = ("q_proj", "k_proj", "v_proj", "o_proj", *(("q_norm", "k_norm") if of.norm else ()))
    return {name: module.get_submodule(name) for name in names}


def _rope(module: Any, head_dim: int) -> Rotary | NoRotary:
    if not getattr(module, "use_rope", True):
        return NO_ROPE
    rope = rope_of(module.config, head_dim, getattr(module, "layer_type", None))
    if rope.scaling is not None and rope.scaling.uses_length:
        raise ValueError(
            f"the frequencies of {rope.scaling!r} change with the length of a call, and those of "
            "cached keys do not; regard.hf.install runs the module as it is"
        )
    return rope


def rope_of(config: Any, head_dim: int, layer_type: str | None = None) -> Rotary:
    """The rotary embedding that a model's config describes.

    Args:
        config: of a transformers model, with `rope_parameters`.
        head_dim: size of a head.
        layer_type: the type of the layer, for models whose types have different parameters.

    Raises:
        ValueError: if `rope_type` is one that regard does not compute.

    Examples:
        >>> from transformers import LlamaConfig
        >>> from regard.hf import rope_of
        >>> scaled = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
        >>> rope_of(LlamaConfig(rope_parameters=scaled), head_dim=8)
        Rotary(8, theta=500.0, scaling=LinearScaling(4.0))
    """
    rope = config.rope_parameters
    if layer_type in rope:
        rope = rope[layer_type]
    kind = rope.get("rope_type", "default")
    if kind not in SCALINGS:
        raise ValueError(
            f"rope_type={kind!r} is none of those that regard computes: "
            f"{', '.join(map(repr, SCALINGS))}; build Rotary with a scaling, or Frequencies"
        )
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    pairing: Pairing = "pairs" if getattr(config, "rope_interleave", False) else "halves"
    scaling = _scaling(SCALINGS[kind], rope, config)
    return Rotary(dim, theta=rope["rope_theta"], pairing=pairing, scaling=scaling)


SCALINGS: dict[str, Any] = {  # by transformers' names
    "default": None,
    "linear": LinearScaling,
    "llama3": Llama3,
    "dynamic": NTK,
    "yarn": Yarn,
    "longrope": LongRope,
}


def _scaling(kind: Any, rope: Mapping[str, Any], config: Any) -> Scaling | None:
    """Build a scaling: its arguments have the names of the entries of `rope`, but for one."""
    if kind is None:
        return None
    given = {name: value for name, value in rope.items() if value is not None}
    before = given.get("original_max_position_embeddings")
    if kind is NTK:
        before = config.max_position_embeddings
    if kind is LongRope:
        given.setdefault("factor", config.max_position_embeddings / before)
    given["original_max_position"] = before
    return kind(**{each.name: given[each.name] for each in fields(kind) if each.name in given})
