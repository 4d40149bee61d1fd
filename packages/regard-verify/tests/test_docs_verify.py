"""The pages on verify: snippets and commands run, and numbers and reports are those of the code."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

import verify_page
from covering import few
from interpreters import run_python
from mutants import callers, defects, functions, layers, things
from pages import ROOT, Block, blocks, read, snippets
from regard_verify import LAWS, Conventions, check
from regard_verify.command import run
from regard_verify.report.report import COLOURS, EXIT_CODES, Status
from regard_verify.run.separate_process import forked
from strangers.faults import FAULTS

PAGE, DETAILS = read(verify_page.PAGE), read(verify_page.DETAILS)
PAGES = PAGE + DETAILS
ELSEWHERE = (verify_page.PAGE, verify_page.TRANSLATED, verify_page.DETAILS)
MUTANTS = [*functions.MUTANTS, *layers.MUTANTS, *things.MUTANTS, *callers.MUTANTS, *defects.MUTANTS]
MATRIX = read("docs/verify-matrix.md")
OWN = ("benchmarks/strangers.py", "tests/mutants/seeds.py")  # programs that the pages name
SNIPPETS = [pair for pair in snippets() if pair[0].page in ELSEWHERE]
SHELL = [each.code for page in ELSEWHERE for each in blocks(page, "sh")]
COMMANDS = {line for code in SHELL for line in code.splitlines()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files of the pages, where commands run; subjects are judged in forks."""
    monkeypatch.setattr("regard_verify.terminal.of_command", forked)
    monkeypatch.setattr(sys.modules["regard_verify.run.check"], "new_python", forked)
    for page in (verify_page.PAGE, verify_page.DETAILS):
        for each in blocks(page, "python"):
            if each.title.endswith('.py"'):
                name = each.title.removeprefix('title="').removesuffix('"')
                (tmp_path / name).write_text(each.code)
    assert {path.name for path in tmp_path.iterdir()} == {"my_attention.py", "my_alibi.py"}
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pytest_runs(folder, *arguments):
    paths = (ROOT / "packages/regard-verify/src", Path(verify_page.__file__).parent)
    variables = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    variables |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugins = ["-p", "regard_verify.plugin", "-p", "forking", "-p", "no:cacheprovider"]
    plugins.append("--color=no")
    done = run_python("-m", "pytest", *plugins, *arguments, cwd=folder, **variables)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("snippet", "shown"),
    SNIPPETS,
    ids=lambda each: f"{each.page}:{each.line}" if isinstance(each, Block) else "-",
)
def test_every_snippet_runs_and_prints_what_is_shown(snippet, shown, folder, capsys):
    exec(compile("\n" * snippet.line + snippet.code, snippet.page, "exec"), {})
    if shown is not None:
        assert capsys.readouterr().out.rstrip() == shown.code.rstrip()


def test_both_languages_show_the_same_reports():
    english, chinese = (blocks(page, "text") for page in (verify_page.PAGE, verify_page.TRANSLATED))
    assert [each.code for each in english] == [each.code for each in chinese]


def test_every_library_has_its_snippet():
    section = DETAILS.split("## Kernels and caches of other libraries")[1].split("\n## ")[0]
    parts = section.split("\n### ")[1:]
    assert [part.count("assert not report.failed") for part in parts] == [1, 1, 1]


def test_the_report_is_what_the_command_prints():
    shown, printed = verify_page.shown(), verify_page.printed()
    assert verify_page.without_figures(shown) == verify_page.without_figures(printed), (
        "python packages/regard-verify/tests/support/verify_page.py prints it anew"
    )
    assert max(map(len, shown.splitlines())) <= verify_page.WIDTH
    assert "broken scale_closed_form" in shown


def test_without_its_fault_the_file_is_right():
    right = verify_page.example().replace("x.shape[-1] ** 0.5", "q.shape[-1] ** 0.5")
    assert right != verify_page.example()
    defined = {}
    exec(right, defined)
    assert check(defined["MultiHeadAttention"], quick=True).verdict == "kept"


