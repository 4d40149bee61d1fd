"""A copy of the process answers like the process itself, and may die without taking it along."""

import os
import signal
import time

import pytest
import torch

from regard.verify.law import Broken, Counterexample, NotApplicable
from regard.verify.run import forked
from regard.verify.run.forked import in_a_copy
from regard.verify.subject.subject import SubjectError

EXAMPLE = Counterexample("B=1", "[0]", "1", "2", "it is off by one", [[True]], [[False]])


def nothing():
    return None


def raises(error):
    def ask(tell):
        tell("the second way")
        raise error

    return ask


def dies(by):
    def ask(tell):
        tell("the first way")
        tell("the second way")
        os.kill(os.getpid(), by)

    return ask


def test_an_answer_is_that_of_the_process():
    in_a_copy(nothing, lambda tell: tell("one"))
    with pytest.raises(Broken) as found:
        in_a_copy(nothing, raises(Broken(EXAMPLE)))
    assert found.value.example == EXAMPLE
    with pytest.raises(NotApplicable, match="it is never asked"):
        in_a_copy(nothing, raises(NotApplicable("it is never asked")))
    with pytest.raises(SubjectError, match="the second way: 5 where 7 was due"):
        in_a_copy(nothing, raises(SubjectError("5 where 7 was due")))


@pytest.mark.parametrize("by", [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_is_a_broken_law_and_names_what_was_tried(by, capfd):
    with pytest.raises(Broken) as found:
        in_a_copy(nothing, dies(by))
    assert found.value.example.shape == "the second way"
    assert f"signal {by.value}" in found.value.example.got
    assert capfd.readouterr() == ("", "")


def test_an_exit_is_a_broken_law():
    with pytest.raises(Broken, match="exit code 4"):
        in_a_copy(nothing, lambda tell: (tell("one"), os._exit(4)))


@pytest.mark.parametrize(
    ("control", "ask"),
    [
        (lambda: os.abort(), nothing),
        (lambda: 1 / 0, nothing),
        (nothing, dies(signal.SIGKILL)),  # the system is out of memory
        (nothing, lambda tell: (tell("one"), time.sleep(60))),
    ],
    ids=["control crashes", "control raises", "killed", "does not come back"],
)
def test_what_may_be_the_copys_fault_is_not_judged(control, ask, monkeypatch):
    monkeypatch.setattr(forked, "PATIENCE", 1)
    with pytest.raises(NotApplicable, match="a copy of this process could not be asked"):
        in_a_copy(control, ask)


def test_where_there_is_no_fork_nothing_is_judged(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(NotApplicable, match="none can be made"):
        in_a_copy(nothing, nothing)


def test_the_process_is_as_it_was():
    x = torch.zeros(3)

    def ask(tell):
        tell("one")
        torch.set_default_dtype(torch.float64)
        x.fill_(1.0)

    in_a_copy(nothing, ask)
    assert torch.get_default_dtype() == torch.float32
    assert x.tolist() == [0.0, 0.0, 0.0]
