"""Detection of tensors that were written in place after they were read."""

import torch
from torch import Tensor

from regard.tracing import is_concrete


class ChangedInPlace(ValueError, RuntimeError):
    """A tensor was written in place while results computed from it are still in use.

    A `RuntimeError`, like autograd's, and a `ValueError`, like other errors of the caller.
    """


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
        self._read = () if torch.compiler.is_compiling() else _versions_of(tensors)

    @property
    def changed(self) -> bool:
        """Whether one of them was written since; False inside a compiled graph."""
        if torch.compiler.is_compiling():
            return False
        return any(each._version != version for each, version in self._read)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The version counters that were read."""
        return tuple(version for _, version in self._read)

    def __reduce__(self) -> tuple[type["Versions"], tuple[Tensor, ...]]:
        return Versions, tuple(each for each, _ in self._read)


def _versions_of(tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, int], ...]:
    known = (each for each in tensors if is_concrete(each) and not each.is_inference())
    return tuple((each, each._version) for each in known)
