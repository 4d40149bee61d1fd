"""Every Python snippet of every page runs alone, and prints what the page says it prints."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pages import (
    FILE,
    PRINTS,
    ROOT,
    Block,
    blocks,
    pages,
    programs,
    read,
    snippets,
    without_figures,
)
from session import LONG

SNIPPETS = snippets()
TRANSLATED = [page for page in pages() if page.startswith("docs/zh/")]
IN_CHINESE = (*TRANSLATED, "README.zh-CN.md")  # a long run executes their snippets, too
# Pages whose snippets need files beside them: tests of packages/regard-verify run these.
ELSEWHERE = ("docs/guides/verify.md", "docs/zh/guides/verify.md", "docs/verify-details.md")


@pytest.mark.parametrize(
    ("snippet", "shown"),
    [
        pair
        for pair in SNIPPETS
        if pair[0].page not in ELSEWHERE and (LONG or pair[0].page not in IN_CHINESE)
    ],
    ids=lambda each: f"{each.page}:{each.line}" if isinstance(each, Block) else "-",
)
@pytest.mark.usefixtures("unchecked")  # users have no such checks: they get our own errors
def test_a_snippet_runs_and_prints_what_is_shown(snippet, shown, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    # as many lines as stand before it, so that an error names the line of the page
    code = "\n" * snippet.line + snippet.code
    exec(compile(code, snippet.page, "exec"), {"__name__": "__main__"})
    if shown is None:
        return
    printed = capsys.readouterr().out
    if shown.title == PRINTS:
        assert printed.rstrip() == shown.code.rstrip()
    else:
        assert without_figures(printed) == without_figures(shown.code)


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "command", "shown"),
    [each for each in programs() if each[0].page not in TRANSLATED],  # of the same code
    ids=lambda each: f"{each.page}:{each.line}",
)
def test_a_program_of_several_ranks_prints_what_is_shown(file, command, shown, tmp_path):
    """A block with a file's name as its title is run by the command that follows it."""
    (tmp_path / FILE.fullmatch(file.title)[1]).write_text(file.code, encoding="utf-8")
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"PATH": search, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        shlex.split(command.code), cwd=tmp_path, env=os.environ | settings, timeout=120,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.rstrip() == shown.code.rstrip()


def code_of(page: str) -> list[str]:
    """The code of a page without its comments, which are translated."""
    return [
        re.sub(r"[ \t]*#.*", "", each.code) for each in blocks(page, "python", "sh", "bash", "toml")
    ]


def outputs_of(page: str) -> list[str | None]:
    """The output that stands below each snippet."""
    return [shown and shown.code for snippet, shown in SNIPPETS if snippet.page == page]


@pytest.mark.parametrize("page", IN_CHINESE)
def test_both_languages_show_the_same_code_and_outputs(page):
    english = page.replace("docs/zh/", "docs/").replace(".zh-CN", "")
    assert code_of(page) == code_of(english)
    assert outputs_of(page) == outputs_of(english)


@pytest.mark.parametrize("page", TRANSLATED)
def test_both_languages_have_the_same_sections_and_pictures(page):
    english = page.replace("docs/zh/", "docs/")
    levels = [
        re.findall(r"^(#+) ", re.sub(r"```.*?```", "", read(each), flags=re.DOTALL), re.MULTILINE)
        for each in (page, english)
    ]
    assert levels[0] == levels[1]
    pictures = [re.findall(r"pictures/[\w.-]+", read(each)) for each in (page, english)]
    assert pictures[0] == pictures[1]


def test_every_guide_is_in_both_languages():
    guides = [page for page in pages() if page.startswith("docs/guides/")]
    assert [f"docs/zh/{page.removeprefix('docs/')}" for page in guides] == [
        page for page in TRANSLATED if "/guides/" in page
    ]
