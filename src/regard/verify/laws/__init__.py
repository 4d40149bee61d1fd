"""The laws, by subject; importing this fills the table of checks."""

from regard.verify.law import CHECKS
from regard.verify.laws import (
    caching,
    callers,
    changing,
    compiling,
    failing,
    forms,
    gradients,
    heads,
    hidden,
    numbers,
    orders,
    paging,
    rotation,
    running,
    visibility,
)

# Of the report: what it computes, whom it sees, how it runs, what it keeps.
ORDER = (
    *(numbers, orders, heads, visibility, hidden, gradients),
    *(rotation, running, callers, changing, compiling, caching, failing, paging, forms),
)
_PLACE = {module.__name__: at for at, module in enumerate(ORDER)}
for _name in sorted(CHECKS, key=lambda name: _PLACE[CHECKS[name].run.__module__]):
    CHECKS[_name] = CHECKS.pop(_name)

__all__ = [
    "CHECKS",
    "caching",
    "callers",
    "changing",
    "compiling",
    "failing",
    "forms",
    "gradients",
    "heads",
    "hidden",
    "numbers",
    "orders",
    "paging",
    "rotation",
    "running",
    "visibility",
]
