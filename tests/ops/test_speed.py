"""Rates as values, and the width of a vector without numba's help."""

from dataclasses import fields, replace

import pytest

import regard.ops.speed as speed_module
from regard.ops.speed import DEFAULT, MARGIN, Speed, vector_lanes


@pytest.mark.parametrize("rate", [each.name for each in fields(Speed)])
@pytest.mark.parametrize("times", [2 * MARGIN, 0.5 / MARGIN, float("nan")])
def test_a_rate_of_no_machine_is_named(rate, times):
    assert DEFAULT.objection() is None
    impossible = replace(DEFAULT, **{rate: times * getattr(DEFAULT, rate)})
    assert f"{rate}=" in impossible.objection()


@pytest.mark.parametrize(
    ("features", "lanes"),
    [("+avx2,+avx512f", 16), ("+avx2,-avx512f,+fma", 8), ("+sse4.2", 4), ("", 4)],
)
def test_the_width_of_a_vector(monkeypatch, features, lanes):
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    assert vector_lanes() == lanes
    monkeypatch.delenv("NUMBA_CPU_FEATURES")
    words = features.replace("+", "").replace("-avx512f,", "").replace(",", " ")
    monkeypatch.setattr(speed_module, "processor", lambda: ("x86_64", f"flags\t: fpu {words}"))
    assert vector_lanes() == lanes


def test_the_width_is_the_one_that_numba_compiles_for():
    pytest.importorskip("numba")
    from regard.ops.kernels.intrinsics import machine_lanes

    assert vector_lanes() == machine_lanes()
