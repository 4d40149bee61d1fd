"""Whose error it is: the line of the subject, or a defect of the suite."""

import re

import torch
from torch import nn

import subjects
from regard_verify.blame import files_of, line_about, line_of, own_error, said, shown
from regard_verify.oracle import pattern
from regard_verify.subject.conventions import Conventions
from regard_verify.subject.subject import Subject, SubjectError, called


def raised(target, *given):
    try:
        target(*given)
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def ends_in_an_own_error():
    Subject("", "function", Conventions()).run()  # it cannot be called


def divides(x):
    return x / torch.zeros(3, 7).view(2, 2)


def test_the_files_of_a_module_are_those_of_its_classes():
    inside = nn.Sequential(subjects.ThreeInputs(8, 2))
    assert files_of(subjects.ThreeInputs(8, 2)) == {subjects.__file__} <= files_of(inside)
    assert files_of(nn.Linear(2, 2)) == {nn.modules.linear.__file__}
    assert files_of(subjects.right, None) == {subjects.__file__}
    assert files_of(pattern) == files_of(max) == frozenset()


def test_an_error_in_the_subject_has_its_line():
    error = raised(divides, torch.ones(3))
    assert line_of(error) == line_of(error, {__file__})
    assert line_of(error).endswith("return x / torch.zeros(3, 7).view(2, 2)")
    assert "test_blame.py:" in line_of(error)
    assert own_error(error) == ""


def test_an_error_behind_a_call_is_that_of_the_subject():
    error = raised(called, divides, torch.ones(3))
    assert isinstance(error, SubjectError)
    assert line_of(error).endswith("view(2, 2)")
    assert own_error(error.__cause__) == ""
    missing = raised(called, subjects.right, 1)  # it is called with too few arguments
    assert own_error(missing.__cause__) == ""


def test_an_error_in_the_suite_is_a_defect_even_when_the_subject_called_it():
    error = raised(ends_in_an_own_error)
    assert re.fullmatch(r"TypeError.* \(subject/subject.py:\d+\)", own_error(error))
    inside = raised(called, ends_in_an_own_error)
    assert own_error(inside.__cause__) == own_error(error)


def test_an_assertion_without_a_text_is_printed_with_its_line():
    error = raised(called, subjects.refuses, 1)
    assert str(error).startswith("it raised AssertionError at ")
    assert str(error).endswith(": assert x is None")
    assert said(ValueError("three\n  lines")) == "ValueError: three lines"
    assert shown("/nowhere/mine.py", 3) == "mine.py:3"


def test_the_line_of_a_law_is_the_only_one_with_its_words():
    found = line_about("scale_closed_form", subjects.Tutorial(32, 4))
    assert "math.sqrt(self.d_model)" in found and "subjects.py:" in found
    assert "softmax" in line_about("convexity", subjects.Tutorial(32, 4))
    assert line_about("oracle_forward", subjects.Tutorial(32, 4)) == ""
    assert line_about("scale_closed_form", 7) == ""
