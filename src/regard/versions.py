"""Detection of tensors that were written in place after they were read."""

from operator import attrgetter

import torch
from torch import Tensor

from regard.tracing import is_concrete


class ChangedInPlace(ValueError, RuntimeError):
    """A tensor was written in place while results computed from it are still in use.

    A `RuntimeError`, like autograd's, and a `ValueError`, like other errors of the caller.
    """


_version = attrgetter("_version")


class Versions:
    """The version counters of tensors at the time of construction; each write in place adds 1.

    Tensors without a version counter are left out: those of inference mode, and traced or
    transformed ones. A copy holds copies of the tensors, with their versions at that time.

    Examples:
        >>> ids = torch.tensor([0, 0, 1])
        >>> read = Versions(ids)
        >>> ids[2] = 0
        >>> read.changed
        True
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = () if torch.compiler.is_compiling() else _watched(tensors)
        self.numbers: tuple[int, ...] = tuple(map(_version, self._tensors))

    @property
    def changed(self) -> bool:
        """Whether one of them was written since; False inside a compiled graph."""
        if torch.compiler.is_compiling():
            return False
        return tuple(map(_version, self._tensors)) != self.numbers

    def __reduce__(self) -> tuple[type["Versions"], tuple[Tensor, ...]]:
        return Versions, self._tensors


def _watched(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each for each in tensors if is_concrete(each) and not each.is_inference())
