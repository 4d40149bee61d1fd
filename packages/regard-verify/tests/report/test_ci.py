"""SARIF, annotations and the badge; the action's steps and the hooks, as their files say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from judged import JUDGED
from regard_verify import Report, check
from regard_verify.command import verify
from regard_verify.report.ci import annotations, badge, definition, findings, sarif
from regard_verify.report.report import EXIT_CODES

PACKAGE = Path(__file__).parents[2]
ROOT = PACKAGE.parents[1]
MODULE = """
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).mT.movedim(-1, 1).mT for p in PARTS(self))
        out = (q @ k.mT / x.shape[-1] ** 0.5).softmax(-1) @ v
        return self.o(out.transpose(1, 2).flatten(2))


def PARTS(self):
    return self.q, self.k, self.v
""".replace(".mT.movedim(-1, 1).mT", ".transpose(1, 2)")


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A report on a file below the working directory, and its name."""
    folder, before = tmp_path_factory.mktemp("project"), Path.cwd()
    (folder / "my layers").mkdir()
    (folder / "my layers/one.py").write_text(MODULE)
    os.chdir(folder)
    try:
        yield check("my layers/one.py:Attention", only=["scale_closed_form", "oracle_forward"])
    finally:
        os.chdir(before)


def required(log):
    """What the schema of SARIF 2.1.0 requires of the members that are written here."""
    assert log["version"] == "2.1.0" and isinstance(log["runs"], list)
    for run in log["runs"]:
        driver = run["tool"]["driver"]
        assert driver["name"]
        assert all(rule["id"] and rule["shortDescription"]["text"] for rule in driver["rules"])
        assert len({rule["id"] for rule in driver["rules"]}) == len(driver["rules"])
        assert all(isinstance(each["executionSuccessful"], bool) for each in run["invocations"])
        for result in run["results"]:
            assert result["message"]["text"]
            assert result["level"] in ("none", "note", "warning", "error")
            assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
            for location in result["locations"]:
                place = location["physicalLocation"]
                assert re.fullmatch(r"[\w./%~-]+", place["artifactLocation"]["uri"])
                assert place["region"]["startLine"] >= 1
    return log


def test_sarif_names_the_line_of_the_subject(broken):
    (run,) = required(json.loads(sarif(broken)))["runs"]
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("scale_closed_form", "error")
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "my%20layers/one.py"}
    line = MODULE.splitlines()[place["region"]["startLine"] - 1]
    assert "q @ k.mT / x.shape[-1] ** 0.5" in line
    assert "root of the whole width" in result["message"]["text"]
    assert "also broken because of it: oracle_forward" in result["message"]["text"]


@pytest.mark.parametrize(
    "report",
    [
        JUDGED,
        Report("mine"),
        Report("a.py:A", problem="no\nsuch: file"),
        Report("é ü.py:A", unjudged="heads"),
    ],
    ids=["all statuses", "empty", "not understood", "partly judged"],
)
def test_any_report_is_sarif_and_one_annotation_a_finding(report):
    (run,) = required(json.loads(sarif(report)))["runs"]
    found = list(findings(report))
    assert len(run["results"]) == len(found) == len(list(annotations(report)))
    assert run["invocations"] == [{"executionSuccessful": not report.problem}]
    errors = [each for each in found if each.level == "error"]
    assert len(errors) == len(report.causes) + bool(report.problem)
    assert bool(report.unjudged) == any(each.level == "warning" for each in found)


def test_an_annotation_is_one_line_whatever_is_said(broken):
    (line,) = annotations(broken)
    assert re.match(r"::error file=my layers/one\.py,line=\d+,title=scale_closed_form::", line)
    (line,) = annotations(Report("a:b,c.py:A", problem="50 %\nof\r\n::error::it"))
    assert line.startswith("::error file=a%3Ab%2Cc.py,line=1,title=not_understood::")
    assert line.endswith("::50 %25%0Aof%0D%0A::error::it")


