"""The arguments of anything that can be called, by their names."""

import functools
import inspect
import typing
from typing import Any

from torch import nn

EMPTY = inspect.Parameter.empty


def parameters_of(target: Any) -> dict[str, inspect.Parameter]:
    """The arguments of a callable by name, without `self`; none where there is no signature.

    An operator of torch and `apply` of an autograd function name none: it is called with q, k and v
    alone, and its options are judged if a function with names calls it.

    Examples:
        >>> list(parameters_of(lambda query, key, value: None))
        ['query', 'key', 'value']
    """
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    own: Any = getattr(owner, "signature_of_forward", getattr(target, "signature_of_call", None))
    if isinstance(own, dict):
        return dict(own)
    while isinstance(target, nn.Module) or hasattr(getattr(target, "__self__", None), "_orig_mod"):
        target = target if isinstance(target, nn.Module) else target.__self__
        target = getattr(target, "_orig_mod", target.forward)  # the module that was compiled
    try:
        found = dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return {}
    if isinstance(target, functools.partial):
        return {n: each for n, each in found.items() if n not in target.keywords}
    return found


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


def annotations_of(made_by: Any) -> dict[str, Any]:
    """The types of its arguments by name, as far as they can be resolved."""
    target: Any = made_by
    target = target.__init__ if isinstance(made_by, type) else target
    try:
        return typing.get_type_hints(target)
    except Exception:  # a name that does not exist: the annotations stay text
        return dict(getattr(target, "__annotations__", {}))


def arguments_of(made_by: Any) -> dict[str, inspect.Parameter]:
    """Its arguments; those of the class it is derived from, where it hands on all of them."""
    found = parameters_of(made_by)
    hands_on = found and all(
        each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in found.values()
    )
    if hands_on and isinstance(made_by, type):
        for base in made_by.__mro__[1:]:
            if "__init__" in vars(base) and base not in (object, nn.Module):
                return parameters_of(base)
    return found
