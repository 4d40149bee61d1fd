"""What tests of the kernels of products share: vectors of other processors."""

import pytest


@pytest.fixture(params=["16", "16 of AMD", "8", "4"])
def lanes(request, monkeypatch):
    """Vectors of so many lanes, as of AVX-512, AVX2 and NEON; LLVM divides those it lacks."""
    lanes, _, amd = request.param.partition(" ")
    chaining = pytest.importorskip("regard.ops.kernels.chaining", reason="needs numba")
    monkeypatch.setattr(chaining, "machine_lanes", lambda: int(lanes))
    monkeypatch.setattr(chaining, "is_amd", lambda: bool(amd))
    chaining.strip_for.cache_clear()
    yield int(lanes)
    chaining.strip_for.cache_clear()
