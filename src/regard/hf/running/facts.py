"""Facts about the modules of a model on which compiled code relies: compared before each call.

Offloading, adapters, hooks and quantisation change modules, and so the facts.
"""

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any, NamedTuple


class Facts(NamedTuple):
    """The values of keys in dictionaries of modules, and the hooks of modules."""

    homes: tuple[dict[str, Any], ...]
    keys: tuple[str, ...]  # one of each dictionary
    values: tuple[Any, ...]  # None of a key that is not there
    unhooked: tuple[dict[int, Any], ...]  # dictionaries without a hook
    hooks: tuple[dict[int, Any], ...]  # and with some
    numbers: list[tuple[int, ...]]  # of the hooks

    @classmethod
    def of(cls, entries: Iterable[tuple[Any, str]], hooks: Iterable[Any]) -> "Facts":
        """The present facts: `entries` are dictionaries and keys, `hooks` dictionaries of hooks."""
        homes, keys = [*zip(*entries, strict=True)] or ((), ())
        every = tuple(hooks)
        unhooked, hooked = (tuple(x for x in every if bool(x) is has) for has in (False, True))
        values = tuple(map(dict.get, homes, keys))
        return cls(homes, keys, values, unhooked, hooked, [*map(tuple, hooked)])

    @classmethod
    def joined(cls, parts: Iterable["Facts"]) -> "Facts":
        """All of these facts."""
        homes, keys, values, unhooked, hooks, numbers = (
            tuple(chain.from_iterable(field)) for field in zip(*parts, strict=True)
        )
        return cls(homes, keys, values, unhooked, hooks, [*numbers])

    def hold(self) -> bool:
        """Whether the facts are as they were. The loops run in C: a model has some 2,000 facts."""
        if any(self.unhooked) or [*map(tuple, self.hooks)] != self.numbers:
            return False
        return all(map(is_, map(dict.get, self.homes, self.keys), self.values))


NO_FACTS = Facts.of((), ())
