"""regard show mask: in the terminal, in files, as JSON, and what it refuses."""

import json
import shlex
import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest

from pages import shown_commands
from regard import Causal, SlidingWindow, Span
from regard.cli import terminal
from regard.cli.app import run
from regard.see import mask_picture

WINDOW = "Causal() & SlidingWindow(4)"


def show(monkeypatch, capsys, *arguments):
    """The exit code, stdout and stderr."""
    monkeypatch.setattr("sys.argv", ["regard", "show", "mask", *map(str, arguments)])
    code = run()
    return code, *capsys.readouterr()


def test_a_mask_is_drawn(monkeypatch, capsys):
    drawing = (Causal() & SlidingWindow(4)).draw(8) + "\n"
    assert show(monkeypatch, capsys, WINDOW) == (0, drawing, "")


def test_the_slots_are_chosen(monkeypatch, capsys):
    given = ("--queries", 2, "--keys", 4, "--q-start", 90, "--kv-start", 88)
    _, out, _ = show(monkeypatch, capsys, WINDOW, *given)
    assert out == (Causal() & SlidingWindow(4)).draw(Span(90, 92, 88, 92)) + "\n"


@pytest.mark.parametrize("columns", [40, 80, 132])
def test_a_large_mask_fits(columns, monkeypatch, capsys):
    usual = terminal.stdout
    monkeypatch.setattr("regard.cli.show_mask.stdout", lambda piped: usual(columns))
    code, out, _ = show(monkeypatch, capsys, "Causal() & SlidingWindow(300)", "--queries", 4000)
    assert code == 0
    assert len(out.splitlines()) < 40
    assert max(map(len, out.splitlines())) <= max(columns, 76)  # the line that says the scale
    assert max(map(len, out.splitlines()[3:])) <= columns


def test_one_batch_row_and_one_head(monkeypatch, capsys):
    padding = "Padding([[1, 1], [0, 1]])"
    _, out, _ = show(monkeypatch, capsys, padding, "--batch-row", 1)
    assert out.splitlines()[-1] == "1 · ■"
    heads = "Dense([[[[1, 1]], [[0, 1]]]])"
    _, out, _ = show(monkeypatch, capsys, heads, "--head", 1)
    assert out.splitlines()[-1] == "0 · ■"
    for given, why in (
        (
            (padding, "--batch-row", 2),
            "--batch-row counts from 0, got 2: the mask's data have 2 rows",
        ),
        (("Causal()", "--head", 9), "--head counts from 0, got 9: the mask's data have 1 head"),
        ((heads, "--head", 2), "--head counts from 0, got 2: the mask's data have 2 heads"),
    ):
        code, out, err = show(monkeypatch, capsys, *given)
        assert (code, out, err) == (2, "", f"regard: {why}\n")


def test_the_sentence_of_a_cell(monkeypatch, capsys):
    _, out, _ = show(monkeypatch, capsys, WINDOW, "--cell", "7, 2")
    assert out == (Causal() & SlidingWindow(4)).explain(0, 0, 7, 2) + "\n"


@pytest.mark.parametrize("cell", ["7", "7,2,1", "a,b", "-1,2", "7.5,1", "", "٣,1", "9" * 40 + ",1"])
def test_other_cells_are_refused(cell, monkeypatch, capsys):
    code, out, err = show(monkeypatch, capsys, WINDOW, "--cell", cell)
    assert (code, out) == (2, "")
    assert err.startswith("regard: --cell takes")


def test_json_lists_the_visible_keys(monkeypatch, capsys):
    given = ("--json", "--queries", 2, "--q-start", 3, "--keys", 6, "--kv-start", 1)
    _, out, err = show(monkeypatch, capsys, "Causal() & SlidingWindow(3)", *given, "--cell", "3,1")
    assert err == ""
    assert json.loads(out) == {
        "mask": "Causal() & SlidingWindow(size=3)",
        "q_start": 3,
        "q_stop": 5,
        "kv_start": 1,
        "kv_stop": 7,
        "batch_row": 0,
        "head": 0,
        "rows": [{"query": 3, "keys": [1, 2, 3]}, {"query": 4, "keys": [2, 3, 4]}],
        "cell": "query 3 may attend to key 1: every rule allows it",
    }


def test_json_of_a_huge_mask_is_refused(monkeypatch, capsys):
    code, out, err = show(monkeypatch, capsys, "Causal()", "--queries", 2000, "--json")
    assert (code, out) == (2, "")
    assert "at most 1,048,576 cells, got 2,000 queries x 2,000 keys" in err


def test_pictures_are_written(tmp_path, monkeypatch, capsys):
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    code, out, _ = show(monkeypatch, capsys, WINDOW, "--svg", svg, "--png", png)
    assert (code, out) == (0, f"Saved in {svg}.\nSaved in {png}.\n")
    assert ElementTree.fromstring(svg.read_text()).get("aria-label") == repr(
        Causal() & SlidingWindow(4)
    )
    assert png.read_bytes() == mask_picture.png(Causal() & SlidingWindow(4))


def test_a_page_is_written_by_its_module(tmp_path, monkeypatch, capsys):
    pages, given = ModuleType("regard.see.pages"), []
    pages.mask_cells = ModuleType("regard.see.pages.mask_cells")
    pages.mask_cells.write = lambda *args, **place: given.append((*args, place))
    monkeypatch.setitem(sys.modules, "regard.see.pages", pages)
    html = tmp_path / "a.html"
    assert show(monkeypatch, capsys, WINDOW, "--html", html)[:2] == (0, f"Saved in {html}.\n")
    assert given == [
        (Causal() & SlidingWindow(4), Span(0, 8, 0, 8), html, {"b": 0, "h": 0}),
    ]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("Causl()",), "'Causl' is no rule"),
        (("Where(lambda b, h, q, k: True)",), "is not run from a text"),
        (("x" * 10**5 + "x",), "at most 100,000 characters"),
        (("Causal()", "--queries", "100000"), "at most 268,435,456 cells"),
        (("Causal()", "--queries", str(10**12)), "at most 268,435,456 cells"),
        (("Causal()", "--keys", str(10**12)), "at most 268,435,456 cells"),
        (("Causal()", "--queries", "2", "--kv-start", "9"), "keys end before they start"),
        (("Causal()", "--svg", "/nowhere/a.svg"), "No such file or directory"),
        (("Padding([[1], [0]]) & Padding([[1], [0], [1]])",), "different sizes, batch=[2, 3]"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(given, reason, monkeypatch, capsys):
    code, out, err = show(monkeypatch, capsys, *given)
    assert (code, out) == (2, "")
    assert err.startswith("regard: ")
    assert reason in err
    assert "Traceback" not in err


@pytest.mark.parametrize("page", ["docs/guides/masks.md", "docs/zh/guides/masks.md"])
def test_the_guide_shows_what_is_printed(page, monkeypatch, capsys):
    shown = shown_commands(page, "show mask")
    assert len(shown) >= 3
    for command, prints in shown:
        _, out, err = show(monkeypatch, capsys, *shlex.split(command)[2:])
        assert out + err == prints.code


@pytest.mark.parametrize("option", ["--queries", "--keys", "--q-start", "--kv-start"])
def test_sizes_that_are_mistakes_are_refused(option, monkeypatch, capsys):
    for size, reason in (
        (10**30, "is above 1,000,000,000,000"),
        (-1, "Invalid value"),
        ("x", "Invalid value"),
    ):
        code, out, err = show(monkeypatch, capsys, "Causal()", option, size)
        assert (code, out) == (2, "")
        assert option in err
        assert reason in err
