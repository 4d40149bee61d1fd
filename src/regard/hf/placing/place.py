"""place: layers of regard as the attention of a transformers model, which runs and generates.

Layers of keys and values go into the model's own attention classes, so that it stays a stock model.
Latent layers have no such class and are placed themselves (`regard.hf.placing.placed`).
"""

import copy
import math
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from regard.hf.families.finding import attention_modules
from regard.hf.families.layers import attention_of
from regard.hf.families.recognising import known_family
from regard.hf.families.table import is_placed
from regard.hf.placing.placed import LatentLayer, empty_copy, window_of
from regard.layers.attention import Attention
from regard.matrices import matrix_objection

SAME = (
    *("hidden_size", "num_heads", "head_dim", "norm_width", "rope", "mask", "softcap", "dropout"),
    "query_scale",
)
Layer = Attention | LatentLayer
Model = TypeVar("Model", bound=nn.Module)


def place(model: Model, layers: Sequence[nn.Module]) -> Model:
    """Put `layers` where the attention of a transformers model is, in order; returns the model.

    Args:
        model: of a family that `regard.hf` supports, with or without `install`.
        layers: one for each attention module. Either all are `Attention`, then the model keeps its
            class and its form: `save_pretrained` writes what any transformers reads, with
            `config.num_key_value_heads` as the layers have it. Or all are `LatentKVAttention` or
            `MultiHeadLatentAttention`; then `regard.convert.save` writes it and `regard.hf.load`
            reads it. Their parameters are shared, not copied.

    Raises:
        TypeError: if a layer is of another class.
        ValueError: if there are more or fewer than the model has, they do not fit it, or it has
            attention of an unknown family. The model is then as it was.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.convert import as_latent
        >>> from regard.hf import attention_modules, attention_of, place
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=2, intermediate_size=16)
        >>> model = LlamaForCausalLM(config)
        >>> layers = [as_latent(attention_of(each)) for each in attention_modules(model).values()]
        >>> type(place(model, layers).model.layers[0].self_attn).__name__
        'PlacedLatentKV'
    """
    found = attention_modules(model)
    if len(layers) != len(found):
        raise ValueError(
            f"{type(model).__name__} has {len(found)} attention modules, got {len(layers)} layers"
        )
    for layer in layers:
        if not isinstance(layer, Layer):
            raise TypeError(
                "layers are Attention, LatentKVAttention or MultiHeadLatentAttention, "
                f"got {type(layer).__name__}"
            )
    if all(isinstance(layer, Attention) for layer in layers):
        _place_native(model, dict(zip(found.values(), layers, strict=True)))
    else:
        _place_latent(model, dict(zip(found, layers, strict=True)))
    return model


def has_placed_layers(model: nn.Module) -> bool:
    """Whether `place` has put latent layers of regard into a model of transformers."""
    return any(is_placed(module) for module in model.modules())


