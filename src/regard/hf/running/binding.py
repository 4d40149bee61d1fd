"""Attributes of single modules, replaced and restored: class, weights and hooks stay.

What was there before is held in one attribute of the module, so that a copy or a pickle of an
installed model is installed too, and can be uninstalled.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

_BEFORE = "_before_regard"  # {name: (its value before, None if it had none; regard's value)}
_WRAPPED = "_old_forward"  # where a hook of accelerate, which is the forward, has the one it calls


def replace(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of this module alone, until `restore`; a hook of accelerate stays."""
    own, before = module.__dict__, module.__dict__.setdefault(_BEFORE, {})
    slot = _WRAPPED if name == "forward" and _WRAPPED in own else name
    first, _ = before.get(name, (own.get(slot), None))
    before[name] = first, value
    own[slot] = value


def restore(module: nn.Module) -> None:
    """Put back what was there before the first `replace`, but where somebody else has set another
    value since; nothing is done if there was none."""
    for name, (value, ours) in module.__dict__.pop(_BEFORE, {}).items():
        if module.__dict__.get(name) is ours:
            _put(module, name, value)
        if module.__dict__.get(_WRAPPED) is ours:  # accelerate calls what is there
            _put(module, _WRAPPED, value or MethodType(type(module).forward, module))


def is_patched(module: nn.Module) -> bool:
    """Whether somebody has set a forward of this module alone, other than a hook of accelerate."""
    found = module.__dict__.get(_WRAPPED, module.__dict__.get("forward"))
    if found is None or getattr(found, "__func__", None) is type(module).forward:
        return False
    return found is not bound_forward(module)


def _put(module: nn.Module, name: str, value: Any) -> None:
    if value is None:
        del module.__dict__[name]
    else:
        module.__dict__[name] = value


def bind(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let `module(...)` call `forward(module, ...)`, until `restore`; hooks still run around it."""
    replace(module, "forward", method(forward, module))


def method(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """`function` with the module as its first argument.

    A partial function is copied and pickled with its module: a deep copy of the module calls
    itself. A bound method would be pickled as the name of an attribute, which the class has, too.
    """
    return partial(function, module)


def function_of(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """The function of the `method` that is the attribute of this module alone; else None."""
    return getattr(module.__dict__.get(name), "func", None)


def bound_forward(module: nn.Module) -> Any:
    """What `bind` has put in the place of this module's forward; None if it has not."""
    return module.__dict__.get(_BEFORE, {}).get("forward", (None, None))[1]


def is_bound(module: nn.Module) -> bool:
    """Whether `bind` has replaced the forward of this module."""
    return bound_forward(module) is not None


def bound(module: nn.Module, forward: Callable[..., Any]) -> AbstractContextManager[None]:
    """The module with another forward inside of the `with` block."""
    return all_bound([(module, forward)])


def is_changed(model: nn.Module) -> bool:
    """Whether an attribute of a module in it is replaced."""
    return any(_BEFORE in module.__dict__ for module in model.modules())


@contextmanager
def all_bound(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Each module with another forward inside of the `with` block."""
    before = []
    try:
        for module, forward in forwards:
            before.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = method(forward, module)
        yield
    finally:
        for module, own in reversed(before):
            _put(module, "forward", own)


def calling(layer: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an attention module of transformers that calls `layer` on hidden states.

    It returns no attention weights. The layer applies its own mask and counts positions itself.
    """
    return lambda module, hidden_states, **given: (layer(hidden_states), None)
