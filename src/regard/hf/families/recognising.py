"""Attention classes that compute the same as one in the table, told by their source.

A class is recognised if its forward and all that it calls have the source of a class with a row,
but for names. `install` then also compares what both compute.
"""

from functools import cache
from importlib import import_module
from typing import Any

from torch import nn

from regard.hf.families.sources import first_difference, text_of
from regard.hf.families.table import FAMILIES, Family, is_placed

_REFUSED: dict[type, str] = {}  # classes of known source whose outputs differ, and how


@cache
def recognised(kind: type) -> Family | None:
    """The row of a class whose source is the same; None if there is none."""
    text = text_of(kind)
    rows = (row for row in FAMILIES.values() if row.folder and text)
    return next((row for row in rows if _known(row) == text), None)


def exclude(kind: type, why: str) -> None:
    """Stop recognising a class whose outputs differ from regard's; `why` says how."""
    _REFUSED[kind] = why
    nearest.cache_clear()


@cache
def nearest(kind: type) -> str:
    """In words: the class of the table that is most like this one, and the first difference."""
    text = text_of(kind)
    if kind in _REFUSED:
        return _REFUSED[kind]
    if not text:
        return "its source cannot be read"
    known = {row.attention: _known(row) for row in FAMILIES.values() if row.folder}
    name = max(known, key=lambda each: len(set(text) & set(known[each])) / len(set(known[each])))
    return f"most like {name}, but for {first_difference(text, known[name])}"


def _known(row: Family) -> tuple[str, ...]:
    """The text of the class that a row describes, as the installed transformers has it."""
    try:
        file = import_module(f"transformers.models.{row.folder}.modeling_{row.folder}")
    except ImportError:
        return ("not installed",)
    found = getattr(file, row.attention, None)
    return text_of(found) if found is not None else ("not there",)


def family_of(module: nn.Module) -> Family | None:
    """The row for an attention module: by its type's own name, since a subclass may do something
    else, or by its source."""
    kind: Any = type(module)  # typed: mypy takes no class of modules for hashable
    if is_placed(module):
        return vars(kind)["family"]
    if kind in _REFUSED:
        return None
    named = FAMILIES.get(kind.__name__) if kind.__module__.startswith("transformers.") else None
    if named is not None or not is_named_attention(kind):
        return named
    return recognised(kind)


def known_family(module: nn.Module) -> Family:
    """The row for a module that has one."""
    family = family_of(module)
    assert family is not None
    return family


def is_named_attention(kind: type) -> bool:
    """Whether the name of a module's class, or of a base class, contains "attention"."""
    return any("attention" in each.__name__.lower() for each in kind.__mro__)
