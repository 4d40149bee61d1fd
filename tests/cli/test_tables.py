"""Tables on terminals of any width: no word is broken, nothing is cut, remarks are sentences."""

import io
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import regard.cli.terminal as terminal
from invented import BENCH, COMPARISON, PRINTED, REFUSAL, ROWS, TUNING, WRITTEN
from regard.cli import bench, compare, generate, tune
from regard.cli.layout import tabulate

WIDTHS = (60, 80, 120)
UNWRAPPED = 2_000


def printed(show, width):
    """What is printed on a console of that width, as text."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(console)
    return console.file.getvalue()


def sentences(text):
    """The text with its lines joined."""
    return " ".join(text.split())


def words(text):
    """How often each word comes."""
    return Counter(text.split())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("verb", PRINTED)
def test_every_word_is_there_and_none_is_broken(verb, width):
    text = printed(PRINTED[verb], width)
    assert max(map(cell_len, text.splitlines())) <= width
    found, wanted = words(text), words(printed(PRINTED[verb], UNWRAPPED))
    assert not wanted - found
    assert set(found) == set(wanted)  # of several tables, each has the names of the rows


@pytest.mark.parametrize("width", WIDTHS)
def test_remarks_are_sentences_under_the_table(width):
    text = sentences(printed(PRINTED["compare"], width))
    table, _, under = text.partition("Not run")
    assert f"joint latent, 75 %; joint latent, 25 %: {REFUSAL}." in under
    assert "MQA, aligned: 1 key head cannot become fewer." in under
    assert REFUSAL.split()[0] not in table.split() and "MQA" not in table
    under = sentences(printed(PRINTED["bench --all"], width)).partition("Not measured")[2]
    assert "backend fused: fused needs numba." in under
    assert "backend eager, prefill, 512 tokens: eager is slow." in under


@pytest.mark.parametrize("width", WIDTHS)
def test_every_row_has_its_own_numbers(width):
    lines = printed(PRINTED["compare"], width).splitlines()
    for row in (row for row in ROWS if not row.remark):
        (at,) = [
            n for n, line in enumerate(lines) if f" {row.cache_bytes_per_token:,.0f} " in f"{line} "
        ]
        assert any(line.startswith(row.name[:18].rstrip()) for line in lines[at - 1 : at + 1])


def test_tables_name_the_backends_that_ran():
    text = sentences(printed(PRINTED["compare"], 80))
    assert "Prefill ran on sdpa." in text
    grouped = "(on grouped: GQA, int8 cache; DeepSeek's MLA, 50 %, int8 cache)"
    assert (
        f"Decoding ran on fused {grouped} (on blocked and sdpa: joint latent, full rank)." in text
    )
    text = sentences(printed(PRINTED["convert"], 80))
    assert "Before: transformers' own attention. After: prefill on sdpa, decoding on fused." in text
    assert "at 302/s on sdpa, decode 2 at 23.0/s on fused, cache" in str(WRITTEN[0])


@pytest.mark.parametrize("module", [compare, generate, tune])
def test_without_the_compiled_kernel_tables_say_so(module, monkeypatch):
    verb = module.__name__.rpartition(".")[2]
    monkeypatch.setattr(
        "regard.ops.explain.kernel_objection", lambda: "fused needs numba: install it"
    )
    assert "fused needs numba: install it" in sentences(printed(PRINTED[verb], 80))


def test_the_kernels_objection_is_the_backends_own(monkeypatch):
    from regard.ops.backends import fused
    from regard.ops.explain import kernel_objection

    assert kernel_objection() is None
    monkeypatch.setattr(fused, "is_installed", lambda: False)
    assert "numba" in kernel_objection()


def test_bench_reports_why_each_backend_was_not_measured():
    absent = bench._absent(BENCH)
    assert absent == {
        "backend fused": "fused needs numba",
        "backend eager, prefill, 512 tokens": "eager is slow",
    }


def test_rates_that_were_not_measured_are_named():
    text = sentences(printed(PRINTED["tune"], 80))
    under = text.partition("Not measured")[2]
    assert "fused, reading" in under and "fused, many rows" in under
    assert "float32 matrix products" not in under and TUNING.spread["products"] == 39.49


WORD = st.text(st.characters(categories=["Ll", "Nd"], max_codepoint=0x17F), min_size=1, max_size=12)
CELL = st.lists(WORD, max_size=6).map(" ".join)


@st.composite
def tables(draw):
    """Headings, rows whose first cells are all different, and a width that holds every word."""
    heads = draw(st.lists(CELL, min_size=2, max_size=7))
    numbers = [draw(st.booleans()) for _ in heads]
    count = draw(st.integers(1, 4))
    rows = [
        [f"row{at}", *("12" if number else draw(CELL) for number in numbers[1:])]
        for at in range(count)
    ]
    return heads, rows, draw(st.integers(20, 140))


@given(tables())
def test_any_table_keeps_its_words_whole(table):
    columns, rows, width = table
    text = printed(lambda console: tabulate(console, columns, rows), width)
    found = Counter(text.split())
    cells = Counter(word for row in rows for cell in row for word in cell.split())
    heads = Counter(word for head in columns for word in head.split())
    assert not cells - found
    assert set(found) <= set(cells) | set(heads)
    assert max(map(cell_len, text.splitlines()), default=0) <= width


@pytest.mark.parametrize(
    ("width", "tables"),
    [(13, ["name a b c"]), (12, ["name a b", "name c"]), (9, ["name a", "name b", "name c"])],
)
def test_columns_that_do_not_fit_are_in_a_table_below(width, tables):
    """A line for each row in each table; columns of 4, 1, 1 and 1 characters, 2 between them."""
    rows = [["row1", *"123"]]
    text = printed(lambda console: tabulate(console, ["name", *"abc"], rows), width)
    heads = [sentences(each).partition(" row1")[0] for each in text.split("\n\n")]
    assert heads == tables


def test_columns_wider_than_the_line_are_lines():
    text = printed(lambda console: tabulate(console, ["name", "b"], [["/a/longer/path", "1"]]), 9)
    assert [sentences(line) for line in text.splitlines()] == ["/a/longer/path", "b 1"]


def test_a_word_longer_than_the_line_stays_whole():
    path = "/a/very/long/path" * 9
    text = printed(lambda console: terminal.say(console, f"saved in {path}"), 60)
    assert path in text.split()
    rows = [[path, "1"], ["short", "2"]]
    columns = ["", "before"]
    assert path in printed(lambda console: tabulate(console, columns, rows), 60).split()


def test_a_first_cell_is_shown_once_for_rows_that_share_it():
    columns = ["what", "by"]
    rows = [["one shape", "a"], ["one shape", "b"], ["other", "c"]]
    for width in (60, 10):
        text = printed(lambda console, w=width: tabulate(console, columns, rows), width)
        assert sentences(text.replace("by", "").replace("what", "")) == "one shape a b other c"


def test_cells_are_not_markup_of_their_own_making():
    from dataclasses import replace

    report = replace(COMPARISON, rows=(*ROWS, replace(ROWS[1], name="GQA [bold] of mine")))
    assert "GQA [bold] of mine" in printed(lambda console: compare.show(report, console), 120)


def test_a_pipe_gets_a_width_of_its_own(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    assert terminal.stdout().width == 100
    assert terminal.stdout(piped=terminal.UNWRAPPED).width == terminal.UNWRAPPED
