"""The arguments of anything that can be called: functions, modules, operators with a schema."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

EMPTY = inspect.Parameter.empty
_TYPES = {"bool": bool, "int": int, "float": float, "str": str}


def parameters_of(target: Any) -> dict[str, inspect.Parameter]:
    """The arguments of a callable by name, without `self`; none where there is no signature.

    Operators of torch and scripted functions have a schema instead, compiled modules the signature
    of the module, and `apply` of an autograd function that of its `forward`.

    Examples:
        >>> list(parameters_of(torch.ops.aten.scaled_dot_product_attention))[:4]
        ['query', 'key', 'value', 'attn_mask']
    """
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    own: Any = getattr(owner, "signature_of_forward", None)
    if own is not None and isinstance(owner, nn.Module):
        return dict(own)
    own = getattr(target, "signature_of_call", None)
    if isinstance(own, dict):
        return dict(own)
    target = _plain(target)
    schema = _schema_of(target)
    if schema is not None:
        return {each.name: _parameter(each) for each in schema.arguments if each.name != "self"}
    try:
        found = dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return {}
    if isinstance(target, functools.partial):
        return {n: each for n, each in found.items() if n not in target.keywords}
    return found


def _plain(target: Any) -> Any:
    """What has the signature: forward of a module, and the module in a compiled one."""
    owner = getattr(target, "__self__", None)
    if isinstance(owner, nn.Module) and hasattr(owner, "_orig_mod"):
        target = owner
    while isinstance(target, nn.Module) and hasattr(target, "_orig_mod"):
        target = target._orig_mod
    if isinstance(target, nn.Module):
        return target.forward
    if is_applied(target):
        forward = owner.forward  # type: ignore[union-attr]
        separate = (
            getattr(owner, "setup_context", None) is not torch.autograd.Function.setup_context
        )
        return forward if separate else functools.partial(forward, None)
    return target


def is_applied(target: Any) -> bool:
    """Whether it is `apply` of an autograd function, which takes no arguments by name."""
    owner = getattr(target, "__self__", None)
    return (
        isinstance(owner, type)
        and issubclass(owner, torch.autograd.Function)
        and getattr(target, "__name__", "") == "apply"
    )


def _schema_of(target: Any) -> Any:
    target = getattr(target, "_opoverload", target)  # of torch.library.custom_op
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = target.overloads()
        target = getattr(target, "default" if "default" in overloads else overloads[0])
    schema = getattr(target, "_schema", None) or getattr(target, "schema", None)
    return schema if isinstance(schema, torch._C.FunctionSchema) else None


def _parameter(each: Any) -> inspect.Parameter:

    default = each.default_value if each.has_default_value() else EMPTY
    parameter = inspect.Parameter
    kind = parameter.KEYWORD_ONLY if each.kwarg_only else parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(
        each.name, kind, default=default, annotation=_TYPES.get(str(each.type), EMPTY)
    )


def order_of(target: Any) -> str:
    """The order of queries, keys and values among the first arguments; "" without these.

    Examples:
        >>> order_of(lambda value, key, query, mask: None), order_of(lambda x, mask: None)
        ('vkq', '')
    """
    names = [name.lower().lstrip("_") for name in parameters_of(target)]
    names = [name for name in names if name not in ("self", "ctx")][:3]
    letters = "".join(name[1:2] if name[:1] == "x" else name[:1] for name in names)
    return letters if sorted(letters) == ["k", "q", "v"] else ""


def required_of(target: Any) -> list[str]:
    """The names of the arguments that have no default."""
    return [
        name
        for name, each in parameters_of(target).items()
        if each.default is EMPTY and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


def is_required(target: Any, name: str) -> bool:
    """Whether a callable has an argument of this name without a default."""
    return name in required_of(target)


def call_by_name(
    target: Callable[..., Any], first: tuple[Any, ...], given: Mapping[str, Any]
) -> Any:
    """The call with `first` in places and the rest by name; all in places where it has no names."""
    if not is_applied(target):
        return target(*first, **given)
    left = list(parameters_of(target).items())[len(first) :]
    defaults = {name: None if each.default is EMPTY else each.default for name, each in left}
    return target(*first, *({**defaults, **given}[name] for name in defaults))
