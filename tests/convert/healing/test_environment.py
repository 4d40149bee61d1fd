"""Freed memory is reused on glibc, so that later training steps need no new pages."""

import ctypes
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from regard.convert.healing.environment import keep_freed_memory

# blocks of 64 MiB, since glibc may reuse freed ones of up to 32 MiB by itself
FAULTS = """
import resource, torch
from regard.convert.healing.environment import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

default = faults()
keep_freed_memory()
faults()
print(default, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_repeated_large_allocations_cause_fewer_page_faults():
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    default, kept = map(int, done.stdout.split())
    assert default > 100  # 8 pages of 2 MiB a block would be 128, pages of 4 KiB 65,536
    assert kept < default / 4


def test_large_blocks_are_not_mapped_and_none_are_returned(monkeypatch):
    options = []
    library = SimpleNamespace(mallopt=lambda name, value: options.append((name, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    keep_freed_memory()
    assert dict(options) == {-4: 0, -1: -1}  # M_MMAP_MAX and M_TRIM_THRESHOLD, mallopt(3)


@pytest.mark.parametrize("error", [None, OSError, TypeError])
def test_other_c_libraries_are_not_changed(monkeypatch, error):
    calls = []

    def library(name):
        calls.append(name)
        if error is not None:
            raise error("no such library")
        return SimpleNamespace()

    monkeypatch.setattr(ctypes, "CDLL", library)
    keep_freed_memory()
    assert calls == [None]  # the process's own library is searched, and nothing else is called