@pytest.mark.parametrize(
    "line", few(sorted(each for each in COMMANDS if each.startswith("regard")), 9)
)
def test_every_command_is_understood(line, folder, monkeypatch, capsys):
    """Its options and declarations are; what they declare may not fit the file."""
    arguments = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {line.removeprefix('regard verify ')}"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    verb = ["regard-verify", *arguments, "--only", "convexity", "--json"]
    monkeypatch.setattr("sys.argv", verb)
    monkeypatch.setattr("regard_verify.terminal.PAUSE", math.inf)  # no lines of progress
    run()
    out, err = capsys.readouterr()
    assert err.strip() == ""
    report = json.loads(out)
    absent = (":Attention", "path/to/model")  # not in the file; not on this machine
    assert bool(report["problem"]) == any(each in line for each in absent)


def test_a_reference_judges_what_was_not_judged(folder):
    partly = check("my_alibi.py:alibi", quick=True)
    assert partly.failed == []
    assert partly.verdict == "partly judged"
    assert "positions change its scores" in partly.unjudged
    judged = check("my_alibi.py:alibi", {"reference": "plain"}, quick=True)
    assert "reference_parity" in {each.law for each in judged.having("passed")}
    assert judged.verdict == "kept"


def test_pytest_on_the_command_line(folder):
    whole, one = sorted(each for each in COMMANDS if each.startswith("pytest"))
    code, out = pytest_runs(folder, *whole.split()[1:], "--regard-quick", "-q")
    assert code == 1
    assert "my_attention.py:MultiHeadAttention::scale_closed_form" in out
    code, out = pytest_runs(folder, *one.split()[1:], "--regard-quick", "-q")
    assert code == 1
    assert "1 failed" in out


def test_the_accepted_laws_of_the_page(folder):
    ((*_, settings),) = blocks(verify_page.DETAILS, "toml")
    (folder / "pyproject.toml").write_text(settings)
    code, out = pytest_runs(folder, "--regard-quick", "-rx")
    assert code == 0, out
    for law in ("fully_masked_forward", "fully_masked_backward", "mask_and_causal"):
        assert re.search(rf"^XFAIL .*::{law} - accepted: ", out, re.MULTILINE)
    (folder / "pyproject.toml").write_text(re.sub('    ".*\n', "", settings))
    assert pytest_runs(folder, "--regard-quick")[0] == 1


def test_every_verdict_and_status_is_explained():
    rows = {
        "kept": "right as far as it was judged", **{name: name for name in list(EXIT_CODES)[1:]}
    }  # fmt: skip
    for verdict, said in rows.items():
        colour = COLOURS[verdict].removeprefix("bright")
        assert f"| {said} | {EXIT_CODES[verdict]} | {colour} |" in PAGE
    for status in get_args(Status):
        assert f"\n| `{status}` |" in DETAILS


def test_every_convention_is_named():
    table = DETAILS.split("## Conventions")[1].split("## Accepted laws")[0]
    assert {each.name for each in fields(Conventions)} <= set(re.findall(r"`(\w+)`", table))


def test_every_option_is_one_of_the_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["regard-verify", "--help"])
    run()
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    table = set(re.findall(r"^\| `(--[\w-]+)", DETAILS, re.MULTILINE))
    assert table == known - {"--help"}
    known |= {"--regard", "--collect-only", "--deselect", "--dist", "--regard-quick"}  # of pytest
    for program in (f"packages/regard-verify/{each}" for each in OWN):
        known |= set(re.findall(r"--[\w-]+", (ROOT / program).read_text()))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", PAGES)) <= known


def test_the_numbers_are_those_of_the_code():
    assert f"checks {len(LAWS)} laws" in PAGE
    assert f"{len(LAWS)} 条定律" in read(verify_page.TRANSLATED)
    assert f"{len(MUTANTS)} faults that were made on purpose" in PAGE
    assert f"{len(MUTANTS)} 个" in read(verify_page.TRANSLATED)
    assert f"{len(MUTANTS)} broken attentions" in DETAILS
    assert f"one of {len(FAULTS)} single faults" in DETAILS.replace("\n", " ")
    assert f"{len(MUTANTS)} of them are found" in MATRIX.replace("\n", " ")
    rows = [line.split(" | ")[0].removeprefix("| ") for line in MATRIX.splitlines()]
    assert {mutant.name for mutant in MUTANTS} <= set(rows)
    assert set(LAWS) <= set(rows)


def test_every_mutant_is_found_by_the_law_that_names_its_cause():
    table = MATRIX.split("## How many")[0]
    for mutant in MUTANTS:
        line = next(row for row in table.splitlines() if row.startswith(f"| {mutant.name} |"))
        assert "**" in line
