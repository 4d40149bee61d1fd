"""A layer's `repr` is the code that builds it."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def constructor_code(
    name: str, given: dict[str, Any], *, of: Callable[..., Any], positional: Iterable[str]
) -> str:
    """The call that builds a layer: what is `positional`, then what differs from the defaults of `of`.

    >>> from regard import GroupedQueryAttention
    >>> GroupedQueryAttention(64, 8, 2, softcap=50.0)
    GroupedQueryAttention(64, 8, 2, softcap=50.0)
    """
    first = list(positional)
    defaults = {key: each.default for key, each in inspect.signature(of).parameters.items()}
    parts = [repr(given[key]) for key in first]
    for key, value in given.items():
        if key not in first and not _same(value, defaults[key]):
            parts.append(f"{key}={_code(value)}")
    return f"{name}({', '.join(parts)})"


def _same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    if isinstance(value, Tensor):
        return False
    return type(value) is type(default) and bool(value == default)


def _code(value: Any) -> str:
    if inspect.isclass(value) or inspect.isfunction(value):
        return str(value.__name__)
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(map(repr, sorted(value))) + "}"
    return repr(value)
