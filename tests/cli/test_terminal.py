"""On a terminal: text stays when the progress bar is erased, and the width is respected."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from rich.console import Console

import regard.hf
from regard.cli.terminal import print_lines, progress_bar, stdout
from tiny import VOCABULARY, tiny

COLUMNS = 80


def on_terminal(arguments, columns=COLUMNS):
    """All that a command writes to a terminal of so many columns, stdout and stderr."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    unset = ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["TERM"] = "xterm"
    command = subprocess.Popen(
        [sys.executable, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # so Linux says that the other side has closed
            piece = b""
        if not piece:
            break
        written += piece
    os.close(ours)
    assert command.wait() == 0, written
    return written.decode()


def screen(written, columns=COLUMNS):
    """The lines that stay on the terminal, after cursor movements and erasures."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[\??(\d*)([A-Za-z])|([^\x1b])", written):
        count, code, letter = token
        if code == "A":
            row = max(0, row - int(count or 1))
        elif code == "K":
            assert count in ("2", ""), "erases the line, or the rest of it"
            lines[row] = "" if count else lines[row][:column]
        elif letter == "\r":
            column = 0
        elif letter == "\n":
            row += 1
        elif letter:
            if column == columns:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row].ljust(column)[:column] + letter + lines[row][column + 1 :]
            column += 1
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]


def test_the_screen_erases_as_a_terminal_does():
    assert screen("abc\r\x1b[2Kx") == ["x"]
    assert screen("ab\r\ncd\r\x1b[1A\x1b[2Ke") == ["e", "cd"]
    assert screen("abcdef", columns=4) == ["abcd", "ef"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model as a folder, with a tokenizer whose words are letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    vocabulary = {chr(ord("@") + at): at for at in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="@"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    model = tiny("llama")
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return path


def test_generate_leaves_the_whole_text(folder):
    options = ["--prompt", "to be or not", "--max-new-tokens", "60", "--against", "transformers"]
    written = on_terminal(["-m", "regard", "generate", str(folder), *options])
    assert "generating again with transformers" in written  # and erased later
    text = regard.hf.write(*regard.hf.load(folder), "to be or not", max_new_tokens=60).text
    assert len(text.strip()) > COLUMNS
    lines = screen(written)
    assert text.strip() in "".join(line.ljust(COLUMNS) for line in lines)
    assert not any("generating again" in line for line in lines)
    assert any(line.startswith("transformers: prompt read on") for line in lines)
    assert any(line.startswith("The same text; ") for line in lines)


WIDE = "from regard.cli.terminal import stdout; print(stdout().width, flush=True)"


@pytest.mark.parametrize(("columns", "width"), [(60, 60), (80, 80), (120, 120), (250, 120)])
def test_tables_are_as_wide_as_the_terminal(columns, width, monkeypatch):
    import rich.console

    import regard.cli.terminal as terminal

    def made(**options):
        return rich.console.Console(force_terminal=True, width=columns, **options)

    monkeypatch.setattr(terminal, "Console", made)
    assert stdout().width == width


def test_a_dumb_terminal_has_its_width(monkeypatch):
    import rich.console

    import regard.cli.terminal as terminal

    for name, value in {"TERM": "dumb", "COLUMNS": "60"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LINES", raising=False)
    monkeypatch.setattr(
        terminal, "Console", lambda **options: rich.console.Console(force_terminal=True, **options)
    )
    assert stdout().width == 60


def test_an_error_ends_its_lines_between_words():
    sentence = "nothing is at /a/path/that/is/longer/than/the/line; give a folder with config.json"
    said = f"from regard.cli.app import _complain; _complain({sentence!r})"
    lines = screen(on_terminal(["-c", said], columns=30), columns=60)
    assert lines[:4] == [
        "nothing is at",
        "/a/path/that/is/longer/than/the/line;",
        "give a folder with config.json",
        "",
    ]


def test_the_width_is_the_terminals_own():
    assert "62" in on_terminal(["-c", WIDE], columns=62).split()


def test_lines_that_are_too_long_for_a_terminal_are_wrapped_between_words():
    said = "query 1 may not attend to key 2: Causal() hides keys after the query (2 > 1)"
    text = f"{said}\n  0 ■ ·"
    for on_terminal in (True, False):
        printed = io.StringIO()
        console = Console(width=40, force_terminal=on_terminal, file=printed, color_system=None)
        print_lines(console, text)
        lines = printed.getvalue().splitlines()
        assert lines[-1] == "  0 ■ ·"
        assert " ".join(lines[:-1]) == said
        assert (max(map(len, lines)) <= 40) == on_terminal


def test_a_pipe_gets_a_line_every_few_seconds(monkeypatch, capsys):
    """A bar is drawn on a terminal only: a long `compare` in a pipe would say nothing."""
    now = iter([0.0, 3.0, 10.0, 12.0, 25.5])
    monkeypatch.setattr("regard.cli.terminal.time.monotonic", lambda: next(now))
    with progress_bar() as progress:
        for done, what in enumerate(("proving", "converting", "reading\x1b[2J", "timing")):
            progress(what, done, 4 if done else 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "regard: 10 s, 1 of 4: converting",
        "regard: 26 s, 3 of 4: timing",
    ]


def test_a_pipe_gets_a_line_for_each_finished_row(capsys):
    with progress_bar() as progress:
        progress.finished("MQA: 3 bytes a token\x1b[2J", lambda console: console.print("a table"))
    out, err = capsys.readouterr()
    assert (out, err) == ("", "regard: 0 s: MQA: 3 bytes a token\\x1b[2J\n")


def test_finished_rows_stand_above_the_bar_and_are_printed_once_at_the_end(folder):
    options = ["--context", "40", "--attention", "int8", "--attention", "mha"]
    written = on_terminal(["-m", "regard", "compare", str(folder), *options])
    names = ("GQA, as shipped", "GQA, int8 cache", "MHA, spelled out")
    assert sorted(names, key=written.index) == list(names)
    assert written.count(f"{names[0]} (exact)") > 2  # the table grew above the bar
    lines = screen(written)
    assert [sum(line.startswith(name) for line in lines) for name in names] == [1, 1, 1]
    above = lines[: lines.index("")]  # the heading alone: nothing of the growing table is left
    assert above[0].startswith("model0: 2 layers of GQA") and len(above) <= 4
