"""place: whole models of layers that regard has made, for transformers to run and to generate with.

Layers of keys and values go into the model's own attention classes, so that it stays a stock model.
Latent layers have no such class; they stand in its place themselves, hosted: called as transformers
calls its attention, turned by their own rope, cached by any cache.
"""

import math
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.hf.families.finding import attention_modules
from regard.hf.families.layers import attention_of
from regard.hf.families.table import HOSTED, family_of, is_hosted
from regard.hf.placing.describing import arguments_of
from regard.hf.running import attending_latent, attending_latent_kv, positions
from regard.layers.attention import Attention
from regard.layers.construct import matrix_objection
from regard.layers.latent import LatentKVAttention, MultiHeadLatentAttention

SAME = ("hidden_size", "num_heads", "head_dim", "norm_width", "rope", "mask", "softcap", "dropout")
Layer = Attention | LatentKVAttention | MultiHeadLatentAttention
Model = TypeVar("Model", bound=nn.Module)


class HostedLatentKV(LatentKVAttention):
    """A `LatentKVAttention` that is called as transformers calls its attention."""

    layer_idx: int
    config: Any

    def forward(  # type: ignore[override]
        self,
        hidden_states: Float[Tensor, "B L E"],
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **given: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and, if asked for, weights. The model's own angles are not read."""
        return attending_latent_kv.forward(
            self,
            hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **given,
        )


class HostedLatent(MultiHeadLatentAttention):
    """A `MultiHeadLatentAttention` that is called as transformers calls its attention."""

    layer_idx: int
    config: Any

    def forward(  # type: ignore[override]
        self,
        hidden_states: Float[Tensor, "B L E"],
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        position_ids: Int[Tensor, "*B L"] | None = None,
        **given: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and, if asked for, weights. The model's own angles are not read."""
        where = positions.of_queries(hidden_states, position_ids, past_key_values, self.layer_idx)
        return attending_latent.forward(
            self,
            hidden_states,
            position_embeddings=where,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **given,
        )


def place(model: Model, layers: Sequence[nn.Module]) -> Model:
    """Put `layers` where the attention of a transformers model is, in order; gives the model back.

    Args:
        model: one whose attention regard knows, with or without `install`.
        layers: one for each attention module. Either all are `Attention`, then the model keeps its
            class and its form: `save_pretrained` writes what any transformers reads, with
            `config.num_key_value_heads` as the layers have it. Or all are `LatentKVAttention` or
            `MultiHeadLatentAttention`; then `regard.convert.save` writes it and `regard.hf.load`
            reads it. Their parameters are shared, not copied.

    Raises:
        TypeError: if a layer is of another class.
        ValueError: if there are more or fewer than the model has, they do not fit it, or it has
            attention that regard does not know. The model is then as it was.

    >>> import transformers
    >>> from regard.convert import as_latent
    >>> from regard.hf import attention_modules, attention_of
    >>> config = transformers.LlamaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=20,
    ...     num_attention_heads=2, intermediate_size=16)
    >>> model = transformers.LlamaForCausalLM(config)
    >>> layers = [as_latent(attention_of(each)) for each in attention_modules(model).values()]
    >>> type(place(model, layers).model.layers[0].self_attn).__name__
    'HostedLatentKV'
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
        _place_hosted(model, dict(zip(found, layers, strict=True)))
    return model


def hosts(model: nn.Module) -> bool:
    """Whether layers of regard stand in a model of transformers."""
    return any(is_hosted(module) for module in model.modules())


def _place_hosted(model: Any, layers: Mapping[str, Any]) -> None:
    hosted = {name: _hosted(model, name, layer) for name, layer in layers.items()}
    for name, layer in hosted.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    model.save_pretrained = MethodType(_refuse_to_save, model)


def _hosted(model: Any, name: str, layer: Any) -> nn.Module:
    """The layer as one that transformers can call, sharing its parameters."""
    from transformers.utils.output_capturing import install_output_capuring_hook

    if isinstance(layer, Attention):
        raise ValueError(
            f"the layer for {name} is {layer.kind} and others are latent; a model has one or the "
            "other: as_latent makes a latent layer of it, exactly"
        )
    module = model.get_submodule(name)
    _check_fits(module, name, layer)
    made_by = HostedLatentKV if isinstance(layer, LatentKVAttention) else HostedLatent
    chosen = {"form": layer.form} if made_by is HostedLatent else {}
    with torch.device("meta"):  # all of it is replaced
        hosted = made_by(**arguments_of(layer), **chosen, backend=layer.backend)
    for child_name, child in list(hosted.named_children()):
        setattr(hosted, child_name, _like(child, layer.get_submodule(child_name)))
    hosted.layer_idx, hosted.config = module.layer_idx, module.config
    install_output_capuring_hook(hosted, "attentions", 1)  # transformers collects by class
    return hosted.train(module.training)


def _check_fits(module: Any, name: str, layer: Any) -> None:
    width = module.config.get_text_config(decoder=True).hidden_size
    if layer.hidden_size != width:
        raise ValueError(
            f"the layer for {name} has hidden_size={layer.hidden_size}, the model has {width}"
        )
    family = family_of(module)
    assert family is not None
    theirs, own = family.window_of(module), HOSTED["HostedLatent"].window_of(layer)
    if theirs != own:
        raise ValueError(
            f"the layer for {name} has window {own}, the model's masks have {theirs} there; set "
            "the layer's mask, or the model's config.sliding_window"
        )


def _refuse_to_save(model: Any, *args: Any, **options: Any) -> NoReturn:
    """transformers would read such a folder and make up the weights that it does not find."""
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
    """Raise unless the module's class would do with the layer's numbers what the layer does."""
    differing = {
        name: (getattr(layer, name), getattr(own, name))
        for name in SAME
        if getattr(layer, name) != getattr(own, name)
    }
    if not math.isclose(layer.scale, own.scale):
        differing["scale"] = layer.scale, own.scale
    kept = {name for name, _ in own.named_parameters()}
    extra = sorted(name for name, _ in layer.named_parameters() if name not in kept)
    if differing or extra or layer.score_bias is not None:
        unlike = [f"{name}={a!r} instead of {b!r}" for name, (a, b) in differing.items()]
        unlike += [f"{name}, which the model's class does not have" for name in extra]
        unlike += ["a score_bias"] if layer.score_bias is not None else []
        raise ValueError(
            f"a layer that replaces the model's own attention differs in its projections only, "
            f"got {'; '.join(unlike)}"
        )


def _exchange(module: Any, layer: Attention) -> None:
    """Give a module the layer's children, and the numbers it would have with them: it stays the
    same object, so hooks stay."""
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
    """The child that is given, with a bias of zeros if the class has one and it does not."""
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
