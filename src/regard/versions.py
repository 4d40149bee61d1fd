"""Noticing that a tensor was written in place after it was read."""

import torch
from torch import Tensor

from regard.tracing import holds_numbers


class ChangedInPlace(ValueError, RuntimeError):
    """A tensor was written in place while what was read of it is still in use.

    A `RuntimeError`, as autograd's own, and a `ValueError`, as all that a caller can mend.
    """


class Versions:
    """The versions of some tensors at the time of making; torch counts one up at each write.

    Tensors whose version cannot be known are left out: those of inference mode, and those that are
    traced or transformed. A copy of this speaks of the copied tensors, as they are then.

    >>> ids = torch.tensor([0, 0, 1])
    >>> read = Versions(ids)
    >>> ids[2] = 0
    >>> read.changed
    True
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._read = () if torch.compiler.is_compiling() else _versions_of(tensors)

    @property
    def changed(self) -> bool:
        """Whether one of them was written since; never known inside a compiled graph."""
        if torch.compiler.is_compiling():
            return False
        return any(each._version != version for each, version in self._read)

    def __reduce__(self) -> tuple[type["Versions"], tuple[Tensor, ...]]:
        return Versions, tuple(each for each, _ in self._read)


def _versions_of(tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, int], ...]:
    known = (each for each in tensors if holds_numbers(each) and not each.is_inference())
    return tuple((each, each._version) for each in known)
