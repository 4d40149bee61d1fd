"""The laws, and the table of them in the order of the report."""

from regard_verify.law import Law
from regard_verify.laws import (
    built,
    caches,
    callers,
    execution,
    heads,
    layers,
    masks,
    numbers,
    padding,
    visibility,
)

MODULES = (
    built,  # that it is a module which runs
    *(numbers, heads),  # what is computed
    *(visibility, masks, padding),  # which keys a query may attend to
    *(execution, callers),  # how a call runs
    *(caches, layers),  # what is stored between calls
)
LAWS: dict[str, Law] = {
    law.name: law for module in MODULES for law in vars(module).values() if isinstance(law, Law)
}

__all__ = ["LAWS"]
