"""Hooks around the calls of a model, while caches of regard that were made for it exist.

They act only on calls that fill such a cache: all layers of a call that fails are undone, and a
cache in pages looks for a stored prefix first. What they need is in the cache: a copy or a pickle
of the model has the hooks too, and they do nothing there.
"""

import inspect
import threading
from functools import cache as cached
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import nn

from regard.hf.packages import cache_in, name_of_cache

_CACHES: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()  # those of each model that exist
_LOCK = threading.RLock()  # a finaliser may run at any time, also while it is held


def called_module(model: Any) -> nn.Module:
    """The module whose `forward` generate calls: inside of `torch.compile` and PEFT's wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        if inner is None or inner is model:
            return model
        model = inner


def argument_of(model: Any, cache: Any) -> dict[str, Any]:
    """A cache as the argument that a model's forward takes it by."""
    return {name_of_cache(called_module(model)): cache}


def watch(module: nn.Module, cache: Any) -> None:
    """Around the calls of a module that fill a cache, call its `begin` and `done`, or `undo` if the
    call fails, while the cache exists."""
    with _LOCK:
        number = _CACHES.get(module, 0)
        if not number and _before not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_before, with_kwargs=True)
            module.register_forward_hook(_after, with_kwargs=True, always_call=True)
        _CACHES[module] = number + 1
        finalize(cache, _forget, ref(module)).atexit = False


def _forget(reference: "ref[nn.Module]") -> None:
    """Count one cache less that watches the model; with the last, the hooks are removed."""
    with _LOCK:
        module = reference()
        if module is None:
            return
        _CACHES[module] -= 1
        if not _CACHES[module]:
            del _CACHES[module]
            _remove(module._forward_pre_hooks, _before, module._forward_pre_hooks_with_kwargs)
            flags = module._forward_hooks_with_kwargs, module._forward_hooks_always_called
            _remove(module._forward_hooks, _after, *flags)


def is_own(hook: Any) -> bool:
    """Whether a hook is one of these."""
    return hook is _before or hook is _after


def _remove(hooks: dict[int, Any], hook: Any, *flags: dict[int, bool]) -> None:
    for key in [key for key, each in hooks.items() if each is hook]:
        for each in (hooks, *flags):
            each.pop(key, None)


def _before(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_compiling():
        return None
    given = _named(module, args, kwargs)
    cache = _filled(module, given)
    if cache is None:
        return None
    changed = cache.begin(given)
    return None if changed is given else ((), changed)


def _after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    if torch.compiler.is_compiling():
        return
    cache = _filled(module, _named(module, args, kwargs))
    if cache is None:
        return
    if result is None:  # as torch calls hooks after an error
        cache.undo()
    else:
        cache.done()


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by their names."""
    if not args:
        return kwargs
    own = vars(module).get("forward")
    names = (
        _names_of(type(module).forward)[1:] if own is None else inspect.signature(own).parameters
    )
    return {**dict(zip(names, args, strict=False)), **kwargs}


@cached
def _names_of(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters."""
    return (*inspect.signature(function).parameters,)


def _filled(module: nn.Module, given: dict[str, Any]) -> Any:
    """The cache that a call fills, if it was made for this module; else None."""
    cache = cache_in(given)
    cache = getattr(cache, "self_attention_cache", cache)
    return cache if getattr(cache, "model", None) is module else None
