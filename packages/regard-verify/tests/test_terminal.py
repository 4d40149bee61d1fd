"""The command: its report on the terminal, as JSON, as a page, and its exit codes."""

import io
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

import regard_verify
import regard_verify.terminal as cli
import subjects
from judged import JUDGED
from regard_verify import LAWS, Counterexample, Outcome, Report, check
from regard_verify.command import run
from regard_verify.report.report import DECLARE
from regard_verify.run.separate_process import forked

FILE = Path(subjects.__file__)


@pytest.fixture(scope="module")
def broken():
    return check(subjects.Tutorial, {"polarity": "keep", "mask": "mask"}, quick=True)


def command(monkeypatch, *arguments):
    """The exit code; the subject runs in a fork, though the tests have several threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(cli, "of_command", forked)
    monkeypatch.setattr("sys.argv", ["regard-verify", *map(str, arguments)])
    return run()


def printed(report, width=100, **options):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    cli.show(report, console, **options)
    return console.file.getvalue()


def test_the_report_on_the_terminal(broken):
    out = printed(broken)
    for text in ("true or 1", "broken mask_polarity", "expected", "laws do not apply", "badge"):
        assert text in out
    assert "■" in out


def test_each_cause_comes_with_its_case_and_what_follows():
    first = JUDGED.causes[0]
    (follower,) = JUDGED.following(first.law)
    cause = printed(JUDGED).partition(f"broken {first.law}\n")[2].partition("\n\n")[0]
    for text in (
        first.statement,
        "B=1 H=4 L=4 S=4 at [0, 2, 1, 0]: expected 0.818, got nan",
        "a weight of 0 was multiplied by what is hidden",
        "line my_attention.py:35: scores = q @ k.mT",
        f"also broken because of it: {follower}",
        "■ ■       ■ ■",
    ):
        assert text in cause, text
    assert f"broken {follower}" not in printed(JUDGED)
    folded = printed(JUDGED, every_law=True).partition(f"broken {follower}\n")[2]
    assert f"follows from {first.law}" in folded.partition("\n\n")[0]


def test_what_is_right_is_counted_and_listed_with_all():
    kept, aside = (
        [each.law for each in JUDGED.having(status)] for status in ("passed", "not applicable")
    )
    short, long = printed(JUDGED), printed(JUDGED, every_law=True)
    assert f"{len(kept)} laws kept." in short
    assert f"{len(aside)} laws do not apply: it has no past that was found ({len(aside)})." in short
    assert not [law for law in [*kept, *aside] if "_" in law and re.search(rf"\b{law}\b", short)]
    assert all(law in long for law in [*kept, *aside])
    assert len(short.splitlines()) < len(long.splitlines())


def test_what_counts_nothing_has_headings_of_its_own():
    paragraphs = dict(each.partition("\n")[::2] for each in printed(JUDGED, 500).split("\n\n"))
    undecided = paragraphs["Not decided in time (changes no verdict)"]
    assert undecided.endswith(": it did not come back within 30 s.")
    assert all(each.law in undecided for each in JUDGED.having("undecided"))
    defects = paragraphs["An error of regard-verify itself: nothing is counted, please report it"]
    assert defects.endswith(": AttributeError: no such thing (laws/caches.py:12).")
    advice = paragraphs["Advice (changes no verdict; --all shows the cases)"]
    assert all(f"{each.law}: {each.statement}" in advice for each in JUDGED.having("advice"))
    assert "expected" not in advice
    assert "Declare heads: --like heads=4" in paragraphs["Not judged"]
    assert DECLARE in paragraphs["Not judged"]


@pytest.mark.parametrize(
    ("status", "unjudged", "colour"),
    [("passed", "", "32"), ("failed", "", "31"), ("passed", "the scale", "33")],
)
def test_the_verdict_has_its_colour(status, unjudged, colour):
    report = Report("mine", outcomes=[Outcome("convexity", status, "", "")], unjudged=unjudged)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
    cli.show(report, console)
    (line,) = [each for each in console.file.getvalue().splitlines() if "mine: " in each]
    assert line.startswith(f"\x1b[1;{colour}mmine: ")


def test_what_is_not_understood_is_said_with_what_was_found():
    out = printed(Report("mine", notes=["a remark"], problem="it has no name"))
    assert "a remark" in out
    assert "mine: not understood. it has no name" in out
    assert "kept" not in out


def test_the_command(monkeypatch, capsys, tmp_path):
    to = tmp_path / "report.html"
    code = command(monkeypatch, f"{FILE}:Tutorial", "--only", "scale_closed_form", "--html", to)
    out, err = capsys.readouterr()
    assert code == 1
    assert "root of the whole width" in out
    assert "Traceback" not in out + err
    assert "\x1b" not in out
    assert to.read_text().startswith("<!doctype html>")


def test_json_alone_on_stdout(monkeypatch, capsys):
    where = f"{FILE}:right"
    assert (
        command(monkeypatch, where, "--only", "convexity", "--like", "causal=false", "--json") == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert [each["status"] for each in report["outcomes"]] == ["passed"]
    assert report["declared"]["causal"] is False


def test_a_pipe_gets_each_paragraph_as_one_line(monkeypatch, capsys):
    assert (
        command(monkeypatch, f"{FILE}:right", "--only", "cache_bytes", "--only", "convexity") != 1
    )
    out = capsys.readouterr().out
    assert "convexity" not in out
    assert "1 law kept." in out.splitlines()
    assert any(line.startswith("![attention: ") for line in out.splitlines())
    assert command(monkeypatch, "--list") == 0
    listed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    for each in LAWS.values():
        assert any(line.startswith(each.name) and line.endswith(each.statement) for line in listed)


def test_a_partly_judged_subject_is_exit_code_3(monkeypatch, capsys):
    report = Report("x", outcomes=[Outcome("a", "passed", "", "")], unjudged="Declare heads.")
    monkeypatch.setattr(cli, "judge", lambda *given: report)
    assert command(monkeypatch, "x") == 3
    assert "Declare heads." in capsys.readouterr().out


def test_a_subject_that_is_not_there_is_exit_code_2(monkeypatch, capsys):
    assert command(monkeypatch, f"{FILE}:missing") == 2
    assert "not understood" in capsys.readouterr().out


def test_arguments_are_declared_as_json(monkeypatch, capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from subjects import *\n"
        "class Mine(Tutorial):\n"
        "    def __init__(self, breadth, parts):\n"
        "        super().__init__(breadth, parts)\n"
    )
    given = [f"{file}:Mine", "--only", "scale_closed_form", "--json"]
    assert command(monkeypatch, *given) == 2
    assert "breadth" in json.loads(capsys.readouterr().out)["problem"]
    arguments = 'arguments={"breadth": 24, "parts": 3}'
    assert command(monkeypatch, *given, "--like", arguments) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["inferred"]["built with"] == "breadth=24, parts=3"


def test_the_help_names_the_exit_codes(monkeypatch, capsys):
    assert command(monkeypatch, "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    for code, verdict in enumerate(("no law is broken", "one is", "understood", "be judged")):
        assert re.search(rf"\b{code} if [^0-9]*{verdict}", out), code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give PATH.py:NAME"),
        (["x", "--like", "arguments={dim: 32}"], "arguments is not JSON"),
        (["x", "--like", "polarity"], "name=value"),
        (["x", "--like", "what=1"], "no convention is called 'what'"),
        (["x", "--only", "what"], "no law is called 'what'"),
        (["x", "--like", "scale=abc"], "scale is a number above 0; got 'abc'"),
        (["x", "--like", "scale=NaN"], "scale is a number above 0; got nan"),
        (["x", "--like", "heads=0"], "heads is a whole number above 0; got 0"),
        (["x", "--seed", str(2**64)], "a seed is a number of 64 bits"),
        (["x", "--memory", "inf"], "limit and memory are numbers below a billion"),
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
    assert command(monkeypatch, "--list", "--json") == 0
    laws = json.loads(capsys.readouterr().out)
    assert [law["name"] for law in laws] == list(LAWS)
    assert laws[0]["statement"] == LAWS[laws[0]["name"]].statement


def test_the_version(monkeypatch, capsys):
    assert command(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"regard-verify {regard_verify.__version__}\n"


def start(code, *arguments):
    return subprocess.run(
        [sys.executable, *code, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["--nonsense"]])
def test_options_are_parsed_without_torch(arguments):
    report = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))\n"
    code = f"{report}from regard_verify.start import main\nsys.exit(main())"
    done = start(["-c", code], *arguments)
    assert done.returncode == (0 if arguments in (["--help"], ["--version"]) else 2)
    assert done.stdout.endswith("False\n") and "Traceback" not in done.stderr


def test_the_package_is_the_command_too():
    assert start(["-m", "regard_verify"], "--version").stdout.startswith("regard-verify ")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems start a new Python")
def test_the_command_imports_torch_once(tmp_path):
    """The subject runs in a fork of the command, which has imported typer."""
    (tmp_path / "mine.py").write_text("import sys\nraise OSError(f'{\"typer\" in sys.modules}')")
    done = start(["-m", "regard_verify"], f"{tmp_path}/mine.py:x")
    assert "OSError: True" in done.stdout, done.stderr


def test_without_typer_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None\nimport runpy\n"
    done = start(["-c", f"{code}runpy.run_module('regard_verify', run_name='__main__')"])
    assert done.returncode == 2
    assert done.stderr == (
        "the regard-verify command needs typer: python -m pip install 'regard-verify[cli]'\n"
    )


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("every_law", [False, True])
def test_no_word_is_broken_on_any_terminal(width, every_law):
    def words(text):
        kept = [line for line in text.splitlines() if not line.startswith("![")]
        return Counter(" ".join(kept).split())

    text = printed(JUDGED, width, every_law=every_law)
    assert max(map(len, text.splitlines())) <= width
    assert words(text) == words(printed(JUDGED, 2_000, every_law=every_law))


def test_progress_is_a_line_in_a_pipe_from_time_to_time(monkeypatch, capsys):
    now = iter([0.0, 1.0, 12.0, 13.0])
    monkeypatch.setattr(cli.time, "monotonic", lambda: next(now))
    step = cli.progress()
    for at, law in enumerate(("one", "two", "three")):
        step(law, at, 3)
    assert capsys.readouterr().err == "regard-verify: 12 s, 1 of 3: two\n"


def test_a_page_that_cannot_be_written_is_refused_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli, "judge", lambda *given: pytest.fail("judged"))
    assert command(monkeypatch, "x", "--html", tmp_path) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"regard-verify: {tmp_path} cannot be written: it is a folder; give a")


def test_the_page_shows_what_the_terminal_shows_with_all():
    class Text(HTMLParser):
        shown = ""

        def handle_data(self, data):
            self.shown += data

    reader = Text()
    reader.feed(cli.page(JUDGED))
    assert printed(JUDGED, 100_000, every_law=True) in reader.shown


TEXT = "<u>'\"&\udcff"  # no tag of the page, what ends an attribute, a stray byte of a file's name


def test_the_page_loads_nothing_and_escapes_every_text(broken):
    html = cli.page(broken)
    assert not re.search("<script|src=|href=| on\\w+=", html)
    assert set(re.findall(r"https?://[\w.]+", html)) == {"https://img.shields.io"}  # of the badge
    example = Counterexample(TEXT, TEXT, TEXT, TEXT, TEXT, [[True]], [[False]])
    every = [
        Outcome(TEXT + each, each, TEXT, TEXT, TEXT, example, 0.0, f"{TEXT}failed", TEXT)
        for each in cli.WORDS
    ]
    report = Report(TEXT, TEXT, {TEXT: TEXT}, {TEXT: TEXT}, [TEXT], every, unjudged=TEXT)
    for made in (report, replace(report, problem=TEXT)):
        html = cli.page(made)
        assert "<u>" not in html
        assert html.count("&lt;u&gt;&#x27;&quot;&amp;\\udcff") > 4
        assert html.encode()


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_opens_in_a_browser_and_fits_a_phone(open_page, dark):
    opened = open_page(cli.page(JUDGED), width=400, dark=dark)
    assert JUDGED.summary() in opened.page.locator("pre").text_content()
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 400
