"""Benchmarks' contestants in processes of their own."""

import importlib
import os
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def apart(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)  # new processes get this path
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
