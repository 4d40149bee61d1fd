"""Building layers: arguments recorded and printed as code, sizes checked, norms and gates made."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, ParamSpec, Protocol, SupportsIndex, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.heads import split_heads
from regard.layers.inputs import check_rope
from regard.layers.query_scale import UNSCALED, QueryScale, check_query_scale
from regard.masks import EVERYTHING, Mask
from regard.ops.attend import Precision
from regard.ops.bias import ScoreBias
from regard.ops.check import check_mask, check_options, divisors
from regard.rope import Rope

Norm = Literal["head", "width"] | Callable[[int], nn.Module] | None
P = ParamSpec("P")
Constructor = Callable[P, None]


def records_arguments(construct: Constructor[P]) -> Constructor[P]:
    """Decorate a layer's constructor so that `type(layer)(**layer.arguments)` builds it again."""
    signature = inspect.signature(construct)

    @wraps(construct)
    def construct_and_record(*args: P.args, **kwargs: P.kwargs) -> None:
        construct(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        (_, layer), *given = zip(signature.parameters, bound.args, strict=False)
        layer.arguments = dict(given) | bound.kwargs

    construct_and_record.records = True  # type: ignore[attr-defined]
    return construct_and_record


def constructor_code(layer: nn.Module) -> str:
    """The call that builds a layer: positional arguments, then those that are not the default.

    Examples:
        >>> from regard import GroupedQueryAttention
        >>> GroupedQueryAttention(64, 8, 2, softcap=50.0)
        GroupedQueryAttention(64, 8, 2, softcap=50.0)
    """
    parameters: dict[str, inspect.Parameter] = {}
    own: list[inspect.Parameter] = []
    for constructor in [vars(each).get("__init__") for each in reversed(type(layer).__mro__)]:
        if inspect.isfunction(constructor) and "records" in vars(constructor):
            _, *own = inspect.signature(constructor).parameters.values()
            parameters |= {each.name: each for each in own}
    positional = [each.name for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
    arguments: dict[str, Any] = layer.arguments  # type: ignore[assignment]
    parts = [repr(arguments[name]) for name in positional]
    for name in [each for each in parameters if each in arguments and each not in positional]:
        if not _same(arguments[name], parameters[name].default):
            parts.append(f"{name}={_code(arguments[name])}")
    return f"{type(layer).__name__}({', '.join(parts)})"


def _same(value: object, default: object) -> bool:
    if value is default:
        return True
    if isinstance(value, Tensor):
        return False
    return type(value) is type(default) and bool(value == default)


def _code(value: object) -> str:
    if inspect.isclass(value) or inspect.isfunction(value):
        return str(value.__name__)
    if isinstance(value, (set, frozenset)) and value:
        return "{" + ", ".join(map(repr, sorted(value))) + "}"
    return repr(value)


def check_sizes(least: int = 1, **sizes: int | None) -> None:
    """Raise unless every size that is given is a whole number, `least` or more."""
    for name, size in sizes.items():
        if size is not None and not (isinstance(size, SupportsIndex) and size >= least):
            raise ValueError(f"{name} is a whole number, at least {least}, got {size!r}")


def size_of_head(hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> int:
    """The size of a head; raises if the sizes do not fit each other."""
    check_sizes(
        hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}; "
            f"choose num_kv_heads from {divisors(num_heads)}"
        )
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size={hidden_size} is not a multiple of num_heads={num_heads}; choose "
            f"num_heads from {divisors(hidden_size)}, or give head_dim, which may be any size"
        )
    return hidden_size // num_heads if head_dim is None else head_dim


def biased_projections(
    bias: bool | set[str] | frozenset[str],
    projections: frozenset[str],
    usual: frozenset[str],
    condition: str = "",
) -> frozenset[str]:
    """The names of the projections that have a bias: `usual` are those that `bias=True` means, and
    the sizes in `condition` say which `projections` there are."""
    if isinstance(bias, bool):
        return usual if bias else frozenset()
    biased = frozenset(bias)
    if not biased <= projections:
        names = f"{condition}choose from {sorted(projections)}"
        raise ValueError(f"bias names {sorted(biased - projections)}; {names}")
    return biased


class Settings:
    """The settings of a layer with key heads, which `set_heads` and `set_rules` set."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    mask: Mask
    scale: float
    dropout: float
    softcap: float | None
    score_bias: Tensor | ScoreBias | None
    query_scale: QueryScale
    backend: str
    precision: Precision


@runtime_checkable
class Gated(Protocol):
    """The optional parameters of a layer."""

    sinks: Tensor | None
    gate_proj: nn.Linear | None


def set_heads(
    layer: Settings,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
) -> None:
    """Check and set the sizes of a layer, as `Attention` completes them."""
    layer.hidden_size, layer.num_heads = hidden_size, num_heads
    layer.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    layer.head_dim = size_of_head(hidden_size, num_heads, layer.num_kv_heads, head_dim)


def kind_of_heads(layer: Settings) -> str:
    """The name of this attention: `"MHA"`, `"GQA"` or `"MQA"`."""
    if layer.num_kv_heads == layer.num_heads:
        return "MHA"
    return "MQA" if layer.num_kv_heads == 1 else "GQA"


def set_rules(
    layer: Settings,
    rope: Rope,
    mask: Mask | None,
    scale: float | None,
    *,
    dropout: float = 0.0,
    softcap: float | None = None,
    score_bias: Tensor | ScoreBias | None = None,
    query_scale: QueryScale = UNSCALED,
    backend: str,
    precision: Precision,
) -> None:
    """Check and set what a layer of `head_dim` channels does to its scores."""
    mask = EVERYTHING if mask is None else mask
    check_mask(mask)
    check_options(dropout=dropout, softcap=softcap, precision=precision, scale=scale)
    check_rope(rope, range(layer.head_dim + 1), f"head_dim={layer.head_dim}")
    check_query_scale(query_scale)
    layer.rope, layer.mask, layer.dropout, layer.softcap = rope, mask, dropout, softcap
    layer.scale = layer.head_dim**-0.5 * rope.softmax_factor if scale is None else scale
    layer.score_bias, layer.query_scale = score_bias, query_scale
    layer.backend, layer.precision = backend, precision


def build_norm(kind: Norm, head_dim: int, width: int, eps: float) -> nn.Module | None:
    match kind:
        case None:
            return None
        case "head":
            return nn.RMSNorm(head_dim, eps=eps)
        case "width":
            return nn.RMSNorm(width, eps=eps)
        case str() | bool():
            raise ValueError(
                "qk_norm is 'head', 'width', None or a function from a size to a module, "
                f"got {kind!r}"
            )
    return kind(head_dim)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """`x` normed in the dtype of the norm's weights, then cast back: under autocast `x` is in half
    precision and the norm in float32."""
    weight = norm._parameters.get("weight")
    result: Tensor = norm(x if weight is None else x.to(weight.dtype))
    return result.to(x.dtype)


def normed_heads(
    norm: nn.Module | None, flat: Float[Tensor, "B L HD"], head_dim: int, *, width: bool
) -> Float[Tensor, "B H L D"]:
    """Queries or keys as heads, normed one by one or, with `width`, all of a token at once."""
    if norm is None:
        return split_heads(flat, head_dim)
    if width:
        return split_heads(normed(norm, flat), head_dim)
    return normed(norm, split_heads(flat, head_dim))


def build_sinks(wanted: bool, num_heads: int) -> nn.Parameter | None:
    return nn.Parameter(torch.zeros(num_heads)) if wanted else None


def reset_sinks(layer: Gated) -> None:
    """Initialise the parameters that belong to no submodule: sinks are 0."""
    if layer.sinks is not None:
        nn.init.zeros_(layer.sinks)


def build_gate(kind: str | None, hidden_size: int, num_heads: int, width: int) -> nn.Linear | None:
    if kind is None:
        return None
    if kind not in ("head", "channel"):
        raise ValueError(f"gate is 'head', 'channel' or None, got {kind!r}")
    return nn.Linear(hidden_size, num_heads if kind == "head" else width, bias=False)


def gated(
    layer: Gated, x: Float[Tensor, "B L E"], out: Float[Tensor, "B H L Dv"]
) -> Float[Tensor, "B H L Dv"]:
    """The outputs of the heads times the gate of the input, if the layer has one."""
    if layer.gate_proj is None:
        return out
    gate = torch.sigmoid(layer.gate_proj(x))
    return out * split_heads(gate, gate.shape[-1] // out.shape[1]).to(out.dtype)
