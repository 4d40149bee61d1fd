"""Measured rates of a machine: written, read, forgotten; not those of a busy machine."""

import json

import pytest

import regard.cli.tune as tune_module
from regard.bench import Tuning
from regard.ops.rates import SPEED, read_speed
from regard.ops.speed import DEFAULT, Speed
from regard_cli.app import run


@pytest.fixture
def tunable(monkeypatch, tmp_path):
    """A machine twice as fast as the source's, a cache of this test's own, the same rates after."""
    monkeypatch.delenv("REGARD_SPEED")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    now = Speed(2e-6, 320e9, 8e9, 14e9, 4e9)
    tuning = Tuning(now, dict.fromkeys(vars(now), 1.05))
    monkeypatch.setattr(tune_module, "measure_speed", lambda: tuning)
    before = dict(vars(SPEED))
    yield tuning
    vars(SPEED).clear()
    vars(SPEED).update(before)


def test_tune_saves_what_it_measures_and_removes_it(monkeypatch, capsys, tunable):
    assert command(monkeypatch, "tune") == 0
    out = capsys.readouterr().out
    assert "GFLOP/s" in out and "320" in out and "1.05x" in out
    assert read_speed() == tunable.speed == SPEED.now()
    assert command(monkeypatch, "tune", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result.keys() == {"path", "source", "before", "now", "spread"}
    assert result["source"] == vars(DEFAULT)
    assert result["before"] == result["now"] == vars(tunable.speed)
    assert command(monkeypatch, "tune", "--forget") == 0
    assert capsys.readouterr().out == f"removed {result['path']}\n"
    assert read_speed() is None
    assert command(monkeypatch, "tune", "--forget") == 0
    assert capsys.readouterr().out == "nothing was saved\n"


def test_tune_saves_nothing_on_a_busy_machine(monkeypatch, capsys, tunable):
    tunable.spread["call"] = 40.0
    assert command(monkeypatch, "tune") == 2
    assert "busy: call varied 40.0-fold; nothing was saved" in capsys.readouterr().err
    assert read_speed() is None


def command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["regard", *map(str, arguments)])
    return run()