def sharing(model: Model) -> Model:
    """A copy of the modules of a model that shares all parameters and buffers with it."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(each): each for each in tensors})


def _place_latent(model: Any, layers: Mapping[str, Any]) -> None:
    placed = {name: _placed(model, name, layer) for name, layer in layers.items()}
    for name, layer in placed.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    model.save_pretrained = MethodType(_refuse_to_save, model)


def _placed(model: Any, name: str, layer: Any) -> nn.Module:
    """The layer as transformers can call it, sharing its parameters."""
    from transformers.utils.output_capturing import install_output_capuring_hook

    if isinstance(layer, Attention):
        raise ValueError(
            f"the layer for {name} is {layer.kind} and others are latent; a model has one or the "
            "other: as_latent makes a latent layer of it, exactly"
        )
    module = model.get_submodule(name)
    _check_fits(module, name, layer)
    placed: Any = empty_copy(layer)
    for child_name, child in list(placed.named_children()):
        setattr(placed, child_name, _like(child, layer.get_submodule(child_name)))
    for parameter_name, parameter in layer.named_parameters(recurse=False):
        setattr(placed, parameter_name, parameter)
    placed.layer_idx, placed.config = module.layer_idx, module.config
    install_output_capuring_hook(placed, "attentions", 1)  # transformers collects by class
    placed.train(module.training)
    return placed


def _check_fits(module: Any, name: str, layer: Any) -> None:
    width = module.config.get_text_config(decoder=True).hidden_size
    if layer.hidden_size != width:
        raise ValueError(
            f"the layer for {name} has hidden_size={layer.hidden_size}, the model has {width}"
        )
    theirs, own = known_family(module).window_of(module), window_of(layer)
    if theirs != own:
        raise ValueError(
            f"the layer for {name} has window {own}, the model's masks have {theirs} there; set "
            "the layer's mask, or the model's config.sliding_window"
        )


def _refuse_to_save(model: Any, *args: Any, **options: Any) -> NoReturn:
    """transformers would load such a folder with random values for the weights it does not find."""
    raise ValueError(
        f"this {type(model).__name__} has latent layers of regard, which save_pretrained does not "
        "describe; use regard.convert.save(model, tokenizer, out, ...)"
    )


def _place_native(model: Any, layers: Mapping[nn.Module, Any]) -> None:
    heads = sorted({layer.num_kv_heads for layer in layers.values()})
    if len(heads) > 1:
        raise ValueError(
            f"layers have {heads} key heads, and a model of transformers has one number of them "
            "for all layers; convert all to one"
        )
    for module, layer in layers.items():
        _check_native(attention_of(module), layer)
    model.config.get_text_config(decoder=True).num_key_value_heads = heads[0]
    for module, layer in layers.items():
        _exchange(module, layer)


def _check_native(own: Attention, layer: Attention) -> None:
    """Raise unless the module's class computes, with the layer's weights, what the layer does."""
    both = {name: (getattr(layer, name), getattr(own, name)) for name in SAME}
    differing = {name: (theirs, ours) for name, (theirs, ours) in both.items() if theirs != ours}
    if not math.isclose(layer.scale, own.scale):
        differing["scale"] = layer.scale, own.scale
    existing = {name for name, _ in own.named_parameters()}
    extra = sorted(name for name, _ in layer.named_parameters() if name not in existing)
    if differing or extra or layer.score_bias is not None:
        unlike = [f"{name}={a!r} instead of {b!r}" for name, (a, b) in differing.items()]
        unlike += [f"{name}, which the model's class does not have" for name in extra]
        unlike += ["a score_bias"] if layer.score_bias is not None else []
        raise ValueError(
            f"a layer that replaces the model's own attention differs in its projections only, "
            f"got {'; '.join(unlike)}"
        )


def _exchange(module: Any, layer: Attention) -> None:
    """Set a module's children to the layer's, and its sizes to match: it stays the same object, so
    hooks stay."""
    with torch.device("meta"):
        fresh = type(module)(module.config, module.layer_idx)
    for name, value in vars(fresh).items():
        if not name.startswith("_") and name != "training":
            setattr(module, name, value)
    for name, child in fresh.named_children():
        setattr(module, name, _like(child, layer.get_submodule(name)))
    if layer.sinks is not None:
        module.sinks = layer.sinks


def _like(child: nn.Module, given: nn.Module) -> nn.Module:
    """The projection to place; with a bias of zeros, if only the class's own has a bias."""
    if getattr(child, "bias", None) is None or getattr(given, "bias", None) is not None:
        return given
    if (objection := matrix_objection(given)) is not None:
        raise ValueError(
            f"a projection without a bias, where the model's class has one, {objection}; merge "
            "adapters and remove hooks first"
        )
    assert isinstance(given, nn.Linear)
    with torch.device("meta"):
        made = nn.Linear(given.in_features, given.out_features)
    made.weight = given.weight
    made.bias = nn.Parameter(given.weight.new_zeros(given.out_features))
    return made
