"""regard verify: anyone's attention before the laws of attention."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from regard.cli.compare import WIDTH, progress_bar
from regard.verify import CHECKS, Conventions, Outcome, Report, check
from regard.verify.conventions import conventions_from
from regard.verify.html import page

MARKS = {
    "passed": "[green]kept[/green]",
    "failed": "[red]broken[/red]",
    "advice": "[yellow]advice[/yellow]",
}


def verify_command(
    subject: Annotated[
        str | None,
        typer.Argument(
            help="PATH.py:NAME, package.module:NAME, or a folder with a transformers model.",
            show_default=False,
        ),
    ] = None,
    like: Annotated[
        list[str] | None,
        typer.Option("--like", help="A convention, name=value; may be repeated. Values are JSON."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A check to run; may be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, no compiler.")] = False,
    seed: Annotated[int, typer.Option(help="Of all dice.")] = 0,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds for one check.")] = 30.0,
    memory: Annotated[float, typer.Option(min=0.1, help="GiB the subject may take.")] = 4.0,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only JSON on stdout.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the checks and leave.")] = False,
) -> None:
    """Judge anyone's attention: what it does, which laws it breaks, and the smallest case."""
    console = Console(width=WIDTH, highlight=False, soft_wrap=False)
    if listed:
        console.print(_list())
        return
    if subject is None:
        raise typer.BadParameter("give PATH.py:NAME, or --list", param_hint="SUBJECT")
    with progress_bar() as progress:
        report = check(
            subject,
            conventions_of(like or []),
            only=only,
            quick=quick,
            seed=seed,
            limit=limit,
            memory=memory,
            progress=progress,
        )
    if html is not None:
        html.write_text(page(report), encoding="utf-8")
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        show(report, console)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def conventions_of(given: list[str]) -> Conventions:
    """Conventions from `name=value`, where a value is JSON or a plain word.

    Raises:
        ValueError: if one is not of that form, or no such convention.

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
    """Print a report for people, in 100 columns."""
    console.print(f"[bold]{escape(report.subject)}[/bold] {report.kind}\n")
    for name, said in report.inferred.items():
        console.print(f"  [dim]{name}:[/dim] {escape(said)}")
    for note in report.notes:
        console.print(f"  [dim]{escape(note)}[/dim]")
    if report.problem:
        console.print(f"[red]Not understood.[/red] {escape(report.problem)}")
        return
    asked = [each for each in report.outcomes if each.status != "not applicable"]
    console.print()
    console.print(_table(asked))
    for each in asked:
        if each.example is not None:
            _counterexample(each, console)
    _not_asked(report, console)
    console.print(f"\n[bold]{escape(report.summary())}[/bold] [dim]({report.seconds:.0f} s)[/dim]")
    console.print(f"[dim]{escape(report.badge())}[/dim]")


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head, width in (("law", 21), ("", 6), ("class", 11)):
        table.add_column(head, no_wrap=True, min_width=width)
    table.add_column("in words", no_wrap=True, overflow="ellipsis", max_width=WIDTH - 44)
    for each in outcomes:
        table.add_row(each.check, MARKS[each.status], each.kind, f"[dim]{escape(each.law)}[/dim]")
    return table


def _counterexample(each: Outcome, console: Console) -> None:
    example = each.example
    assert example is not None
    known = f" (known: {each.known})" if each.known else ""
    console.print(f"\n{MARKS[each.status]} [bold]{each.check}[/bold]{known}")
    where = f" at {example.cell}" if example.cell else ""
    if example.shape or where:
        console.print(f"  {escape(example.shape + where)}")
    console.print(f"  expected {escape(example.expected)}, got {escape(example.got)}")
    console.print(f"  {escape(example.cause)}")
    if example.expected_grid and example.actual_grid and len(example.expected_grid) <= 8:
        console.print(_grids(example.expected_grid, example.actual_grid))


def _grids(expected: list[list[bool]], actual: list[list[bool]]) -> str:
    """Expected and actual sight side by side; wrong cells are red."""
    lines = ["  [dim]expected" + " " * max(2 * len(expected[0]) - 6, 2) + "actual[/dim]"]
    for right, got in zip(expected, actual, strict=True):
        first = " ".join("■" if cell else "·" for cell in right)
        second = " ".join(
            f"[red]{'■' if cell else '·'}[/red]" if cell != want else ("■" if cell else "·")
            for want, cell in zip(right, got, strict=True)
        )
        lines.append(f"  {first}{' ' * max(10 - len(first), 3)}{second}")
    return "\n".join(lines)


def _not_asked(report: Report, console: Console) -> None:
    reasons: dict[str, list[str]] = {}
    for each in report.having("not applicable"):
        reasons.setdefault(each.reason, []).append(each.check)
    if reasons:
        console.print("\n[bold]Not applicable[/bold]")
    for reason, checks in reasons.items():
        console.print(f"  [dim]{escape(reason)}: {', '.join(checks)}[/dim]")


def _list() -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in ("check", "class", "law"):
        table.add_column(head, no_wrap=head != "law")
    for each in CHECKS.values():
        table.add_row(each.name, each.kind, escape(each.law))
    return table
