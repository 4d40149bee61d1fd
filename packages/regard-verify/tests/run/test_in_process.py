"""The outcome of a law: of errors it is told whose they are."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import subjects
from regard_verify import LAWS, check
from regard_verify.subject.conventions import Conventions
from regard_verify.subject.subject import Subject


@pytest.fixture
def broken_suite(monkeypatch):
    """oracle_forward has an error of its own."""

    def run(subject, trial):
        replace(subject, attend=None).run()

    monkeypatch.setitem(LAWS, "oracle_forward", replace(LAWS["oracle_forward"], run=run))


def test_an_error_of_the_suite_counts_nothing(broken_suite):
    report = check(subjects.right, only=["oracle_forward", "convexity"])
    (defect,) = report.having("defect")
    assert defect.law == "oracle_forward"
    assert re.fullmatch(r"TypeError.* \(subject/subject.py:\d+\)", defect.reason)
    assert report.failed == []
    assert defect.example is None


def test_an_error_of_the_suite_while_probing_is_told(monkeypatch):
    def fails(*given, **options):
        Subject("", "function", Conventions()).run()

    monkeypatch.setattr("regard_verify.subject.understand.probe_function", fails)
    report = check(subjects.right, only=["convexity"])
    assert "an error of regard" in report.problem
    assert re.search(r"TypeError.* \(subject/subject.py:", report.problem)


def crashes_on_long_ones(q, k, v):
    if q.shape[2] == 17:
        return q @ k
    return subjects.right(q, k, v)


def test_an_error_of_the_subject_comes_with_its_line():
    report = check(crashes_on_long_ones, only=["oracle_forward"])
    (found,) = report.having("failed")
    assert "RuntimeError" in found.example.cause
    assert found.line.endswith(": return q @ k")
    assert "test_in_process.py:" in found.line


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad @ torch.ones(3, 70)


def without_a_backward(q, k, v):
    return NoBackward.apply(subjects.right(q, k, v))


def test_an_error_in_the_backward_pass_is_the_subjects():
    report = check(without_a_backward, only=["oracle_gradient", "strides"])
    assert report.having("defect") == []
    assert set(report.failed) == {"oracle_gradient", "strides"}
    assert all("RuntimeError" in each.example.cause for each in report.causes)


class Layer(nn.Module):
    """A layer whose names say nothing about its heads."""

    def __init__(self, width=32, head_num=4):
        super().__init__()
        self.head_num = head_num
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        q, k, v = (
            y.unflatten(-1, (self.head_num, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        return self.out(subjects.right(q, k, v, mask).transpose(1, 2).flatten(2))


def test_no_law_ends_in_an_error_of_the_suite():
    report = check(Layer(), quick=True)
    assert report.having("defect") == []
