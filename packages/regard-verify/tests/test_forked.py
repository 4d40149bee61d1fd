"""A fork of the process raises what the process would, and may crash without it."""

import os
import signal
import time

import pytest
import torch

import subjects
from regard_verify import forked
from regard_verify.forked import in_a_copy
from regard_verify.law import Broken, Counterexample, NotApplicable, OwnError, Undecided
from regard_verify.subject.conventions import Conventions
from regard_verify.subject.subject import Subject, SubjectError, called

EXAMPLE = Counterexample("B=1", "[0]", "1", "2", "it is off by one", [[True]], [[False]])


def nothing():
    return None


def raises(error):
    def attempt(announce):
        announce("the second way")
        raise error

    return attempt


def dies(by):
    def attempt(announce):
        announce("the first way")
        announce("the second way")
        os.kill(os.getpid(), by)

    return attempt


def test_errors_in_the_fork_are_raised_here():
    in_a_copy(nothing, lambda announce: announce("one"))
    with pytest.raises(Broken) as found:
        in_a_copy(nothing, raises(Broken(EXAMPLE)))
    assert found.value.example == EXAMPLE
    with pytest.raises(NotApplicable, match="it never applies"):
        in_a_copy(nothing, raises(NotApplicable("it never applies")))
    with pytest.raises(SubjectError, match="the second way: 5 instead of 7"):
        in_a_copy(nothing, raises(SubjectError("5 instead of 7")))


@pytest.mark.parametrize("by", [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_is_a_broken_law_and_names_the_call(by, capfd):
    with pytest.raises(Broken) as found:
        in_a_copy(nothing, dies(by))
    assert found.value.example.shape == "the second way"
    assert f"signal {by.value}" in found.value.example.got
    assert capfd.readouterr() == ("", "")


def test_an_exit_is_a_broken_law():
    with pytest.raises(Broken, match="exit code 4"):
        in_a_copy(nothing, lambda announce: (announce("one"), os._exit(4)))


@pytest.mark.parametrize(
    ("control", "attempt"),
    [
        (lambda: os.abort(), nothing),
        (lambda: 1 / 0, nothing),
        (nothing, dies(signal.SIGKILL)),  # the system is out of memory
    ],
    ids=["control crashes", "control raises", "killed"],
)
def test_a_failure_that_may_be_due_to_forking_is_not_reported(control, attempt):
    with pytest.raises(NotApplicable, match="could not be checked in a fork of this process"):
        in_a_copy(control, attempt)


def spins(announce):
    announce("one")
    while True:
        pass


@pytest.mark.parametrize(
    "attempt", [spins, lambda announce: (announce("one"), time.sleep(60))], ids=["spins", "sleeps"]
)
def test_what_does_not_come_back_is_undecided(attempt, monkeypatch):
    monkeypatch.setattr(forked, "TIMEOUT", 1)
    monkeypatch.setattr(forked, "PATIENCE", 2)
    with pytest.raises(Undecided, match="did not come back within 1 s"):
        in_a_copy(nothing, attempt)


def test_an_error_of_this_suite_is_not_the_subjects():
    def attempt(announce):
        announce("one")
        Subject("", "function", Conventions()).run()  # it cannot be called

    with pytest.raises(OwnError, match=r"AssertionError.* \(subject/subject.py:\d+\)"):
        in_a_copy(nothing, attempt)


def test_an_error_of_the_subject_comes_with_its_line():
    def attempt(announce):
        announce("one")
        called(subjects.refuses, 1)

    with pytest.raises(SubjectError) as found:
        in_a_copy(nothing, attempt)
    assert found.value.line.endswith("assert x is None")


def test_without_fork_the_law_does_not_apply(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(NotApplicable, match="none can be made"):
        in_a_copy(nothing, nothing)


def test_the_process_itself_is_unchanged():
    x = torch.zeros(3)

    def attempt(announce):
        announce("one")
        torch.set_default_dtype(torch.float64)
        x.fill_(1.0)

    in_a_copy(nothing, attempt)
    assert torch.get_default_dtype() == torch.float32
    assert x.tolist() == [0.0, 0.0, 0.0]
