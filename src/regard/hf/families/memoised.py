"""Every layer is handed the same mask and the same angles: what is made of them is made once."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def remembered(name: str, of: Tensor, make: Callable[[], T]) -> T:
    """What `make` gives, kept on the tensor it was made of, as long as nobody writes to that."""
    if torch.compiler.is_compiling() or of.requires_grad:
        return make()
    version = 0 if of.is_inference() else of._version
    kept: Any = getattr(of, name, None)
    if kept is None or kept[0] != version:
        kept = version, make()
        setattr(of, name, kept)
    made: T = kept[1]
    return made
