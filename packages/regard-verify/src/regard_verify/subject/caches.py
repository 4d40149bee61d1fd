"""The caches that a layer is given: how they are made, and what they hold."""

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from regard_verify.subject.adapters import Adapter, inner_of
from regard_verify.subject.construct import build
from regard_verify.subject.conventions import Conventions
from regard_verify.subject.guesses import SIZES, role_of
from regard_verify.subject.lookup import named_beside
from regard_verify.subject.positions import Positioned
from regard_verify.subject.signatures import annotations_of, arguments_of, parameters_of
from regard_verify.subject.subject import SubjectError, called

Maker = Callable[[], Any]
UNFOUND = "no cache was found that is taken as"


def makers_of(module: Any, argument: str, declared: Any, beside: Any) -> list[tuple[Maker, bool]]:
    """Makers of caches for an argument of a layer, the likeliest first.

    Each comes with whether its caches are of all layers, as those are that are given the index of a
    layer: only these are asked what happens if two layers share one.

    Args:
        module: the layer, or its adapter.
        argument: the name of its argument.
        declared: a function or class, or its name in the file; None if nothing is declared.
        beside: the file.
    """
    if declared is not None:
        made_by = declared if callable(declared) else named_beside(beside, declared)
        if isinstance(made_by, type):
            return [(partial(_made, module, made_by), _is_of_layers(made_by))]
        made = None
        with suppress(SubjectError):  # reported where a step needs it
            made = called(made_by)
        return [(made_by, _is_of_layers(made))]
    if isinstance(module, Adapter) and not isinstance(module, Positioned):
        return [(module.new_cache, True)]
    found = cache_classes(module, argument)
    found += [each for each in vars(beside).values() if _is_cache(each)] if beside else []
    if argument.startswith("past_key_value") and importlib.util.find_spec("transformers"):
        from transformers import DynamicCache

        found.append(DynamicCache)
    return [(partial(_made, module, each), _is_of_layers(each)) for each in dict.fromkeys(found)]


def _is_of_layers(cache: Any) -> bool:
    """Whether a cache, or a class of caches, is given the index of a layer."""
    roles = {role_of(name) for name in parameters_of(getattr(cache, update_of(cache), None))}
    return bool(roles & {"layer index", "layers"})


def cache_classes(module: Any, argument: str) -> list[type]:
    """The classes of caches with which an argument of a layer is annotated."""
    kind = annotations_of(inner_of(module).forward).get(argument)
    parts = getattr(kind, "__args__", (kind,))  # of `Cache | None`
    return [each for each in parts if isinstance(each, type) and _is_cache(each)]


def _is_cache(each: Any) -> bool:
    if not isinstance(each, type) or not update_of(each):
        return False
    return getattr(each, "forward", nn.Module.forward) is nn.Module.forward


def _made(module: Any, made_by: type) -> Any:
    """A cache of the sizes that the layer has."""
    inner = inner_of(module)
    held = {role_of(name): value for name, value in vars(inner).items() if type(value) is int}
    held.setdefault("key heads", held.get("heads", 0))
    roles = {name: role_of(name) for name in arguments_of(made_by)}
    sizes = {n: held[role] for n, role in roles.items() if role in SIZES and held.get(role)}
    settings = getattr(inner, "config", None)
    if settings is not None and "config" in roles:
        sizes["config"] = settings
    try:
        return build(made_by, Conventions(arguments=sizes)).made
    except SubjectError:
        return build(made_by, Conventions()).made


TRUNCATES = ("truncate", "crop", "trim", "rollback")
BY_AMOUNT = ("trim", "rollback")  # how many tokens are dropped, not how many are kept
UPDATES = ("update", "append", "extend", "add", "store", "push", "put", "concat")
POSITIONS = ("input_pos", "pos", "positions", "cache_position", "start_pos", "position_ids")


def storage_bytes(held: Any) -> int:
    """Bytes of all tensors in an object, each storage counted once and whole."""
    storages = [x.untyped_storage() for x in _tensors(held, set())]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def content_of(held: Any) -> float:
    """The sum of all values in an object: it changes when keys and values are stored."""
    return float(sum(float(x.detach().double().abs().sum()) for x in _tensors(held, set())))


def _tensors(held: Any, visited: set[int]) -> list[Tensor]:
    if id(held) in visited:
        return []
    visited.add(id(held))
    if isinstance(held, Tensor):
        return [held]
    inside = list(held) if isinstance(held, (list, tuple)) else []
    inside += list(held.values()) if isinstance(held, dict) else []
    inside += list(getattr(held, "__dict__", {}).values())
    return [x for each in inside if not callable(each) for x in _tensors(each, visited)]


def update_of(made_by: Any) -> str:
    """The method of a class that takes keys and values and returns all of them; "" if none does.

    Examples:
        >>> class Memory:
        ...     def update(self, keys, values, layer): ...
        >>> update_of(Memory)
        'update'
    """
    for name in UPDATES:
        method = getattr(made_by, name, None)
        names = [n for n in parameters_of(method) if n != "self" and n not in POSITIONS]
        first = [n.lower().removeprefix("new_").removeprefix("x")[:1] for n in names[:2]]
        if callable(method) and first == ["k", "v"]:
            return name
    return ""
