"""The pages on verify: their snippets run, and their numbers are those of the code."""

import re
from dataclasses import fields
from pathlib import Path

from mutants import callers, functions, layers, things
from regard.verify import LAWS, Conventions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verify.md").read_text()
MUTANTS = [*functions.MUTANTS, *layers.MUTANTS, *things.MUTANTS, *callers.MUTANTS]
MATRIX = (ROOT / "docs" / "verify-matrix.md").read_text()


def test_every_snippet_runs():
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) == 3
    for code in snippets:
        exec(compile(code, "docs/verify.md", "exec"), {})


def test_every_convention_is_named():
    table = PAGE.split("## Conventions")[1].split("## In your own tests")[0]
    assert {each.name for each in fields(Conventions)} <= set(re.findall(r"`(\w+)`", table))


def test_the_numbers_are_those_of_the_code():
    assert f"checks {len(LAWS)} laws" in PAGE
    assert f"{len(MUTANTS)} broken attentions" in PAGE
    assert f"{len(MUTANTS)} of them are found" in MATRIX.replace("\n", " ")
    rows = [line.split(" | ")[0].removeprefix("| ") for line in MATRIX.splitlines()]
    assert {mutant.name for mutant in MUTANTS} <= set(rows)
    assert set(LAWS) <= set(rows)


def test_every_mutant_is_found_by_the_law_that_names_its_cause():
    table = MATRIX.split("## How many")[0]
    for mutant in MUTANTS:
        line = next(row for row in table.splitlines() if row.startswith(f"| {mutant.name} |"))
        assert "**" in line
