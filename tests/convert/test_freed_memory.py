"""What the C library is told, where there is one that listens."""

import ctypes
from types import SimpleNamespace

import pytest

from regard.convert.healing.freed_memory import keep_freed_memory


def test_large_blocks_are_not_mapped_and_nothing_is_handed_back(monkeypatch):
    told = []
    library = SimpleNamespace(mallopt=lambda name, value: told.append((name, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    keep_freed_memory()
    assert dict(told) == {-4: 0, -1: -1}  # M_MMAP_MAX and M_TRIM_THRESHOLD, mallopt(3)


@pytest.mark.parametrize("error", [None, OSError, TypeError])
def test_other_systems_are_left_as_they_are(monkeypatch, error):
    def library(name):
        if error is not None:
            raise error("no such library")
        return SimpleNamespace()

    monkeypatch.setattr(ctypes, "CDLL", library)
    keep_freed_memory()
