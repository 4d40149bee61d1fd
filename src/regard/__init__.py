"""Attention layers that are right, fast and cache-aware, on PyTorch.

Four constants are neutral values: they stand where an argument is not given.

Examples:
    >>> import torch
    >>> from regard import EVERYTHING, NOTHING, NO_CACHE, NO_ROPE, Causal, attend
    >>> Causal() & EVERYTHING, Causal() | NOTHING  # neutral masks
    (Causal(), Causal())
    >>> x = torch.ones(1, 1, 2, 4)
    >>> attend(x, x, x, mask=NOTHING).sum().item()  # fully masked rows are 0
    0.0
    >>> NO_CACHE.length, NO_ROPE.dim  # no tokens held, no channels rotated
    (0, 0)
"""

import importlib
import sys
import typing

if typing.TYPE_CHECKING:
    from regard.public import *  # noqa: F403
    from regard.public import __all__ as __all__

__version__ = "0.2.0"

if "torch" in sys.modules:  # its next call of MKL may come before the first use of a name below
    from regard.first_calls import call_vector_functions as _call_vector_functions

    _call_vector_functions()


def __getattr__(name: str) -> typing.Any:
    """Load torch and the library at the first use of a public name: the command line parses its
    options and prints its help without them."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    public = importlib.import_module("regard.public")
    globals().update({each: getattr(public, each) for each in public.__all__})
    globals()["__all__"] = public.__all__
    if name not in globals():  # neither a name nor a folder that these have loaded
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
