"""The report as JSON, in one line, and as a badge."""

import json

import pytest

import subjects
from regard.verify import Outcome, Report, check


@pytest.fixture(scope="module")
def broken():
    return check(subjects.Tutorial, {"polarity": "keep", "mask": "mask"}, quick=True)


def test_json_and_back(broken):
    again = Report.from_json(broken.to_json())
    assert again == broken
    assert json.loads(broken.to_json())["exit_code"] == 1


def test_badges():
    assert "brightgreen" in check(subjects.right, only=["convexity"]).badge()
    assert "red" in check(subjects.nothing).badge()
    assert "1 law kept, 0 broken" in check(subjects.right, only=["convexity"]).summary()


@pytest.mark.parametrize(
    ("advised", "text"),
    [(0, "2 laws kept, 0 broken, 0"), (1, ", 1 piece of advice,"), (2, ", 2 pieces of advice,")],
)
def test_numbers_agree_with_their_nouns(advised, text):
    statuses = ["passed"] * 2 + ["advice"] * advised
    report = Report("mine", outcomes=[Outcome("convexity", each, "", "", "") for each in statuses])
    assert text in report.summary()
