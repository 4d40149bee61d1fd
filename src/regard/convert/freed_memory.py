"""Freed memory that stays with the process, for work that asks for the same sizes in every step."""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let glibc keep what is freed; elsewhere nothing happens.

    It hands large blocks back to the system and takes them anew, and a step of training on a CPU
    then spends a quarter of its time on fresh pages. It holds for the whole process, so that only
    programs call this, and no function of the library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # another C library
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, -1)
