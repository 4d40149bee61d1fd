"""pytest --regard, its selection, accepted laws, and laws as parameters."""

import os
import re
from pathlib import Path

import pytest

import subjects
from interpreters import run_python
from regard_verify import LAWS, Counterexample, Outcome, Report
from regard_verify.plugin import JUDGED, Reports, laws

FILE = Path(subjects.__file__)
TUTORIAL = f"{FILE}:Tutorial"
PLUGINS = ("-p", "no:regard", "-p", "regard_verify.plugin", "-p", "no:cacheprovider")


def pytest_runs(folder, *arguments, plugins=("-p", "forking")):
    path = f"{FILE.parents[2] / 'src'}{os.pathsep}{FILE.parent}"
    variables = {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = ["-m", "pytest", *PLUGINS, *plugins, "-q", "-rA", "--color=no"]
    done = run_python(*command, *arguments, cwd=folder, **variables)
    return done.returncode, done.stdout + done.stderr


def counted(out):
    """The numbers of the last line: passed, failed, skipped and so on."""
    return {what: int(n) for n, what in re.findall(r"(\d+) (\w+)", out.strip().splitlines()[-1])}


def accepting(folder, *lines):
    text = "".join(f"\n    {line}" for line in lines)
    (folder / "pytest.ini").write_text(f"[pytest]\nregard_accepted ={text}\n")


def test_a_subject_on_the_command_line(tmp_path):
    """In a process of its own, as users have it."""
    code, out = pytest_runs(tmp_path, "--regard", TUTORIAL, "--regard-quick", plugins=())
    assert code == 1
    assert sum(counted(out.replace(" in ", "")).values()) >= len(LAWS) + 1
    assert f"FAILED {TUTORIAL}::scale_closed_form" in out
    assert "root of the whole width" in out
    assert "regard_verify" not in out.split("short test summary")[0]


def test_a_subject_that_cannot_be_understood_fails_once(tmp_path):
    code, out = pytest_runs(tmp_path, "--regard", f"{FILE}:nothing")
    assert code == 1
    assert "was not understood" in out
    assert counted(out)["failed"] == 1
    assert "passed" not in counted(out)


@pytest.mark.parametrize(
    ("arguments", "names", "deselected"),
    [
        (["-k", "convexity or judged"], ["convexity", JUDGED], len(LAWS) - 1),
        (["-m", "not regard"], [], len(LAWS) + 1),
        (["--deselect", f"{TUTORIAL}::convexity"], {*LAWS, JUDGED} - {"convexity"}, 1),
    ],
)
def test_pytest_selects_among_the_laws(arguments, names, deselected, tmp_path):
    _, out = pytest_runs(tmp_path, "--regard", TUTORIAL, "--collect-only", *arguments)
    shown = re.findall(rf"^{re.escape(TUTORIAL)}::(\w+)$", out, re.MULTILINE)
    assert sorted(shown) == sorted(names)
    assert counted(out).get("deselected", 0) == deselected


def test_a_law_can_be_named_with_its_subject(tmp_path):
    both = [f"{TUTORIAL}::convexity", f"{TUTORIAL}::cache_bytes"]
    code, out = pytest_runs(tmp_path, "--regard", both[0], "--regard", both[1])
    assert code == 0
    assert f"PASSED {both[0]}" in out
    assert counted(out).keys() >= {"passed", "skipped"}
    code, out = pytest_runs(tmp_path, "--regard", f"{TUTORIAL}::what")
    assert code == 4
    assert "no law is called 'what'" in out


@pytest.fixture
def asked(monkeypatch):
    """The laws that `check` was asked for, at each call."""
    calls = []

    def check(subject, like, *, only, quick):
        calls.append(only)
        names = list(LAWS) if only is None else only
        return Report("mine", outcomes=[Outcome(each, "passed", "", "") for each in names])

    monkeypatch.setattr("regard_verify.check", check)
    return calls


def test_only_the_selected_laws_are_checked_and_once(asked, tmp_path):
    once = ["--regard", "a", "--rootdir", str(tmp_path), "-c", os.devnull, *PLUGINS]
    assert pytest.main([*once, "-k", "convexity or cache_bytes", str(tmp_path)]) == 0
    assert pytest.main([*once, str(tmp_path)]) == 0
    assert asked == [["convexity", "cache_bytes"], None]


def test_with_other_tests_they_come_last(tmp_path):
    (tmp_path / "test_mine.py").write_text("def test_convexity():\n    pass\n")
    code, out = pytest_runs(tmp_path, "--regard", TUTORIAL, "-k", "convexity")
    assert code == 0
    assert re.findall(r"^PASSED .*::(\w+)$", out, re.MULTILINE) == ["test_convexity", "convexity"]


def test_accepted_laws_are_expected_to_fail(tmp_path):
    accepting(tmp_path, "scale_closed_form: by the width", "elsewhere.py:X convexity: no")
    wanted = ("--regard", TUTORIAL, "-k", "scale_closed_form or convexity")
    code, out = pytest_runs(tmp_path, *wanted)
    assert code == 0
    assert re.search(r"XFAIL .*::scale_closed_form - accepted: by the width", out)
    assert f"PASSED {TUTORIAL}::convexity" in out


def test_an_accepted_law_that_is_kept_fails(tmp_path):
    accepting(tmp_path, f"{TUTORIAL} convexity: weights above 1")
    code, out = pytest_runs(tmp_path, "--regard", TUTORIAL, "-k", "convexity")
    assert code == 1
    assert "convexity is kept now" in out
    assert "weights above 1" in out


@pytest.mark.parametrize(
    ("line", "message", "plugins"),
    [
        ("what: a reason", "regard_accepted: no law is called 'what'", []),
        ("what: a reason", "no law is called 'what'", ["-p", "xdist", "-n", "1"]),
        ("convexity", "a line is '[SUBJECT] LAW: REASON', got 'convexity'", []),
        ("a b convexity: two subjects", "a line is", []),
    ],
)
def test_a_wrong_list_of_accepted_laws_is_an_error(line, message, plugins, tmp_path):
    accepting(tmp_path, line)
    code, out = pytest_runs(tmp_path, "--regard", TUTORIAL, plugins=plugins)
    assert code == 4
    assert message in out


EXAMPLE = Counterexample("L=2", "[0]", "1", "2", "it is wrong")


def reports_of(*outcomes, accepted=None, **report):
    """Reports whose one report has these outcomes."""
    made = Reports("mine", accepted=accepted)
    made._report = Report("mine", outcomes=list(outcomes), **report)
    return made


def outcome(status, **more):
    return Outcome("convexity", status, "the law", "", **more)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (outcome("not applicable", reason="it has no mask"), "it has no mask"),
        (outcome("follows", because="oracle_forward"), "follows from oracle_forward"),
        (outcome("undecided", reason="30 s"), "not decided in time: 30 s"),
        (outcome("defect", reason="KeyError"), "an error of regard-verify itself.*KeyError"),
    ],
)
def test_what_is_no_cause_is_skipped(given, text):
    with pytest.raises(pytest.skip.Exception, match=text):
        reports_of(given).require("convexity")


