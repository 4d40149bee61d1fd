"""What a cache holds, and the usual names of its methods."""

from typing import Any

from torch import Tensor

from regard_verify.subject.signatures import parameters_of

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
