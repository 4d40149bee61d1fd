"""Which modules of a model are attention, and which of them regard knows."""

import sys
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from regard.hf.families.table import FAMILIES, family_of


class Found(NamedTuple):
    """Attention modules by name, in order: those with a row in `regard.hf.families`, and others."""

    known: dict[str, nn.Module]
    unknown: dict[str, nn.Module]


def find(model: nn.Module) -> Found:
    """Look through a model.

    A module is attention if its family is known, or if it has parameters and its class, or one
    that this is made of, is called so; and if it neither lies inside attention nor merely wraps it.
    """
    known = {name: module for name, module in model.named_modules() if family_of(module)}
    unknown: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not _says_so(module) or not list(module.parameters()):
            continue
        wraps = any(each == name or each.startswith(f"{name}.") for each in known)
        inside = any(name.startswith(f"{each}.") for each in (*known, *unknown))
        if not wraps and not inside:
            unknown[name] = module
    return Found(known, unknown)


def asks_the_interface(modules: Iterable[nn.Module]) -> bool:
    """Whether all of these find their attention function through transformers' interface: whether
    the files that define their classes import it."""
    files = [sys.modules.get(type(module).__module__) for module in modules]
    return bool(files) and all(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files)


def _says_so(module: nn.Module) -> bool:
    """Whether the module's class, or one that it is made of, is called attention."""
    return any("attention" in each.__name__.lower() for each in type(module).__mro__)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every attention module of a model by its name, in order.

    Raises:
        ValueError: if there is none, or one whose type has no row in `regard.hf.families`.
    """
    found = find(model)
    if found.unknown or not found.known:
        raise ValueError(
            f"{unknown_attention(model, found)}; what has no row is run by regard.hf.register(), "
            "and neither converted nor compared"
        )
    return found.known


def unknown_attention(model: nn.Module, found: Found) -> str:
    """What a model has that regard does not know, and what would make it known."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    what = type(model).__name__ + (f" (model_type {model_type!r})" if model_type else "")
    if not found.unknown:
        return (
            f"{what} has no attention module that regard knows; "
            f"it knows {', '.join(FAMILIES)}, as transformers builds them"
        )
    counts: dict[str, int] = {}
    for module in found.unknown.values():
        counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    names = ", ".join(f"{kind} ({count} modules)" for kind, count in counts.items())
    return (
        f"{what} has attention that regard does not know: {names}; what is missing is a row in "
        f"regard.hf.families, which has {', '.join(FAMILIES)}"
    )
