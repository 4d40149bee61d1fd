"""A report as one HTML page: laws, counter-examples, pictures of visible keys."""

from collections.abc import Mapping
from html import escape

from regard.verify.report.report import DECLARE, Outcome, Report, Status

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#1b1f24;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.25rem .6rem;
border-bottom:1px solid #e4e7eb;vertical-align:top}
.kept{color:#127a3e}.broken{color:#b42318;font-weight:600}.partly{color:#9a6700}
.aside{color:#6b7280}code{font-size:.9em}summary{cursor:pointer}
.example{border-left:3px solid #b42318;padding:.3rem .8rem;margin:.8rem 0}
.example.broken,.example.partly{color:inherit;font-weight:inherit}
.example.partly{border-color:#d4a72c}
figure{display:inline-block;margin:.5rem 1.5rem .5rem 0}figcaption{font-size:.85rem;color:#6b7280}
svg{display:inline-block;margin-right:1rem}
@media (prefers-color-scheme:dark){body{background:#14171a;color:#e6e8ea}
td,th{border-color:#2c3238}.kept{color:#4cc27d}.broken{color:#ff8a80}.partly{color:#e3b341}}
"""
WORDS: dict[Status, str] = {
    "passed": "kept",
    "failed": "broken",
    "follows": "broken too",
    "advice": "advice",
    "undecided": "not decided in time",
    "defect": "an error of regard",
    "not applicable": "not applicable",
}
CLASSES: dict[str, str] = {  # of the style sheet, for verdicts and statuses
    "kept": "kept", "broken": "broken", "not understood": "broken", "partly judged": "partly",
    "passed": "kept", "failed": "broken", "follows": "broken", "advice": "partly",
    "undecided": "partly",
}  # fmt: skip
CELL = 16  # pixels of a cell of a picture


def page(report: Report) -> str:
    """The page: what is wrong first, then what was found out, and every law.

    Examples:
        >>> page(Report("mine"))[:15]
        '<!doctype html>'
    """
    parts = [
        f"<h1>{escape(report.subject)}</h1>",
        f"<p class={CLASSES[report.verdict]}>{escape(report.summary())}</p>",
        _unjudged(report),
        *(_example(each, _following(report, each)) for each in report.unexplained),
        _advice(report),
        _by_reason("Not decided in time (changes no verdict)", report.reasons("undecided")),
        _by_reason(
            "An error of regard itself: nothing is counted, please report it",
            report.reasons("defect"),
        ),
        _pictures(report),
        _inferred(report),
        _laws(report.asked),
        _by_reason("Not applicable", report.reasons("not applicable")),
        f"<p class=aside><code>{escape(report.badge())}</code></p>",
    ]
    title = escape(f"{report.subject}: regard verify")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _unjudged(report: Report) -> str:
    if not report.unjudged:
        return ""
    lines = ("<b>Not judged</b>", escape(report.unjudged), escape(DECLARE))
    return f"<div class='example partly'>{'<br>'.join(lines)}</div>"


def _advice(report: Report) -> str:
    drawn = "".join(_example(each) for each in report.having("advice"))
    return f"<h2>Advice (changes no verdict)</h2>{drawn}" if drawn else ""


def _inferred(report: Report) -> str:
    if not report.inferred and not report.notes:
        return ""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(words)}</td></tr>"
        for name, words in report.inferred.items()
    )
    notes = "".join(f"<p class=aside>{escape(note)}</p>" for note in report.notes)
    return f"<h2>Found out</h2><table>{rows}</table>{notes}"


def _pictures(report: Report) -> str:
    if not report.pictures:
        return ""
    drawn = "".join(
        f"<figure>{_both(each.expected, each.actual)}<figcaption>{escape(each.title)}: "
        f"expected and measured</figcaption></figure>"
        for each in report.pictures
    )
    return f"<h2>Which keys each query attends to</h2>{drawn}"


def _both(expected: list[list[bool]], actual: list[list[bool]]) -> str:
    return _grid(expected, expected) + _grid(actual, expected)


def _grid(cells: list[list[bool]], right: list[list[bool]]) -> str:
    """Queries down, keys across; a wrong cell is red."""
    height, width = len(cells), len(cells[0]) if cells else 0
    drawn = []
    for i, row in enumerate(cells):
        for j, cell in enumerate(row):
            colour = ("#3f6fd8" if cell else "#dfe3e8") if cell == right[i][j] else (
                "#b42318" if cell else "#f3b4ae"
            )  # fmt: skip
            title = f"query {i}, key {j}: {'visible' if cell else 'hidden'}"
            drawn.append(
                f"<rect x={j * CELL} y={i * CELL} width={CELL - 1} height={CELL - 1} "
                f"fill='{colour}'><title>{title}</title></rect>"
            )
    size = f"width={width * CELL} height={height * CELL}"
    return f"<svg {size} role=img aria-label='visibility'>{''.join(drawn)}</svg>"


def _following(report: Report, cause: Outcome) -> str:
    """The laws that are broken because of this one; their cases are folded until it is opened."""
    laws = report.following(cause.law)
    if not laws:
        return ""
    cases = "".join(_example(report.named(law)) for law in laws)
    heading = f"<summary>also broken because of it: {escape(', '.join(laws))}</summary>"
    return f"<details>{heading}{cases}</details>"


def _example(each: Outcome, following: str = "") -> str:
    """A law that is broken or advised: its sentence, its smallest case, and what follows."""
    known = f" <span class=aside>known: {escape(each.known)}</span>" if each.known else ""
    lines = [f"<b><code>{escape(each.law)}</code></b>{known}", escape(each.statement)]
    drawn = ""
    if (example := each.example) is not None:
        if where := " at ".join(filter(None, (example.shape, example.cell))):
            lines.append(f"<code>{escape(where)}</code>")
        lines.append(f"expected {escape(example.expected)}, got {escape(example.got)}")
        lines.append(escape(example.cause))
        if example.expected_grid and example.actual_grid:
            drawn = f"<p>{_both(example.expected_grid, example.actual_grid)}</p>"
    if each.line:
        lines.append(f"line <code>{escape(each.line)}</code>")
    if each.because:
        lines.append(f"follows from <code>{escape(each.because)}</code>")
    inside = f"{'<br>'.join(lines)}{drawn}{following}"
    return f"<div class='example {CLASSES[each.status]}'>{inside}</div>"


def _laws(outcomes: list[Outcome]) -> str:
    """Every law that was asked, folded until it is opened."""
    rows = "".join(
        f"<tr><td><code>{escape(each.law)}</code></td><td class={CLASSES[each.status]}>"
        f"{WORDS[each.status]}</td><td>{escape(each.kind)}</td><td>{escape(each.statement)}</td>"
        f"</tr>"
        for each in outcomes
    )
    if not rows:
        return ""
    heading = f"<summary>All {len(outcomes)} laws that were asked</summary>"
    return f"<h2>The laws</h2><details>{heading}<table>{rows}</table></details>"


def _by_reason(heading: str, reasons: Mapping[str, list[str]]) -> str:
    """A row for each reason, and the laws that share it."""
    rows = "".join(
        f"<tr class=aside><td>{escape(reason)}</td><td><code>{escape(', '.join(laws))}</code></td>"
        f"</tr>"
        for reason, laws in reasons.items()
    )
    return f"<h2>{heading}</h2><table>{rows}</table>" if rows else ""
