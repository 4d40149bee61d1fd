"""Measured rates of a machine: written, read, forgotten; not those of a busy machine."""

import json
import math
import statistics
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

from own_rates import own_rates
from regard.bench import Tuning, measure_speed
from regard.bench.choices import Choices
from regard.bench.load import Load
from regard.bench.tuning import MEASURED, _combine
from regard.cli.app import run
from regard.rates import SPEED, read_speed, speed_path, typical

__all__ = ["own_rates"]
QUIET = Load(0.01, 0.05)
FASTER = Choices([0.9] * 6)
STEADY = dict.fromkeys(MEASURED, 1.05)
pytestmark = pytest.mark.usefixtures("own_rates")


@pytest.fixture
def tunable(monkeypatch):
    """A machine whose operators are twice as fast as those of its class."""
    usual = typical(torch.get_num_threads())
    tuning = Tuning(replace(usual, call=usual.call / 2), dict(STEADY), dict(STEADY), QUIET)
    monkeypatch.setattr("regard.bench.measure_speed", lambda: tuning)
    choosing(monkeypatch, FASTER)
    return tuning


def choosing(monkeypatch, choices):
    monkeypatch.setattr("regard.bench.choices.compare_choices", lambda *speeds: choices)


def stored():
    return read_speed(torch.get_num_threads())


