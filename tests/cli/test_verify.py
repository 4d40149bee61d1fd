"""regard verify: its report on the terminal, as JSON, as a page, and its exit codes."""

import json
from pathlib import Path

import pytest
from rich.console import Console

import regard.cli.verify as cli
import subjects
from regard.verify import LAWS, check
from regard_cli.app import run

FILE = Path(subjects.__file__)


@pytest.fixture(scope="module")
def broken():
    return check(subjects.Tutorial, {"polarity": "keep", "mask": "mask"}, quick=True)


def command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["regard", "verify", *map(str, arguments)])
    return run()


def test_the_report_on_the_terminal(broken, capsys):
    cli.show(broken, Console(width=100, highlight=False))
    out = capsys.readouterr().out
    for text in ("true or 1", "mask_polarity", "broken", "expected", "Not applicable", "badge"):
        assert text in out
    assert "■" in out


def test_the_command(monkeypatch, capsys, tmp_path):
    to = tmp_path / "report.html"
    code = command(monkeypatch, f"{FILE}:Tutorial", "--only", "scale_closed_form", "--html", to)
    out, err = capsys.readouterr()
    assert code == 1
    assert "root of the whole width" in out.replace("\n", " ")
    assert "Traceback" not in out + err
    assert to.read_text().startswith("<!doctype html>")


def test_json_alone_on_stdout(monkeypatch, capsys):
    where = f"{FILE}:right"
    assert (
        command(monkeypatch, where, "--only", "convexity", "--like", "causal=false", "--json") == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert [each["status"] for each in report["outcomes"]] == ["passed"]
    assert report["declared"]["causal"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give PATH.py:NAME"),
        (["x", "--like", "polarity"], "name=value"),
        (["x", "--like", "what=1"], "no convention is called 'what'"),
        (["x", "--only", "what"], "no law is called 'what'"),
    ],
)
def test_wrong_options_are_exit_code_2(arguments, message, monkeypatch, capsys):
    assert command(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


def test_the_list(monkeypatch, capsys):
    assert command(monkeypatch, "--list") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in LAWS)
