"""Linear layers built from given weights and read back as weights; layers rebuilt with new ones."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from regard.hf.loading.offloaded import fetched, only_offloaded
from regard.layers.attention import Attention
from regard.layers.query_scale import UNSCALED
from regard.matrices import matrix_objection

Layer = TypeVar("Layer", bound=nn.Module)


def linear_of(weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None = None) -> nn.Linear:
    """A linear layer with these parameters.

    Examples:
        >>> import torch
        >>> linear_of(torch.eye(2))(torch.ones(2))
        tensor([1., 1.], grad_fn=<SqueezeBackward4>)
    """
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight)
    if bias is not None:
        made.bias = nn.Parameter(bias)
    return made


def weight_and_bias(module: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """The parameters of a plain linear layer, read from disk if they are offloaded. Raises a
    ValueError if it does more than multiply and add: adapters, quantised layers, hooks."""
    linear = module.get_submodule(name)
    objection = None if only_offloaded(linear) else matrix_objection(linear)
    if objection is not None:
        raise ValueError(
            f"{name} {objection}; only a plain nn.Linear can be converted: merge adapters, undo "
            "quantisation and remove hooks first"
        )
    assert isinstance(linear, nn.Linear)
    bias = None if linear.bias is None else fetched(linear, "bias")
    return fetched(linear, "weight"), bias


def rows_of(layer: nn.Module, name: str) -> Float64[Tensor, "R E1"]:
    """A projection's weight in float64, with its bias (or zeros) as a last column."""
    weight, bias = weight_and_bias(layer, name)
    column = weight.new_zeros(len(weight)) if bias is None else bias
    return torch.cat([weight, column[:, None]], dim=1).double()


def rebuilt(
    kind: Callable[..., Layer],
    arguments: Mapping[str, Any],
    children: Mapping[str, nn.Module | nn.Parameter],
) -> Layer:
    """A layer of class `kind`, built with `arguments`, whose parameters are in `children`.

    It is built on the meta device, since all its parameters are replaced.
    """
    with torch.device("meta"):
        made = kind(**arguments)
    for name, child in children.items():
        setattr(made, name, child)
    return made


def shared_copy(layer: Layer, **changes: Any) -> Layer:
    """A layer of the same class with some arguments changed, sharing the layer's parameters.

    Examples:
        >>> from regard import GroupedQueryAttention, Rotary
        >>> gqa = GroupedQueryAttention(16, 4, 2, rope=Rotary(4))
        >>> other = shared_copy(gqa, rope=Rotary(4, pairing="pairs"))
        >>> other, other.q_proj is gqa.q_proj
        (GroupedQueryAttention(16, 4, 2, rope=Rotary(4, pairing='pairs')), True)
    """
    given: Any = layer.arguments
    made = rebuilt(type(layer), {**given, **changes}, _children(layer))
    return made.train(layer.training)


def with_kv_heads(
    layer: Attention, num_kv_heads: int, changed: Mapping[str, nn.Module]
) -> Attention:
    """The layer with another number of key heads; projections that are not `changed` are shared."""
    heads = {"num_heads": layer.num_heads, "num_kv_heads": num_kv_heads}
    arguments, children = {**layer.arguments, **heads}, {**_children(layer), **changed}
    return rebuilt(Attention, arguments, children).train(layer.training)


def common_arguments(layer: Any) -> dict[str, Any]:
    """The constructor arguments that attention layers of every class share."""
    names = ("hidden_size", "num_heads", "dropout", "mask", "scale", "score_bias")
    return {name: getattr(layer, name) for name in (*names, "backend", "precision")}


def _children(layer: nn.Module) -> dict[str, nn.Module | nn.Parameter]:
    return {**dict(layer.named_children()), **dict(layer.named_parameters(recurse=False))}


JOINT_LATENT = "a joint latent of keys and values"
SUPPORTED = {  # the optional features that each target can represent
    JOINT_LATENT: {"qk_norm", "softcap"},
    "DeepSeek's MLA": set(),
    "an aligned merge": {"softcap", "query_scale"},
}


def refuse_unsupported(layer: Attention, target: str) -> None:
    """Raise a ValueError if the layer has a feature that `target`, a key of `SUPPORTED`, cannot
    represent. The error names an alternative."""
    has = {
        "qk_norm": layer.k_norm is not None,
        "gate": layer.gate_proj is not None,
        "sinks": layer.sinks is not None,
        "context_size": layer.context_size != layer.hidden_size,
        "softcap": layer.softcap is not None,
        "query_scale": layer.query_scale is not UNSCALED,
    }
    features = {name for name, given in has.items() if given}
    unsupported = features - SUPPORTED[target]
    if not unsupported:
        return
    out = "a quantised cache does: regard.hf.cache(model, 'quantized', bits=8)"
    if features <= SUPPORTED[JOINT_LATENT]:
        out = f"{JOINT_LATENT} does: to='mla' with a budget, or to='mla:RANK'; {out}"
    names = ", ".join(name for name in has if name in unsupported)
    raise ValueError(
        f"{target} has no place for {names}, which this layer has; to save memory, {out}"
    )


def refuse_width_norm(layer: Attention) -> None:
    """Raise a ValueError if one norm spans all key heads: with more or fewer heads it would divide
    by another mean."""
    if layer.norm_width:
        raise ValueError(
            'qk_norm="width" norms all key heads at once, and more or fewer of them would have '
            "another norm; a joint latent keeps it: to='mla' with a budget, or to='mla:RANK'"
        )
