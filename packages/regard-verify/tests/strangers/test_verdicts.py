"""Verdicts on drawn attentions: no false alarm. benchmarks/strangers.py measures the rest."""

import json
from pathlib import Path

import pytest

from interpreters import run_python
from regard_verify import check
from session import LONG
from strangers.calls import load
from strangers.draw import draw
from strangers.faults import FAULTS, declared
from strangers.write import write

ROOT = Path(__file__).parents[2]
COUNT = 2 if LONG else 1  # drawings


@pytest.mark.parametrize("index", range(200 if LONG else 4))
def test_no_false_alarm(index):
    drawing = draw(0, index)
    source = write(drawing)
    report = check(load(source), quick=True)
    alarms = [f"{each.law}: {each.example}" for each in report.causes]
    assert not report.failed, f"{source.text}\n{report.failed}\n" + "\n".join(alarms)
    assert not report.having("defect"), report.having("defect")


@pytest.mark.parametrize("index", range(40 if LONG else 2))
@pytest.mark.parametrize("fault", ["scale_missing", "softmax_over_queries", "keys_as_values"])
def test_a_fault_is_named_first(index, fault):
    drawing = draw(0, index)
    if fault not in write(drawing).offered:
        pytest.skip("not offered by this drawing")
    report = check(load(write(drawing, fault)), declared(drawing, fault), quick=True)
    first = report.causes[0]
    assert FAULTS[fault].named_by(first.law, str(first.example)), first


@pytest.mark.parametrize("fault", ["rope_on_queries_only", "rope_on_values"])
@pytest.mark.parametrize("index", [17, 41])
def test_a_rotation_by_tables_that_are_given_is_judged(index, fault):
    """17: cosines and sines; 41: complex numbers."""
    report = check(load(write(draw(10, index), fault)), only=["oracle_forward"], quick=True)
    first = report.causes[0]
    assert FAULTS[fault].named_by(first.law, str(first.example)), first


def measure(*arguments):
    """The last line of the benchmark."""
    done = run_python("benchmarks/strangers.py", *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


def test_the_benchmark_measures_both_kinds(tmp_path):
    text, found = measure(
        "--inside", "--quick", "--count", COUNT, "--faults", 1, "--keep", tmp_path, "--verbose"
    )
    assert found["right"] == COUNT and found["faults"] == COUNT
    assert 0 <= found["right_sentence_first"] <= found["noticed"] <= 1
    assert 0 < found["laws_asked"] <= 1
    assert all(f"0:{index}" in text for index in range(COUNT))


def test_the_benchmark_shows_a_source():
    done = run_python("benchmarks/strangers.py", "--show", "0:0:scale_missing", cwd=ROOT)
    assert write(draw(0, 0), "scale_missing").text in done.stdout
