"""The report for a project's continuous integration: SARIF, annotations of lines, a badge.

SARIF is the format of code scanning (OASIS, version 2.1.0); annotations are workflow commands of
GitHub; the badge is JSON for the endpoint of shields.io.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from regard_verify import __version__
from regard_verify.report.report import COLOURS, DECLARE, Report

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LABEL = "attention"  # of the badge
RULES = {  # what is reported beside laws
    "not_understood": "The subject can be found, built and called.",
    "judged": "The laws that matter most can be asked.",
}
COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}  # by level


@dataclass(frozen=True)
class Finding:
    """One thing to report on a line of the subject.

    Attributes:
        rule: the name of a law, or one of `RULES`.
        level: error for a broken law, warning where not all is judged, note for advice.
        statement: the rule in one sentence.
        text: what is wrong, with the smallest case.
        file: the path from the working directory, with forward slashes.
        line: its number, from 1.
    """

    rule: str
    level: str
    statement: str
    text: str
    file: str
    line: int


def findings(report: Report) -> Iterator[Finding]:
    """One finding for each cause, each advice, and what was not judged or understood."""
    file, line = definition(report.subject)
    if report.problem:
        statement = RULES["not_understood"]
        yield Finding("not_understood", "error", statement, report.problem, file, line)
    for level, outcomes in (("error", report.causes), ("note", report.having("advice"))):
        for each in outcomes:
            text = "\n".join(each.sentences(report.following(each.law)))
            place = re.match(r"(.+?):(\d+)(?::|$)", each.line)
            where = (Path(place[1]).as_posix(), int(place[2])) if place else (file, line)
            yield Finding(each.law, level, each.statement, text, *where)
    if report.unjudged:
        text = f"{report.unjudged}\n{DECLARE}"
        yield Finding("judged", "warning", RULES["judged"], text, file, line)


def definition(subject: str) -> tuple[str, int]:
    """The file of a named subject and the line that defines it; the first line if none does.

    A module of a package is looked for in the working directory, and in `src`.

    Examples:
        >>> definition("torch.nn:MultiheadAttention")
        ('torch.nn', 1)
    """
    before, _, name = subject.rpartition(":")
    file = before or subject
    module = file.replace(".", "/")
    places = [f"{home}{module}{end}" for home in ("", "src/") for end in (".py", "/__init__.py")]
    path = next((path for path in map(Path, (file, *places)) if path.is_file()), Path(file))
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # an installed package, a folder, no Python
        return path.as_posix(), 1
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines = [node.lineno for node in tree.body if isinstance(node, kinds) and node.name == name]
    return path.as_posix(), lines[0] if lines else 1


def sarif(report: Report) -> str:
    """The report as SARIF 2.1.0: a result for each finding, a rule for each law among them."""
    found = list(findings(report))
    statements = {each.rule: each.statement for each in found}
    rules = [{"id": rule, "shortDescription": {"text": text}} for rule, text in statements.items()]
    driver = {"name": "regard-verify", "version": __version__, "rules": rules}
    results = []
    for each in found:
        place = {"artifactLocation": {"uri": quote(each.file)}, "region": {"startLine": each.line}}
        result = {
            "ruleId": each.rule,
            "ruleIndex": list(statements).index(each.rule),
            "level": each.level,
            "message": {"text": each.text},
            "locations": [{"physicalLocation": place}],
        }
        results.append(result)
    run = {
        "tool": {"driver": driver},
        "results": results,
        "invocations": [{"executionSuccessful": not report.problem}],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def annotations(report: Report) -> Iterator[str]:
    """A workflow command of GitHub for each finding: it is shown at the line in a pull request.

    Examples:
        >>> print(*annotations(Report("mine.py:A", problem="It is not there.")))
        ::error file=mine.py,line=1,title=not_understood::It is not there.
    """
    for each in findings(report):
        place = f"file={_escaped(each.file, ',:')},line={each.line},title={each.rule}"
        yield f"::{COMMANDS[each.level]} {place}::{_escaped(each.text)}"


def _escaped(text: str, more: str = "") -> str:
    """Text of a workflow command: line ends, and in a property commas and colons, as escapes."""
    for each in f"%\r\n{more}":
        text = text.replace(each, f"%{ord(each):02X}")
    return text


def badge(report: Report) -> str:
    """The badge as JSON for shields.io, which reads it from any address: `endpoint?url=...`.

    Examples:
        >>> json.loads(badge(Report("mine")))["color"]
        'yellow'
    """
    shown = {"schemaVersion": 1, "label": LABEL, "message": report.counts()}
    return json.dumps({**shown, "color": COLOURS[report.verdict]}) + "\n"