def test_a_cause_fails_with_its_case_and_its_line():
    broken = outcome("failed", example=EXAMPLE, line="mine.py:3: x = y")
    with pytest.raises(
        pytest.fail.Exception, match=r"(?s)the law\nL=2 at .*is wrong\nline mine.py:3: x = y$"
    ):
        reports_of(broken).require("convexity")
    reports_of(outcome("advice", example=EXAMPLE)).require("convexity")


@pytest.mark.parametrize("status", ["failed", "follows", "advice"])
def test_every_deviation_can_be_accepted(status):
    made = reports_of(outcome(status, example=EXAMPLE), accepted={"convexity": "so it is"})
    with pytest.raises(pytest.xfail.Exception, match="accepted: so it is"):
        made.require("convexity")


@pytest.mark.parametrize("status", ["undecided", "defect", "not applicable"])
def test_what_was_not_decided_is_not_held_against_an_accepted_law(status):
    made = reports_of(outcome(status), accepted={"convexity": "so it is"})
    with pytest.raises(pytest.skip.Exception):
        made.require("convexity")


def test_a_partly_judged_subject_fails_one_test_unless_accepted():
    reports_of().require(JUDGED)
    partly = {"unjudged": "Declare heads: --like heads=4"}
    with pytest.raises(pytest.fail.Exception, match=r"(?s)--like heads=4.*regard_conventions"):
        reports_of(**partly).require(JUDGED)
    with pytest.raises(pytest.xfail.Exception):
        reports_of(**partly, accepted={JUDGED: "no heads"}).require(JUDGED)
    with pytest.raises(pytest.fail.Exception, match="judged is kept now"):
        reports_of(accepted={JUDGED: "no heads"}).require(JUDGED)


def test_laws_as_parameters(tmp_path):
    test = tmp_path / "test_mine.py"
    test.write_text(
        "import pytest\nfrom regard_verify.plugin import laws\n\n"
        f"@pytest.mark.parametrize('law', laws({f'{FILE}:right'!r}, quick=True))\n"
        "def test_attention(law):\n    law()\n"
    )
    code, out = pytest_runs(tmp_path, "-k", "oracle_forward or cache_bytes or convexity")
    assert code == 0
    assert "2 passed, 1 skipped" in out


def test_an_object_can_be_checked_too():
    accepted = {"oracle_forward": "by the width"}
    made = laws(subjects.Tutorial, quick=True, accepted=accepted)
    assert [each.id for each in made] == [*LAWS, JUDGED]
    named = {each.id: each.values[0] for each in made}
    named["convexity"]()
    with pytest.raises(pytest.fail.Exception, match="root of the whole width"):
        named["scale_closed_form"]()
    with pytest.raises(pytest.xfail.Exception):
        named["oracle_forward"]()
    with pytest.raises(pytest.skip.Exception):
        named["cache_bytes"]()
    with pytest.raises(ValueError, match="no law is called 'what'"):
        laws(subjects.Tutorial, accepted={"what": "nothing"})
