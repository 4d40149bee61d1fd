"""The report: its verdict in words, as an exit code and as a badge, and its JSON."""

import json
from dataclasses import replace

import pytest

import subjects
from judged import JUDGED
from regard_verify import Outcome, Report, check


def outcomes(*statuses):
    """An outcome for each status; a law is named after its place, and follows from law1."""
    return [
        Outcome(f"law{at}", each, "", "", because="law1" if each == "follows" else "")
        for at, each in enumerate(statuses)
    ]


@pytest.fixture(scope="module")
def broken():
    return check(subjects.Tutorial, {"polarity": "keep", "mask": "mask"}, quick=True)


@pytest.mark.parametrize("report", ["broken", "invented"])
def test_json_and_back(report, broken):
    report = {"broken": broken, "invented": JUDGED}[report]
    again = Report.from_json(report.to_json())
    assert again == report
    written = json.loads(report.to_json())
    assert written["exit_code"] == report.exit_code == 1
    assert written["verdict"] == "broken"
    assert written["badge"] == report.badge()
    assert written["summary"] == report.summary()


VERDICTS = [  # outcomes, unjudged, problem; exit code, verdict, colour of the badge
    (["passed", "advice"], "", "", 0, "kept", "brightgreen"),
    (["passed", "failed"], "", "", 1, "broken", "red"),
    (["passed", "failed"], "the scale", "", 1, "broken", "red"),
    (["passed", "follows"], "", "", 1, "broken", "red"),
    ([], "", "no such file", 2, "not understood", "red"),
    (["passed"], "the scale", "", 3, "partly judged", "yellow"),
    (["not applicable"], "", "", 3, "partly judged", "yellow"),
    (["defect"], "", "", 3, "partly judged", "yellow"),
]


@pytest.mark.parametrize(("statuses", "unjudged", "problem", "code", "verdict", "colour"), VERDICTS)
def test_verdicts(statuses, unjudged, problem, code, verdict, colour):
    report = Report("mine", outcomes=outcomes(*statuses), unjudged=unjudged, problem=problem)
    assert (report.exit_code, report.verdict) == (code, verdict)
    assert bool(report) == (code == 0)
    assert f"-{colour})" in report.badge()


@pytest.mark.parametrize(
    ("statuses", "summary"),
    [
        (["passed"], "mine: right as far as it was judged. 1 of 1 law was asked, none is broken."),
        (
            ["passed", "failed", "not applicable"],
            "mine: broken, for 1 cause. 2 of 3 laws were asked, 1 is broken.",
        ),
        (
            ["passed", "failed", "follows", "failed"],
            "mine: broken, for 2 causes. 4 of 4 laws were asked, 3 are broken.",
        ),
    ],
)
def test_the_summary_says_how_much_was_judged(statuses, summary):
    assert Report("mine", outcomes=outcomes(*statuses)).summary() == summary


def test_the_summary_of_what_was_not_judged():
    report = Report("mine", outcomes=outcomes("passed", "failed"), unjudged="the scale")
    assert "broken, for 1 cause, and only partly judged." in report.summary()
    report.outcomes = outcomes("passed")
    assert "mine: partly judged. 1 of 1 law" in report.summary()


def test_a_time_out_changes_nothing_but_the_list_of_what_is_undecided():
    idle = Report("mine", outcomes=outcomes("passed", "passed", "not applicable"))
    busy = Report("mine", outcomes=outcomes("passed", "undecided", "not applicable"))
    assert busy.summary() == idle.summary()
    assert busy.badge() == idle.badge()
    assert busy.exit_code == idle.exit_code == 0


def test_laws_are_folded_under_the_cause_that_explains_them():
    statuses = ["failed", "follows", "follows", "follows", "failed"]
    because = ["", "law0", "law0", "law4", ""]
    report = Report(
        "mine",
        outcomes=[
            replace(each, because=why)
            for each, why in zip(outcomes(*statuses), because, strict=True)
        ],
    )
    assert report.following("law0") == ["law1", "law2"]
    assert report.following("law4") == ["law3"]
    assert [each.law for each in report.causes] == ["law0", "law4"]
    assert report.failed == [f"law{at}" for at in range(5)]


def test_reasons_are_shared():
    report = Report("mine", outcomes=outcomes("passed", "undecided", "undecided"))
    assert report.reasons("undecided") == {"": ["law1", "law2"]}


def test_badges_of_real_reports():
    assert "brightgreen" in check(subjects.right, quick=True).badge()
    assert "not_understood-red" in check(subjects.nothing).badge()


def test_a_printed_report_says_what_is_wrong_with_its_case_and_the_verdict_last(broken):
    shown = str(broken).splitlines()
    cause = broken.causes[0]
    assert shown[0] == f"broken {cause.law}"
    assert shown[1].strip() == cause.statement
    assert f"got {cause.example.got}" in str(broken)
    assert all(name in str(broken) for name in broken.failed)
    assert shown[-1] == broken.summary()
    assert repr(broken) == f"<{broken.summary()}>"


def test_a_printed_report_says_what_to_declare():
    shown = str(Report("mine", unjudged="Its heads were not found."))
    assert shown.splitlines()[:2] == ["Not judged", "  Its heads were not found."]
    assert "--like" in shown
