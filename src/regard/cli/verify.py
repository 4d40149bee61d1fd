"""regard verify: checks the laws of attention on any attention."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from regard.cli.layout import Column, tabulate
from regard.cli.terminal import progress_bar, remarks, say, stdout
from regard.verify import LAWS, Conventions, Outcome, Report, check
from regard.verify.report.html import WORDS, page
from regard.verify.subject.conventions import conventions_from

COLOURS = {"passed": "green", "failed": "red", "advice": "yellow"}
STATEMENT = Column("statement", words=True)
CLASS = Column("class", left=True)
LISTED = (Column("law", left=True), CLASS, STATEMENT)
CHECKED = (Column("law", left=True), Column("", left=True), CLASS, STATEMENT)
NO_BADGE = "The badge for a README is wider than this terminal: --html and --json contain it."
GRID = 8  # the most queries of a counter-example that is drawn


def run(
    *,
    subject: str | None,
    like: Sequence[str] | None,
    html: Path | None,
    as_json: bool,
    listed: bool,
    **options: Any,
) -> None:
    """Check the laws, and print for people or programs; `options` are arguments of `check`."""
    console = stdout()
    if listed:
        tabulate(console, LISTED, listed_laws())
        return
    with progress_bar() as progress:
        report = check(subject, conventions_of(like or []), progress=progress, **options)
    if html is not None:
        html.write_text(page(report), encoding="utf-8")
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        show(report, console)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def listed_laws() -> list[list[str]]:
    """A row for each law."""
    return [[each.name, each.kind, escape(each.statement)] for each in LAWS.values()]


def conventions_of(given: Sequence[str]) -> Conventions:
    """Conventions from `name=value`, where the value is JSON or a word.

    Raises:
        ValueError: for another form, or a convention that does not exist.

    >>> conventions_of(["polarity=drop", "heads=4"]).declared()
    {'polarity': 'drop', 'heads': 4}
    """
    found: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise ValueError(f"a convention is given as name=value, got {each!r}")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return conventions_from(found)


def show(report: Report, console: Console) -> None:
    """Print a report for people, as wide as the console."""
    say(console, f"{report.subject} {report.kind}", bold=report.subject)
    console.print()
    for name, found in report.inferred.items():
        say(console, f"{name}: {found}", style="dim", indent=2)
    for note in report.notes:
        say(console, note, style="dim", indent=2)
    if report.problem:
        say(console, f"Not understood. {report.problem}", style="red")
        return
    applied = [each for each in report.outcomes if each.status != "not applicable"]
    console.print()
    tabulate(console, CHECKED, [_row(each) for each in applied])
    for each in applied:
        if each.example is not None:
            _counterexample(each, console)
    aside = report.having("not applicable")
    remarks(console, "Not applicable", {each.law: each.reason for each in aside})
    console.print()
    say(console, f"{report.summary()} ({report.seconds:.0f} s)", bold=report.summary())
    if len(report.badge()) <= console.width:
        say(console, report.badge(), style="dim")
    else:
        say(console, NO_BADGE, style="dim")


def _row(each: Outcome) -> list[str]:
    colour = COLOURS[each.status]
    return [
        each.law,
        f"[{colour}]{WORDS[each.status]}[/{colour}]",
        each.kind,
        escape(each.statement),
    ]


def _counterexample(each: Outcome, console: Console) -> None:
    example = each.example
    assert example is not None
    known = f" (known: {each.known})" if each.known else ""
    console.print()
    broken = f"{WORDS[each.status]} {each.law}"
    say(console, f"{broken}{known}", bold=broken)
    where = " at ".join(filter(None, (example.shape, example.cell)))
    for line in (where, f"expected {example.expected}, got {example.got}", example.cause):
        say(console, line, indent=2)
    expected, actual = example.expected_grid, example.actual_grid
    if expected and actual and len(expected) <= GRID and 4 * len(expected[0]) < console.width - 4:
        console.print(_grids(expected, actual))


def _grids(expected: list[list[bool]], actual: list[list[bool]]) -> str:
    """The visible keys, expected and actual side by side; wrong cells are red."""
    lines = ["  [dim]expected" + " " * max(2 * len(expected[0]) - 6, 2) + "actual[/dim]"]
    for right, got in zip(expected, actual, strict=True):
        first = " ".join("■" if cell else "·" for cell in right)
        second = " ".join(
            f"[red]{'■' if cell else '·'}[/red]" if cell != want else ("■" if cell else "·")
            for want, cell in zip(right, got, strict=True)
        )
        lines.append(f"  {first}{' ' * max(10 - len(first), 3)}{second}")
    return "\n".join(lines)