def test_tune_saves_what_it_measures_and_removes_it(monkeypatch, capsys, tunable):
    assert command(monkeypatch, "tune") == 0
    out = capsys.readouterr().out
    assert "GFLOP/s" in out and "1.05x" in out
    assert "Of 6 calls for which the measured rates choose another backend" in " ".join(out.split())
    assert stored() == tunable.speed == SPEED.now()
    assert command(monkeypatch, "tune", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    names = {"processor", "path", "usual", "before", "now", "spread", "drift", "load", "choices"}
    assert result.keys() == names
    assert result["choices"] == {"ratios": FASTER.ratios, "average": pytest.approx(0.9)}
    assert result["usual"] == asdict(typical(torch.get_num_threads()))
    assert result["before"] == result["now"] == asdict(tunable.speed)
    assert command(monkeypatch, "tune", "--forget") == 0
    assert capsys.readouterr().out == f"removed {result['path']}\n"
    assert stored() is None
    assert command(monkeypatch, "tune", "--forget") == 0
    assert capsys.readouterr().out == "nothing was saved\n"
    assert command(monkeypatch, "tune", "--forget", "--json") == 0
    assert json.loads(capsys.readouterr().out)["removed"] is None


BUSY = {
    "waited": {"load": Load(0.4, 0.0)},
    "kept 1.0 processors busy": {"load": Load(0.0, 99.0)},
    "the quartiles of call are 40.0-fold apart": {"spread": {**STEADY, "call": 40.0}},
    "the median of fused changed 2.0-fold": {"drift": {**STEADY, "fused": 0.5}},
}


@pytest.mark.parametrize("why", BUSY)
def test_tune_saves_nothing_on_a_busy_machine(monkeypatch, capsys, tunable, why):
    found = replace(tunable, **BUSY[why])
    monkeypatch.setattr("regard.bench.measure_speed", lambda: found)
    assert command(monkeypatch, "tune") == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "this machine is busy: " in err
    assert why.replace("1.0", "99.0") in err and "nothing was saved" in err
    assert stored() is None and not speed_path().exists()


def test_tune_saves_no_rates_that_such_a_processor_cannot_have(monkeypatch, capsys, tunable):
    found = replace(tunable, speed=replace(tunable.speed, stream=tunable.speed.stream / 22))
    monkeypatch.setattr("regard.bench.measure_speed", lambda: found)
    assert command(monkeypatch, "tune") == 2
    assert "stream=" in capsys.readouterr().err
    assert stored() is None


@pytest.mark.parametrize("ratios", [[], [0.9, 1.3, 1.4, 0.8, 1.2, 1.1]])
def test_without_faster_choices_the_ratios_of_the_constants_stay(
    monkeypatch, capsys, tunable, ratios
):
    """The machine's pace is saved: it is what a plan for this machine reads."""
    monkeypatch.setattr("regard.bench.measure_speed", lambda: replace(tunable, pace=0.5))
    choosing(monkeypatch, Choices(ratios))
    assert command(monkeypatch, "tune") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "backends are chosen as by the constants, and all rates change alike" in out
    usual, saved = asdict(typical(torch.get_num_threads())), asdict(stored())
    times = {name: saved[name] / usual[name] for name in usual}
    assert times == pytest.approx({**dict.fromkeys(usual, 0.5), "call": 2.0})
    assert SPEED.now() == stored()


def passes_of(*factors, **others):
    """How many times as fast as usual each rate was in each pass, as `measure_speed` counts."""
    columns = {name: others.get(name, factors) for name in MEASURED}
    return [
        {name: math.log(column[at]) for name, column in columns.items()}
        for at in range(len(factors))
    ]


def faster(passes):
    """The rates that these passes lead to, over the usual ones; and their spread."""
    usual = typical(1)
    speed, spread, pace = _combine(passes, usual)
    assert pace == pytest.approx(math.exp(statistics.median(each["products"] for each in passes)))
    names = asdict(usual)
    found = {name: getattr(speed, name) / getattr(usual, name) for name in names}
    return {**found, "call": 1 / found["call"]}, spread


def test_a_machine_that_is_half_as_fast_keeps_the_usual_pattern():
    found, spread = faster(passes_of(0.5, 0.4, 0.6, 0.5, 0.5))
    assert found == pytest.approx(dict.fromkeys(found, 0.5))
    assert spread == pytest.approx(dict.fromkeys(MEASURED, 1.0))


def test_a_rate_moves_half_way_and_less_the_more_its_passes_differ():
    certain, _ = faster(passes_of(1, 1, 1, 1, 1, fused=[1.44] * 5))
    assert certain["fused"] == pytest.approx(1.2)
    assert all(each == 1 for name, each in certain.items() if name != "fused")
    uncertain, spread = faster(passes_of(1, 1, 1, 1, 1, fused=[1.44, 1.44, 2, 1, 1.2]))
    assert 1 < uncertain["fused"] < 1.19
    assert spread["fused"] == pytest.approx(1.44 / 1.2)


def test_a_pass_on_a_busy_machine_changes_no_rate():
    quiet, _ = faster(passes_of(1, 1, 1, 1, 1, stream=[1.3] * 5, call=[0.7] * 5))
    busy, _ = faster(passes_of(1, 1, 0.2, 1, 1, stream=[1.3, 1.3, 0.26, 1.3, 1.3],
                               call=[0.7, 0.7, 0.14, 0.7, 0.7]))  # fmt: skip
    assert busy == pytest.approx(quiet)


def test_every_rate_is_measured():
    assert MEASURED.keys() <= asdict(typical(1)).keys()
    tuning = measure_speed(passes=2, rounds=2, size=0.01)
    assert all(value > 0 for value in asdict(tuning.speed).values())
    assert tuning.spread.keys() == tuning.drift.keys()
    assert MEASURED.keys() - tuning.spread.keys() <= {"tiled"}  # not every processor can run it


def test_measuring_beside_busy_programs_is_noticed():
    """As many as there are processors: by their processor time, or by the time this one waits."""
    code = "while True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    try:
        tuning = measure_speed(passes=1, rounds=2, size=0.05)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert "this machine is busy: other programs" in tuning.objection()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype_and_autocast_change_no_measured_operation(dtype):
    torch.set_default_dtype(dtype)
    try:
        with torch.autocast("cpu"):
            made = MEASURED["products"](0.05)
            assert made.run().dtype in (torch.float32, torch.bfloat16)
            assert measure_speed(passes=1, rounds=1, size=0.01).speed.products > 0
    finally:
        torch.set_default_dtype(torch.float32)


def command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["regard", *map(str, arguments)])
    return run()
