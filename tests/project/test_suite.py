"""The tests' own machinery: how long they take, which cases they take, and their processes."""

import json
import re
from pathlib import Path

import pytest

import durations
from covering import covering_items
from interpreters import run_python
from session import LONG

ROOT = Path(__file__).parents[2]
RECORD = json.loads(durations.RECORD.read_text())
BEFORE = {"large": 100.0, "middle": 20.0, "small": 0.5, "other": 79.5}


def test_a_file_that_grew_by_half_is_named():
    (sentence,) = durations.grown(BEFORE, {**BEFORE, "middle": 34.0})
    assert sentence.startswith("middle takes 15.9% of the processor time of the tests (34 s)")


def test_a_new_file_that_takes_long_is_named():
    (sentence,) = durations.grown(BEFORE, {**BEFORE, "new": 5.0})
    assert sentence.startswith("new takes 2.4%")


@pytest.mark.parametrize(
    "now",
    [
        BEFORE,
        {name: 3 * seconds for name, seconds in BEFORE.items()},  # a slower machine
        {**BEFORE, "small": 2.0},  # twice nothing
        {**BEFORE, "middle": 27.0},
        {"large": 100.0, "other": 79.5},  # files that are gone
    ],
)
def test_other_runs_are_let_through(now):
    assert durations.grown(BEFORE, now) == []


def test_what_workers_measure_is_summed(tmp_path):
    file = tmp_path / "seconds"
    file.write_text('{"a": 1.0, "b": 2.0}\n{"a": 3.5}\n')
    assert durations.total_of(file) == {"a": 4.5, "b": 2.0}


def test_the_time_of_children_counts():
    """Of one that has ended, and of one that is alive."""
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    before = durations.processor_time()
    run_python("-c", busy)
    assert durations.processor_time() - before > 0.25


@pytest.mark.parametrize(
    ("page", "figure"),
    [
        ("README.md", r"runs every check: (\d+) minutes"),
        ("README.zh-CN.md", r"运行全部检查.约 (\d+) 分钟"),
        ("CONTRIBUTING.md", r"types and tests: about (\d+) minutes on two cores"),
        ("scripts/test", r"the lot, in (\d+) minutes on two cores"),
    ],
)
def test_every_page_says_how_long_the_tests_take(page, figure):
    """As `./scripts/test --durations` measured it."""
    (minutes,) = re.findall(figure, (ROOT / page).read_text(encoding="utf-8"))
    assert abs(int(minutes) - RECORD["minutes"]) <= 1


class Item:
    def __init__(self, name, **params):
        self.nodeid, self.callspec = name, type("Callspec", (), {"params": params})

    def iter_markers(self, name):
        return [pytest.mark.parametrize(("a", "b"), []).mark, pytest.mark.parametrize("c", []).mark]


@pytest.mark.skipif(LONG, reason="a long run takes every combination")
def test_large_products_keep_every_pair_and_small_ones_every_combination():
    values = [object() for _ in range(4)]
    items = [
        Item(f"{name}[{i}{j}{k}]", a=values[i], b=values[-i], c=values[j], fixture=values[k])
        for name, sizes in (("large", (4, 4, 4)), ("small", (2, 3, 4)))
        for i in range(sizes[0])
        for j in range(sizes[1])
        for k in range(sizes[2])
    ]
    kept = [item.nodeid for item in covering_items(items)]
    assert kept == [name for name in (item.nodeid for item in items) if name in kept]
    large = [name[6:9] for name in kept if name.startswith("large")]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert len({name[one] + name[other] for name in large}) == 16
    assert 16 <= len(large) <= 24
    assert len(kept) - len(large) == 24


def test_a_program_runs_as_in_a_new_python(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys, os; print(__name__, sys.argv[1:], os.getcwd(), os.environ['X'])")
    done = run_python(script, 1, "two", cwd=tmp_path, X="y")
    assert (done.returncode, done.stdout) == (0, f"__main__ ['1', 'two'] {tmp_path} y\n")
    assert run_python("-m", "script", cwd=tmp_path, X="").stdout.startswith("__main__ []")


@pytest.mark.parametrize(
    ("code", "returned", "shown"),
    [
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("raise SystemExit(7)", 7, ""),
        ("import os; os._exit(9)", 9, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'late')", 0, "late"),
    ],
)
def test_the_end_of_a_program_is_that_of_its_process(code, returned, shown):
    done = run_python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (returned, "", shown)
    assert "ZeroDivisionError" in run_python("-c", "1 / 0").stderr
