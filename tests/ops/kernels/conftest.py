"""What tests of the kernels of products share: vectors of other processors."""

import pytest


@pytest.fixture(params=["16", "16 of AMD", "8", "4"])
def lanes(request, monkeypatch):
    """Vectors of so many lanes, as of AVX-512, AVX2 and NEON; LLVM divides those it lacks."""
    lanes, _, amd = request.param.partition(" ")
    chaining = pytest.importorskip("regard.ops.kernels.chaining", reason="needs numba")
    monkeypatch.setattr(chaining, "machine_lanes", lambda: int(lanes))
    monkeypatch.setattr(chaining, "memory_streams", lambda: 1 if amd else 4)
    chaining.strip_for.cache_clear()
    yield int(lanes)
    chaining.strip_for.cache_clear()


@pytest.fixture(params=[1, 4])
def streams(request, monkeypatch):
    """Parts of a block that the decoding kernel requests in turns, as of AMD and of Intel."""
    launching = pytest.importorskip("regard.ops.kernels.launching", reason="needs numba")
    import kernel_checks

    for module in (launching, kernel_checks):
        monkeypatch.setattr(module, "memory_streams", lambda: request.param)
    launching.compiled.cache_clear()
    yield request.param
    launching.compiled.cache_clear()
