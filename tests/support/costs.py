"""All functions of the costs of attention in one namespace, for tests that replace a module."""

import importlib
from types import SimpleNamespace

MODULES = ("cache_bytes", "weights", "flops", "cost")


def costs() -> SimpleNamespace:
    """The names of all modules of costs, as they are in `sys.modules`."""
    names = {}
    for name in MODULES:
        names |= vars(importlib.import_module(f"regard.plan.{name}"))
    return SimpleNamespace(**names)


REAL = costs()
