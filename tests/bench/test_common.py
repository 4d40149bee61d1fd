"""What the benchmark programs share: cold buffers, robust ratios, the processor's name."""

import importlib.util

from pages import ROOT

SPEC = importlib.util.spec_from_file_location("benchmarks_common", ROOT / "benchmarks/common.py")
common = importlib.util.module_from_spec(SPEC)  # drawings have a module of this name, too
SPEC.loader.exec_module(common)


def test_the_processor_has_a_name():
    assert all(common.processor().values())


def test_a_drifting_clock_and_one_bad_round_change_no_ratio():
    base = [2.0**turn for turn in range(9)]
    times = {"base": base, "half": [0.5 * each for each in base[:-1]] + [900.0]}
    rows = common.summary(times, "base")
    assert rows["base"] == {"ms": 16000.0, "ratio": 1.0, "low": 1.0, "high": 1.0}
    assert rows["half"] == {"ms": 8000.0, "ratio": 0.5, "low": 0.5, "high": 0.5}


def test_cold_buffers_alternate_and_exceed_the_cache():
    made = iter(range(1000))
    cold = common.Cold(lambda: next(made), nbytes=100, total=350)
    assert len(cold.buffers) == 4
    assert [cold() for _ in range(6)] == [1, 2, 3, 0, 1, 2]
    assert len(common.Cold(lambda: 0, nbytes=1 << 40).buffers) == 2
    assert len(common.Cold(lambda: 0, nbytes=0).buffers) == 512