def test_a_subject_without_a_known_line_is_shown_where_it_is_defined(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODULE)
    line = MODULE.splitlines().index("class Attention(nn.Module):") + 1
    assert definition("mine.py:Attention") == ("mine.py", line)
    assert definition(f"{tmp_path}/mine.py:PARTS")[0] == "mine.py"
    assert definition("mine.py:Missing") == definition("mine.py") == ("mine.py", 1)
    assert definition("absent.py:A") == ("absent.py", 1)
    (tmp_path / "src/mine").mkdir(parents=True)
    (tmp_path / "src/mine/layers.py").write_text(MODULE)
    assert definition("mine.layers:Attention") == ("src/mine/layers.py", line)


@pytest.mark.parametrize("verdict", EXIT_CODES)
def test_the_badge_is_that_of_the_report(verdict):
    report = {
        "kept": Report("m", outcomes=[JUDGED.having("passed")[0]]),
        "broken": JUDGED,
        "not understood": Report("m", problem="none"),
        "partly judged": Report("m", outcomes=[JUDGED.having("passed")[0]], unjudged="heads"),
    }[verdict]
    shown = json.loads(badge(report))
    assert report.verdict == verdict
    assert shown.keys() == {"schemaVersion", "label", "message", "color"}
    assert shown["schemaVersion"] == 1
    assert report.badge().startswith(f"![{shown['label']}: {shown['message']}](")
    assert report.badge().endswith(f"-{shown['color']})")


def action():
    return pytest.importorskip("yaml").safe_load((PACKAGE / "action.yml").read_text())


def run_step(step, folder, monkeypatch, **inputs):
    """Run a step of the action as GitHub would; returns its process and the outputs it wrote."""
    given = {name: str(each.get("default", "")) for name, each in action()["inputs"].items()}
    given |= {name.replace("_", "-"): value for name, value in inputs.items()}
    names = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name, text in step["env"].items():
        names[name] = re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: given[found[1]], text)
    outputs = folder / "outputs"
    outputs.touch()
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, **names, "GITHUB_OUTPUT": str(outputs), "PYTHONPATH": paths}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done, outputs.read_text()


def test_the_step_of_the_action_checks_annotates_and_fails(tmp_path, monkeypatch):
    (tmp_path / "my layer.py").write_text(MODULE)
    step = next(each for each in action()["runs"]["steps"] if each.get("id") == "verify")
    options = "--only scale_closed_form\n--like heads=2\n--quick\n"
    done, outputs = run_step(
        step, tmp_path, monkeypatch, subject="my layer.py:Attention", options=options
    )
    assert (done.returncode, outputs) == (1, "exit-code=1\n"), done.stderr
    assert "\n::error file=my layer.py,line=13,title=scale_closed_form::" in done.stdout
    required(json.loads((tmp_path / "regard-verify.sarif").read_text()))
    assert json.loads((tmp_path / "regard-verify.json").read_text())["color"] == "red"


def test_inputs_of_the_action_are_data():
    """No input is pasted into a script, where it could be a command."""
    for step in action()["runs"]["steps"]:
        assert "${{" not in step["run"]
        assert all(re.fullmatch(r"\$\{\{ [\w.-]+ \}\}", each) for each in step["env"].values())


def test_the_options_of_the_action_are_those_of_the_command():
    text = (PACKAGE / "action.yml").read_text()
    names = verify.__annotations__
    for option in set(re.findall(r"(?<![\w-])--([a-z]+)", text)) - {"quiet", "disable"}:
        assert option in names, option


def test_the_hooks_are_for_pre_commit():
    hooks = pytest.importorskip("yaml").safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert [each["id"] for each in hooks] == ["regard-verify", "regard-verify-isolated"]
    for each in hooks:
        assert {"id", "name", "entry", "language"} <= each.keys()
        assert each["entry"] == "regard-verify" and not each["pass_filenames"]
    (package,) = hooks[1]["additional_dependencies"]
    assert (ROOT / package.partition("[")[0] / "pyproject.toml").exists()
