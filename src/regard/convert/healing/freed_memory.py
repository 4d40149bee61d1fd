"""Freed memory that stays with the process, for work that asks for the same sizes in every step."""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let glibc keep what is freed; elsewhere nothing happens.

    It hands large blocks back to the system and takes them anew, so that every step of training on
    a CPU begins with fresh pages, which the system fills with zeros first. The setting holds
    for the whole process: programs call this, and no function of the library does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # another C library
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, -1)
