"""What is told: on the terminal, as JSON, as a page, as an exit code."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

import regard.cli.verify as cli
import subjects
from regard.verify import LAWS, Outcome, Report, check
from regard.verify.report.html import page
from regard_cli.app import run

FILE = Path(subjects.__file__)


@pytest.fixture(scope="module")
def broken():
    return check(subjects.Tutorial, {"polarity": "keep", "mask": "mask"}, quick=True)


def command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["regard", "verify", *map(str, arguments)])
    return run()


def test_json_and_back(broken):
    again = Report.from_json(broken.to_json())
    assert again == broken
    assert json.loads(broken.to_json())["exit_code"] == 1


def test_the_page_needs_nothing_else(broken):
    class Reader(HTMLParser):
        tags: list = []  # noqa: RUF012

        def handle_starttag(self, tag, attrs):
            self.tags.append((tag, dict(attrs)))

    html = page(broken)
    reader = Reader()
    reader.feed(html)
    assert not any({"src", "href"} & set(attrs) for _, attrs in reader.tags)
    assert "http" not in html.replace("https://img.shields.io", "")
    assert any(tag == "svg" for tag, _ in reader.tags)
    assert "the mask is read the wrong way round" in html
    assert "query 0, key 1: hidden" in html


def test_the_page_escapes_what_subjects_say():
    report = Report("<script>", notes=["<b>"], problem="<i>")
    assert not re.search("<script>|<b>|<i>", page(report))


def test_the_terminal_report_says_it_all(broken, capsys):
    cli.show(broken, Console(width=100, highlight=False))
    out = capsys.readouterr().out
    for said in ("true or 1", "mask_polarity", "broken", "expected", "Not applicable", "badge"):
        assert said in out
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
    told = json.loads(capsys.readouterr().out)
    assert [each["status"] for each in told["outcomes"]] == ["passed"]
    assert told["declared"]["causal"] is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give PATH.py:NAME"),
        (["x", "--like", "polarity"], "name=value"),
        (["x", "--like", "what=1"], "no convention is called 'what'"),
        (["x", "--only", "what"], "no law is called 'what'"),
    ],
)
def test_wrong_options_are_exit_code_2(arguments, said, monkeypatch, capsys):
    assert command(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert out == ""


def test_the_list(monkeypatch, capsys):
    assert command(monkeypatch, "--list") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in LAWS)


def test_badges():
    assert "brightgreen" in check(subjects.right, only=["convexity"]).badge()
    assert "red" in check(subjects.nothing).badge()
    assert "1 law kept, 0 broken" in check(subjects.right, only=["convexity"]).summary()


@pytest.mark.parametrize(
    ("advised", "said"),
    [(0, "2 laws kept, 0 broken, 0"), (1, ", 1 piece of advice,"), (2, ", 2 pieces of advice,")],
)
def test_numbers_agree_with_their_nouns(advised, said):
    statuses = ["passed"] * 2 + ["advice"] * advised
    report = Report("mine", outcomes=[Outcome("convexity", each, "", "", "") for each in statuses])
    assert said in report.summary()
