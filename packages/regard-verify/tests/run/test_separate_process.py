"""A subject in a separate process: it may do anything, and there is a report."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import subjects
from full_disk import files_of_at_most
from regard_verify import check
from regard_verify.run.check import judge
from regard_verify.run.in_process import Request
from regard_verify.run.separate_process import forked, new_python, of_command
from regard_verify.subject.conventions import conventions_from

FILE = Path(subjects.__file__)
FEW = ["oracle_forward", "convexity", "no_alias"]


def report_on(name, like=None, *, only=FEW, start=forked, quick=False, progress=None, **limits):
    like = conventions_from(like or {})
    request = Request(f"{FILE}:{name}", like, only, quick, 0, **limits)
    return judge(request, progress or (lambda *given: None), start)


def statuses(report):
    return {each.law: each.status for each in report.outcomes}


STARTS = pytest.mark.parametrize("start", [forked, new_python])


@STARTS
def test_the_output_of_the_subject_is_not_shown(capfd, start):
    report = report_on("prints", start=start)
    assert statuses(report) == dict.fromkeys(FEW, "passed")
    assert capfd.readouterr() == ("", "")


@STARTS
def test_the_separate_process_gives_the_same_report(start):
    there = report_on("Tutorial", quick=True, only=None, start=start)
    here = check(subjects.Tutorial, quick=True)
    assert statuses(there) == statuses(here)
    assert [each.example for each in there.outcomes] == [each.example for each in here.outcomes]


def test_a_process_with_several_threads_starts_a_new_python(tmp_path):
    done = threading.Event()
    waiting = threading.Thread(target=done.wait)
    waiting.start()
    process = of_command(Request(f"{FILE}:right", conventions_from({}), FEW, True, 0), tmp_path)
    done.set()
    waiting.join()
    process.kill()
    process.wait()
    assert isinstance(process.kill.__self__, subprocess.Popen)


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
        pytest.param("spins_on_long_ones", "1.5 s of processor time", marks=pytest.mark.long),
        ("hangs_on_long_ones", "within 6 s"),
    ],
)
def test_a_law_that_does_not_come_back_is_undecided(name, told):
    report = report_on(name, limit=1.5)
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
    monkeypatch.setattr("regard_verify.run.separate_process.LOADING", 2.0)
    report = report_on("hangs")
    assert "it did not come back within 2 s" in report.problem


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
