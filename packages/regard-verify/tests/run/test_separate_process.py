"""A subject in a separate process: it may do anything, and there is a report."""

import subprocess
import sys
from pathlib import Path

import pytest

import subjects
from full_disk import files_of_at_most
from regard_verify import check

FILE = Path(subjects.__file__)
FEW = ["oracle_forward", "convexity", "no_alias"]


def report_on(name, like=None, *, only=FEW, **options):
    return check(f"{FILE}:{name}", like, only=only, **options)


def statuses(report):
    return {each.law: each.status for each in report.outcomes}


def test_the_output_of_the_subject_is_not_shown(capfd):
    report = report_on("prints")
    assert statuses(report) == dict.fromkeys(FEW, "passed")
    assert capfd.readouterr() == ("", "")


def test_the_separate_process_gives_the_same_report():
    there = report_on("Tutorial", quick=True, only=None)
    here = check(subjects.Tutorial, quick=True)
    assert statuses(there) == statuses(here)
    assert [each.example for each in there.outcomes] == [each.example for each in here.outcomes]


def test_a_crash_is_the_outcome_of_the_current_law():
    report = report_on("aborts_on_long_ones")
    assert statuses(report) == {
        "oracle_forward": "failed",
        "convexity": "passed",
        "no_alias": "passed",
    }
    assert "ended by signal 6" in report.having("failed")[0].example.cause


@pytest.mark.parametrize(
    ("name", "told"),
    [
        pytest.param("spins_on_long_ones", "3 s of processor time", marks=pytest.mark.long),
        ("hangs_on_long_ones", "within 12 s"),
    ],
)
def test_a_law_that_does_not_come_back_is_undecided(name, told):
    report = report_on(name, limit=3.0)
    assert statuses(report) == {
        "oracle_forward": "undecided",
        "convexity": "passed",
        "no_alias": "passed",
    }
    assert told in report.having("undecided")[0].reason
    assert report.failed == []


@pytest.mark.long
def test_a_subject_that_hangs_in_every_law_is_undecided_in_all(monkeypatch):
    monkeypatch.setattr("regard_verify.run.separate_process.SHORT", 1.0)
    asked = [*FEW, "score_shift", "batch_invariance"]
    report = report_on("spins_once_understood", only=asked, limit=1.0)
    assert statuses(report) == dict.fromkeys(asked, "undecided")
    reasons = [each.reason for each in report.outcomes]
    assert sum("did not come back" in reason for reason in reasons) == 3
    assert sum(reason.startswith("not checked: ") for reason in reasons) == 2
    assert report.failed == []


@pytest.mark.long
def test_a_busy_machine_changes_no_verdict():
    """Four processes that compute all the time: less than a third of a processor is left."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        beside = report_on("works_for_a_second", only=FEW[:1], limit=2.5)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert statuses(beside) == dict.fromkeys(FEW[:1], "passed")


def test_a_subject_that_ends_its_process_at_the_first_call():
    report = report_on("leaves_at_once", memory=2.0)
    assert "ended the program with exit code 4" in report.problem
    assert report.exit_code == 2


def test_a_subject_of_declared_layout_that_uses_up_memory_in_every_call_is_broken():
    assert report_on("eats", memory=2.0).exit_code == 2
    report = report_on("eats", {"layout": "BHLD"}, memory=2.0)
    (cause,) = report.causes
    assert cause.law == "runs"
    assert "memory" in str(cause.example)
    assert "torch.zeros" in cause.line
    assert report.exit_code == 1


def test_a_hang_before_the_first_law(monkeypatch):
    monkeypatch.setattr("regard_verify.run.separate_process.LOADING", 6.0)
    report = report_on("hangs")
    assert "it did not come back within 6 s" in report.problem


def test_a_full_disk_is_no_mistake_of_the_subject():
    with files_of_at_most(1000), pytest.raises(OSError, match="set TMPDIR to a folder on a disk"):
        report_on("Tutorial")


def test_progress_is_reported():
    calls = []
    report_on("right", progress=lambda law, done, total: calls.append((law, done)))
    assert [done for _, done in calls] == sorted(done for _, done in calls)
    assert {name for name, _ in calls} >= set(FEW)


def test_a_file_may_declare_its_conventions(tmp_path):
    subject = tmp_path / "mine.py"
    subject.write_text(
        "regard_conventions = {'scale': 1.0}\n"
        "def attention(q, k, v):\n    return (q @ k.mT).softmax(-1) @ v\n"
    )
    report = check(f"{subject}:attention", only=["scale_closed_form"])
    assert statuses(report) == {"scale_closed_form": "passed"}
    subject.write_text("regard_conventions = {'scala': 1.0}\ndef attention(q, k, v): return v\n")
    assert "no convention is called 'scala'" in check(f"{subject}:attention").problem
