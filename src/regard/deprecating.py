"""Deprecated names, which work and warn from one version until another."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def deprecated(*, since: str, until: str, use: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that each call warns, with the line of the caller.

    Args:
        since: the version of regard that warns first.
        until: the version that no longer has the function; a minor version later or more.
        use: the replacement, as code.

    Examples:
        >>> import warnings
        >>> @deprecated(since="0.9", until="1.1", use="attend(q, k, v)")
        ... def attention(q, k, v): ...
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     attention(1, 2, 3)
        >>> print(caught[0].message)
        attention() is deprecated since regard 0.9 and goes in 1.1; use attend(q, k, v)
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        message = (
            f"{function.__name__}() is deprecated since regard {since} and goes in {until}; "
            f"use {use}"
        )

        @wraps(function)
        def warn_and_call(*args: P.args, **kwargs: P.kwargs) -> T:
            warnings.warn(message, FutureWarning, stacklevel=2)
            return function(*args, **kwargs)

        warn_and_call.deprecated_until = until  # type: ignore[attr-defined]
        return warn_and_call

    return decorate
