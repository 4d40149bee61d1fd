"""The report on a terminal, as JSON and as a page, and the progress of a run on stderr."""

import io
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from regard_verify.laws import LAWS
from regard_verify.report.ci import annotations, badge, sarif
from regard_verify.report.report import DECLARE, LETTERS, Outcome, Report, Status, count_of
from regard_verify.run.check import judge
from regard_verify.run.in_process import Request
from regard_verify.run.separate_process import of_command
from regard_verify.subject.conventions import Conventions, conventions_from
from regard_verify.writing import (
    UNWRAPPED,
    check_can_write,
    console_of,
    printable,
    say,
    write_whole,
)

COLOURS = {"kept": "green", "broken": "red", "not understood": "red", "partly judged": "yellow"}
STATUS_COLOURS = {
    "passed": "green", "failed": "red", "follows": "red", "advice": "yellow", "undecided": "yellow",
}  # fmt: skip
WORDS: dict[Status, str] = {
    "passed": "kept", "failed": "broken", "follows": "broken too", "advice": "advice",
    "undecided": "not decided in time", "defect": "an error of regard-verify",
    "not applicable": "not applicable",
}  # fmt: skip
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>regard-verify</title>
<style>
:root { color-scheme: light dark; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; max-width: 60rem; margin: 1rem auto; }
</style>
</head>
<body>
<pre>TEXT</pre>
</body>
</html>
"""  # a subject's name is text in it: the page loads nothing and runs no script
REASONS = 4  # reasons why laws do not apply, at most; the others are counted together
GRID = 8  # the most queries and keys of a counter-example that is drawn
PAUSE = 10.0  # seconds between two lines of progress


def verify(
    subject: str | None, *, like: Sequence[str], files: Mapping[str, Path | None], as_json: bool,
    annotate: bool, every_law: bool, listed: bool, **options: Any,
) -> int:  # fmt: skip
    """Check the laws, and print for people or programs; returns the exit code.

    `options` are those of `Request`, the others those of the command. `files` are written in the
    form that their names say.
    """
    console = console_of()
    if subject is None or listed:
        if as_json:
            told = ("name", "kind", "statement")
            laws = [{name: getattr(law, name) for name in told} for law in LAWS.values()]
            sys.stdout.write(json.dumps(laws, indent=1) + "\n")
            return 0
        for law in LAWS.values():
            say(console, f"{law.name} ({law.kind}): {law.statement}", bold=law.name)
        return 0
    asked = {form: path for form, path in files.items() if path is not None}
    for path in asked.values():
        check_can_write(path)
    report = judge(Request(subject, conventions_of(like), **options), progress(), of_command)
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        show(report, console, every_law=every_law)
    for line in annotations(report) if annotate else ():
        sys.stdout.write(f"{line}\n")
    for form, path in asked.items():  # last: an error of the disk then loses no result
        write_whole(path, {"html": page, "sarif": sarif, "badge": badge}[form](report).encode())
    return report.exit_code


def page(report: Report) -> str:
    """The report as a page of HTML, with every law, as `--all` prints it.

    Examples:
        >>> page(Report("mine"))[:15]
        '<!doctype html>'
    """
    text = io.StringIO()
    show(report, Console(file=text, width=UNWRAPPED, highlight=False), every_law=True)
    return PAGE.replace("TEXT", escape(text.getvalue()))


def progress() -> Callable[[str, int, int], None]:
    """A function that prints the law being checked on stderr, once in `PAUSE` seconds."""
    started = latest = time.monotonic()

    def step(law: str, done: int, total: int) -> None:
        nonlocal latest
        now = time.monotonic()
        if now - latest >= PAUSE:
            latest = now
            line = f"regard-verify: {now - started:.0f} s, {done} of {total}: {law}"
            print(printable(line), file=sys.stderr, flush=True)

    return step


def conventions_of(given: Sequence[str]) -> Conventions:
    """Conventions from `name=value`, where the value is JSON or a word.

    Raises:
        ValueError: for another form, or a convention that does not exist.

    Examples:
        >>> conventions_of(["polarity=drop", 'arguments={"dim": 32}']).declared()
        {'arguments': {'dim': 32}, 'polarity': 'drop'}
    """
    found: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise ValueError(f"a convention is given as name=value, got {each!r}")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError as error:
            if value[:1] in ("{", "["):
                raise ValueError(f"{name} is not JSON: {error}; got {value!r}") from error
            found[name] = value
    return conventions_from(found)


def show(report: Report, console: Console, *, every_law: bool = False) -> None:
    """Print a report for people, as wide as the console: what is wrong first, the verdict last.

    Laws that are kept are counted; `every_law` lists them, and those that do not apply.
    """
    what = f"{report.subject} {report.kind}".rstrip()
    say(console, f"{what}, {report.seconds:.0f} s", bold=report.subject)
    if not report.problem:
        _outcomes(report, console, every_law)
    found = [f"{name}: {text}" for name, text in report.inferred.items()]
    _paragraph("Found out", [*found, *report.notes], console, "dim")
    _paragraph("Not judged", [report.unjudged, DECLARE] if report.unjudged else [], console)
    console.print()
    say(console, report.summary(), style=f"bold {COLOURS[report.verdict]}")
    if len(report.badge()) <= console.width:  # --html and --json contain it
        say(console, report.badge(), style="dim")


def _outcomes(report: Report, console: Console, every_law: bool) -> None:
    if every_law:
        console.print()
        for each in report.asked:
            line = f"{WORDS[each.status]} {each.law}: {each.statement}"
            say(console, line, bold=WORDS[each.status], colour=STATUS_COLOURS[each.status])
    else:
        many = count_of(len(report.having("passed")), "law")
        say(console, f"{many} kept.", style=COLOURS["kept"])
    if any(each.example and "B=" in each.example.shape for each in report.causes):
        say(console, f"Cases: {LETTERS}", style="dim")
    if any(each.example and each.example.actual_grid for each in report.causes):
        say(console, "Keys: ■ visible, · hidden; wrong: X visible, □ hidden.", style="dim")
    for each in report.causes:
        following = report.following(each.law)
        _cause(each, following, console)
        for law in following if every_law else ():
            _cause(report.named(law), [], console)
    advice = [
        f"{each.law}: {each.statement}{f' {each.example}' if every_law and each.example else ''}"
        for each in report.having("advice")
    ]
    more = "" if every_law else "; --all shows the cases"
    _paragraph(f"Advice (changes no verdict{more})", advice, console)
    reasons: dict[Status, str] = {
        "undecided": "Not decided in time (changes no verdict)",
        "defect": "An error of regard-verify itself: nothing is counted, please report it",
        **({"not applicable": "Not applicable"} if every_law else {}),
    }
    for status, heading in reasons.items():
        laws = report.reasons(status).items()
        lines = [f"{', '.join(names)}: {reason.rstrip('.')}." for reason, names in laws]
        _paragraph(heading, lines, console)
    if aside := {} if every_law else report.reasons("not applicable"):
        _not_applicable(aside, console)


def _paragraph(heading: str, lines: Sequence[str], console: Console, style: str = "") -> None:
    """Print a heading, and lines below it; nothing if there is no line."""
    if lines:
        console.print()
        say(console, heading, style="bold")
    for line in lines:
        say(console, line, style=style, indent=2)


def _not_applicable(reasons: Mapping[str, list[str]], console: Console) -> None:
    """Count the laws that do not apply by reason, most first."""
    most_first = sorted(((len(laws), reason) for reason, laws in reasons.items()), reverse=True)
    told = [f"{reason.rstrip('.')} ({many})" for many, reason in most_first[:REASONS]]
    if others := sum(many for many, _ in most_first[REASONS:]):
        told.append(f"other reasons ({others}), which --all lists")
    what = f"{count_of(sum(map(len, reasons.values())), 'law')} do not apply:"
    console.print()
    say(console, f"{what} {'; '.join(told)}.", bold=what)


def _cause(each: Outcome, following: Sequence[str], console: Console) -> None:
    """A broken law: its sentence, its smallest case, the likely mistake, the subject's line."""
    console.print()
    say(console, f"broken {each.law}", bold=f"broken {each.law}", style=COLOURS["broken"])
    for sentence in each.sentences(following):
        say(console, sentence, indent=2)
    example = each.example
    if example is None or not example.expected_grid or not example.actual_grid:
        return
    if len(example.expected_grid) <= GRID >= len(example.expected_grid[0]):
        console.print(_grids(example.expected_grid, example.actual_grid))


def _grids(expected: list[list[bool]], actual: list[list[bool]]) -> str:
    """The visible keys, expected and actual side by side; wrong cells have signs of their own."""
    lines = ["  [dim]expected" + " " * max(2 * len(expected[0]) - 6, 2) + "actual[/dim]"]
    for right, got in zip(expected, actual, strict=True):
        first = " ".join("■" if cell else "·" for cell in right)
        second = " ".join(
            f"[red]{'X' if cell else '□'}[/red]" if cell != want else ("■" if cell else "·")
            for want, cell in zip(right, got, strict=True)
        )
        lines.append(f"  {first}{' ' * max(10 - len(first), 3)}{second}")
    return "\n".join(lines)
