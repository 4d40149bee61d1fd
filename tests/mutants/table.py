"""What a mutant is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """One fault.

    `make` gives the subject, `like` its conventions, `kills` the checks that must notice, and
    `after` the place where the fault was found in the wild.
    """

    name: str
    make: Callable[[], Any]
    like: Mapping[str, Any]
    kills: tuple[str, ...]
    after: str = ""
    slow: bool = field(default=False)
