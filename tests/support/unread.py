"""A device whose tensors cannot be read, on a machine without one.

Tensors on torch's `meta` device have shapes and no elements: an operator that needs an element on
the host raises there, as it waits on a GPU. They are plain tensors, so that the library takes the
paths of a GPU; where it knows `meta` itself and reads nothing, `unread` raises too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard import masks
from regard.masks import row_data, tree

DEVICE = torch.device("meta")
READS = {  # functions that wait for a device, by their names in torch
    "__bool__", "__contains__", "__float__", "__index__", "__int__", "allclose", "cpu", "equal",
    "is_nonzero", "item", "masked_select", "nonzero", "numpy", "tolist", "unique",
    "unique_consecutive",
}  # fmt: skip
COPIES = (torch.tensor, torch.as_tensor, torch.asarray)  # of numbers on the host: these wait, too


class Waited(AssertionError):
    """A call would have waited for the device."""


class _Refuses(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if name in READS and any(each.is_meta for each in given):
            raise Waited(name)
        if function in COPIES and torch.device(kwargs.get("device") or "cpu") == DEVICE:
            raise Waited(f"{name} of numbers on the host")
        if name == "__getitem__" and any(_is_flags(each) for each in given[1:]):
            raise Waited("indexing by booleans")
        if name == "repeat_interleave" and "output_size" not in kwargs and len(given) > 1:
            raise Waited("repeat_interleave by a tensor")
        out = function(*args, **kwargs)
        moved = isinstance(out, Tensor) and given and given[0].is_meta != out.is_meta
        if moved and name in ("to", "copy_"):
            raise Waited(f"{name} {out.device}")
        return out


def _is_flags(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.is_meta


@contextmanager
def unread() -> Iterator[None]:
    """Inside, nothing may read a tensor of `DEVICE`, nor copy one to it or from it."""

    def readable(value: Tensor) -> bool:
        raise Waited("readable: a mask would read its data")

    with pytest.MonkeyPatch.context() as patch, _Refuses():
        for module in (row_data, tree):
            patch.setattr(module, "readable", readable)
        yield


def moved(mask: masks.Mask) -> masks.Mask:
    """A mask that read its data when it was made, with the data on `DEVICE`."""
    for name, value in list(vars(mask).items()):
        if isinstance(value, Tensor):
            object.__setattr__(mask, name, value.to(DEVICE))
    for part in getattr(mask, "parts", ()):
        moved(part)
    return mask


def steps(run: Callable[[], object]) -> None:
    """Run twice: what is made once, such as the angles of a rope, may be copied to the device."""
    run()
    with unread():
        run()
