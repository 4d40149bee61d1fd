"""The shapes of a model that `regard.convert.save` has written: a base, and layers as data."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from regard.hf.loading.descriptions import layer_from
from regard.hf.loading.latent_layers import ENTRIES, FORMAT
from regard.hf.loading.untrusted import refused
from regard.hf.placing.placed import LatentLayer, arguments_of, window_of
from regard.layers.latent import LatentKVAttention
from regard.plan.configured import described_values
from regard.plan.shapes import LayerShape, ModelShape


def describe_converted(
    values: Mapping[str, Any], file: Path, name: str, weight_bytes: int | None
) -> ModelShape:
    """The shapes of the layers, and what the base's description says besides.

    Args:
        values: of config.json.
        file: named in errors.
        name: of the model.
        weight_bytes: of its files of weights.

    Raises:
        CheckpointError: if entries are missing or unknown, or layers cannot be built.
    """
    if set(values) != ENTRIES or values["format"] != FORMAT:
        rule = f"it must have {', '.join(sorted(ENTRIES))}, and format {FORMAT}"
        raise refused(file, rule, sorted(values))
    base, entries = values["base"], values["layers"]
    if not isinstance(base, dict) or not isinstance(entries, list):
        raise refused(file, "'base' must be an object and 'layers' a list", values)
    model = described_values(base, file, name, weight_bytes, inside="base.")
    if len(entries) != len(model.layers):
        rule = f"'layers' must have an entry for each of the {len(model.layers)} layers"
        raise refused(file, rule, len(entries))
    with torch.device("meta"):  # no memory for parameters
        layers = tuple(latent_shape(layer_from(entry, file)) for entry in entries)
    for layer in layers:
        if layer.hidden_size != model.hidden_size:
            rule = f"layers must have the base's hidden_size={model.hidden_size}"
            raise refused(file, rule, layer.hidden_size)
    remarks = (f"Converted from {model.architecture}; regard.hf.load runs it.",)
    return replace(model, architecture="regard", layers=layers, remarks=remarks)


def latent_shape(layer: LatentLayer) -> LayerShape:
    """The shape of a latent layer.

    Args:
        layer: of regard.

    Examples:
        >>> from regard import Causal, MultiHeadLatentAttention, Rotary
        >>> layer = MultiHeadLatentAttention(64, 4, kv_lora_rank=16, qk_nope_head_dim=8,
        ...     qk_rope_head_dim=4, v_head_dim=8, rope=Rotary(4), mask=Causal())
        >>> shape = latent_shape(layer)
        >>> shape.kind, shape.head_dim, shape.kv_lora_rank
        ('MLA', 12, 16)
    """
    arguments = arguments_of(layer)
    shared: dict[str, Any] = {
        "hidden_size": layer.hidden_size,
        "num_heads": layer.num_heads,
        "kv_lora_rank": layer.kv_lora_rank,
        "window": window_of(layer),
        "scale": layer.scale,
        "rope": repr(layer.rope) if layer.rope.dim else "",
    }
    if isinstance(layer, LatentKVAttention):
        projections = {"q_proj", "kv_b_proj"} if arguments["bias"] else set()
        biased = projections | ({"o_proj"} if arguments["out_bias"] else set())
        return LayerShape(
            **shared,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            v_head_dim=layer.head_dim,
            qk_rope_head_dim=layer.rope.dim,
            keys_by_position=True,
            bias=tuple(sorted(biased)),
            qk_norm=arguments["qk_norm"],
            latent_norm=False,
            softcap=layer.softcap,
        )
    return LayerShape(
        **shared,
        num_kv_heads=layer.num_heads,
        head_dim=layer.qk_nope_head_dim + layer.qk_rope_head_dim,
        v_head_dim=layer.v_head_dim,
        q_lora_rank=layer.q_lora_rank,
        qk_rope_head_dim=layer.qk_rope_head_dim,
        bias=tuple(sorted(arguments["bias"])),
        latent_norm=arguments["latent_norm"],
    )
