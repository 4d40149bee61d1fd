"""Memory in huge pages, for tensors that kernels read from one end to the other.

A processor looks up where each page of memory lies, and reads ahead within one. A page is 4 KiB
unless a program asks for 2 MiB, where Linux is set up as usual
(https://docs.kernel.org/admin-guide/mm/transhuge.html). Then a step waits less for memory.
"""

import contextlib
import ctypes
import math
import mmap
import os
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor, nn

LARGE = 4 << 20  # bytes of memory, from which huge pages are asked for: two of them
_TRIMMED = 64 << 20  # bytes that are moved before those that they leave are returned to the system
_LINE = 64  # bytes of a cache line: each tensor begins with one


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU; of `LARGE` bytes or more in huge pages, where the system has any.

    Examples:
        >>> zeros_in_huge_pages((2, 3), torch.float32)
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
    """
    size = math.prod(shape) * dtype.itemsize
    area = _area(size) if size >= LARGE else None
    if area is None:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(area, dtype=dtype).view(shape)


def move_to_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Move the data of tensors to huge pages, one after the other, and return the number of bytes.

    Tensors elsewhere than on the CPU stay, and those that are not contiguous, share their memory
    with others or with other processes, or are of a subclass. All stay, and 0 is returned, where
    the system has no huge pages, and if they take fewer than `LARGE` bytes together, or more than
    half of the machine's memory.

    Examples:
        >>> move_to_huge_pages([torch.zeros(3)])
        0
    """
    plain = [x for x in dict.fromkeys(tensors) if _is_plain(x)]
    users = Counter(x.untyped_storage().data_ptr() for x in plain)
    own = [x for x in plain if users[x.untyped_storage().data_ptr()] == 1]
    *starts, size = accumulate((-(-x.nbytes // _LINE) * _LINE for x in own), initial=0)
    area = _area(size) if LARGE <= size <= _most_bytes() else None
    if area is None:
        return 0
    moved = 0
    for x, start in zip(own, starts, strict=True):
        place = torch.frombuffer(area, dtype=torch.uint8, count=x.nbytes, offset=start)
        x.data = place.view(x.dtype).view(x.shape).copy_(x.detach())
        if start - moved >= _TRIMMED:
            moved = start
            _trim()
    _trim()
    return sum(x.nbytes for x in own)


def _most_bytes() -> int:
    """Half of the machine's memory; none where it is not known, as on Windows."""
    known = hasattr(os, "sysconf")
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2 if known else 0


def _trim() -> None:
    """Return freed memory to the system, which the C library may keep; GNU's has a function."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _is_plain(x: Tensor) -> bool:
    if type(x) not in (Tensor, nn.Parameter) or not x.is_cpu or not x.numel():
        return False
    if x.layout is not torch.strided or not x.is_contiguous() or x.is_inference():
        return False
    return not x.is_shared() and x.untyped_storage().nbytes() == x.nbytes


def _area(size: int) -> mmap.mmap | None:
    """Zeros in huge pages, or in others where the kernel has none; None if it is not Linux, or
    refuses so much memory."""
    if sys.platform != "linux":
        return None
    try:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with contextlib.suppress(OSError, AttributeError):  # a kernel or a libc without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return area
