"""What a mutant is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """One fault.

    `make` returns the subject, `like` has its conventions, `kills` the laws that must be
    broken, and `after` the place where the fault was found in published code.
    """

    name: str
    make: Callable[[], Any]
    like: Mapping[str, Any]
    kills: tuple[str, ...]
    after: str = ""
    slow: bool = field(default=False)
