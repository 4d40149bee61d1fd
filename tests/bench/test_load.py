"""The processor time of other programs, while something is measured."""

import subprocess
import sys
import time

import pytest

import regard.bench.load as load_module
from regard.bench.load import Load, Watch

STAT = load_module._STAT


def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_time_of_this_process_is_not_that_of_others(monkeypatch):
    """The others' time grows as the clock of all programs does beyond this process's own."""
    now = {"wall": 0.0, "thread": 0.0, "process": 0.0, "everyone": 0.0}
    monkeypatch.setattr(load_module, "_clocks", lambda: tuple(now.values()))
    watch = Watch()
    now.update(wall=2.0, thread=1.5, process=3.0, everyone=4.0)
    assert watch.load() == Load(waited=0.25, others=0.5)
    now.update(everyone=0.0)  # a system that does not say it
    assert watch.load().others == 0.0


@pytest.mark.skipif(not STAT.exists(), reason="the system does not say what other programs take")
def test_a_busy_program_is_seen():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        watch = Watch()
        spin(0.5)
        assert watch.load().others > 0.5
    finally:
        busy.kill()
        busy.wait()


def test_a_system_without_the_table_still_sees_the_time_that_it_waits(monkeypatch, tmp_path):
    monkeypatch.setattr(load_module, "_STAT", tmp_path / "none")
    watch = Watch()
    time.sleep(0.1)
    load = watch.load()
    assert load.waited > 0.8 and load.others == 0.0
    assert "waited" in load.objection(threads=1)


@pytest.mark.parametrize(
    ("others", "threads", "refused"),
    [(0.1, 2, False), (1.0, 2, True), (1.0, 1, True), (0.3, 1, False), (4.0, 2, True)],
)
def test_two_processors_are_shared_with_no_busy_program(monkeypatch, others, threads, refused):
    monkeypatch.setattr(load_module.os, "cpu_count", lambda: 2)
    assert (Load(0.0, others).objection(threads) is not None) == refused


def test_many_processors_may_be_half_busy(monkeypatch):
    monkeypatch.setattr(load_module.os, "cpu_count", lambda: 64)
    assert Load(0.0, 20.0).objection(threads=2) is None
    assert Load(0.0, 40.0).objection(threads=2) is not None
