"""What the benchmark programs share: cold buffers, robust ratios, the processor's name, contestants
in processes of their own."""

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

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


@pytest.fixture
def apart(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])  # of new processes, too
    return importlib.import_module("apart").Apart


def counting(start):
    """A function that counts its calls, and says in which process."""
    seen = [start]

    def run():
        seen[0] += 1
        return seen[0], os.getpid()

    return run


def failing(at):
    if at == "once":
        raise ValueError("not made")

    def run():
        raise ValueError("not run")

    return run


def is_stopped(process):
    """Whether it is, within some seconds: signals arrive when they can."""
    for _ in range(500):
        if Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] == "T":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the state is read from /proc")
def test_a_process_keeps_its_state_and_is_stopped_between_calls(apart):
    run = apart(counting, 7)
    first, process = run()
    assert (first, *run()) == (8, 9, process) and process != os.getpid()
    assert is_stopped(process)
    run.close()
    assert not Path(f"/proc/{process}").exists()


@pytest.mark.parametrize(("at", "message"), [("once", "not made"), ("later", "not run")])
def test_errors_are_raised_here(at, message, apart):
    with pytest.raises(ValueError, match=message):
        apart(failing, at)()
