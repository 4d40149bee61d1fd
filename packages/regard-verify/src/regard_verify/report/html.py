"""A report as one HTML page: laws, and counter-examples with their visible keys."""

from collections.abc import Iterator, Mapping
from html import escape

from regard_verify.report.report import DECLARE, LETTERS, Outcome, Report, Status

STYLE = """<style>
:root{color-scheme:light dark;--line:light-dark(#d0d5dc,#3a424b);--good:light-dark(#18794e,#4cc38a);
--bad:light-dark(#b42318,#ff6f61);--partly:light-dark(#8a5a00,#e5b454)}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem;
background:light-dark(#fff,#15191e);color:light-dark(#1a1f26,#e3e7ec);overflow-wrap:anywhere}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}code{font-size:.9em}
.aside{color:light-dark(#5b6570,#9aa5b1)}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}
.partly{color:var(--partly);font-weight:600}
.frame{overflow-x:auto}table{border-collapse:collapse}
.example{border-left:3px solid var(--bad);padding:.3rem .8rem;margin:.8rem 0}
.example.bad,.example.partly{color:inherit;font-weight:inherit}
.example.partly{border-color:var(--partly)}
.laws td,.laws th{text-align:left;vertical-align:top;min-width:6rem;padding:.3rem .6rem .3rem 0;
border-top:1px solid var(--line)}
.laws td:first-child{min-width:9rem}
figure{display:inline-block;margin:.5rem 1.5rem .5rem 0}
svg{display:inline-block;max-width:100%;vertical-align:-.15em}
.seen{fill:light-dark(#3f6fd8,#6aaeff)}
.unseen{fill:light-dark(#dfe3e8,#3a424b)}
.excess{fill:light-dark(#b42318,#ff6f61)}
.missing{fill:light-dark(#f3b4ae,#8c3a33)}
</style>
"""
FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
{style}</head>
<body>
<h1>{title}</h1>
{sections}</body>
</html>
"""  # it loads nothing and runs no script, whatever a subject or a law is called
KEY = {  # of pictures: what a cell's class means
    "seen": "visible",
    "unseen": "hidden",
    "excess": "wrong: visible, must be hidden",
    "missing": "wrong: hidden, must be visible",
}
WORDS: dict[Status, str] = {
    "passed": "kept",
    "failed": "broken",
    "follows": "broken too",
    "advice": "advice",
    "undecided": "not decided in time",
    "defect": "an error of regard-verify",
    "not applicable": "not applicable",
}
CLASSES: dict[str, str] = {  # of the style sheet of pages, for verdicts and statuses
    "kept": "good", "broken": "bad", "not understood": "bad", "partly judged": "partly",
    "passed": "good", "failed": "bad", "follows": "bad", "advice": "partly",
    "undecided": "partly",
}  # fmt: skip
CELL = 16  # pixels of a cell of a picture


def page(report: Report) -> str:
    """The page: what is wrong first, then what was found out, and every law.

    Examples:
        >>> page(Report("mine"))[:15]
        '<!doctype html>'
    """
    sections = "".join(
        f"<section><h2>{heading}</h2>\n{html}</section>\n"
        for heading, html in _parts(report)
        if html
    )
    title = escape(f"{report.subject}: regard-verify")
    whole = FRAME.format(title=title, style=STYLE, sections=sections)
    text = "".join(
        each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in whole
    )
    return text.encode(errors="replace").decode()  # names of files may hold stray bytes


def _parts(report: Report) -> Iterator[tuple[str, str]]:
    """Headings, and what stands under them; a heading without anything is left out."""
    examples = "".join(_example(each, _following(report, each)) for each in report.unexplained)
    summary = f"<p class={CLASSES[report.verdict]}>{escape(report.summary())}</p>"
    letters = f"<p class=aside>{LETTERS}</p>" if "<code>B=" in examples else ""
    key = _key() if "<svg" in examples else ""
    yield "Verdict", f"{summary}{_unjudged(report)}{letters}{key}{examples}"
    advice = "".join(_example(each) for each in report.having("advice"))
    yield "Advice (changes no verdict)", advice
    yield "Not decided in time (changes no verdict)", _by_reason(report.reasons("undecided"))
    defects = _by_reason(report.reasons("defect"))
    yield "An error of regard-verify itself: nothing is counted, please report it", defects
    yield "Found out", _inferred(report)
    yield "The laws", _laws(report.asked)
    yield "Not applicable", _by_reason(report.reasons("not applicable"))
    yield "Badge", f"<p class=aside><code>{escape(report.badge())}</code></p>"


def _unjudged(report: Report) -> str:
    if not report.unjudged:
        return ""
    lines = ("<b>Not judged</b>", escape(report.unjudged), escape(DECLARE))
    return f"<div class='example partly'>{'<br>'.join(lines)}</div>"


def _inferred(report: Report) -> str:
    if not report.inferred and not report.notes:
        return ""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(words)}</td></tr>"
        for name, words in report.inferred.items()
    )
    notes = "".join(f"<p class=aside>{escape(note)}</p>" for note in report.notes)
    return f"{_table('Found out', rows)}{notes}"


def _key() -> str:
    """The key of the colours of cells."""
    swatch = f"<svg width={CELL} height={CELL}><rect width={CELL} height={CELL} class={{}} /></svg>"
    colours = "; ".join(f"{swatch.format(each)} {words}" for each, words in KEY.items())
    return f"<p class=aside>Queries down, keys across: {colours}.</p>"


def _both(expected: list[list[bool]], actual: list[list[bool]]) -> str:
    """Two pictures beside each other, each with its name."""
    return "".join(
        f"<figure>{_grid(cells, expected)}<figcaption>{name}</figcaption></figure>"
        for name, cells in (("expected", expected), ("actual", actual))
    )


def _grid(cells: list[list[bool]], right: list[list[bool]]) -> str:
    """Queries down, keys across; a cell that is wrong has a colour of its own."""
    height, width = len(cells), len(cells[0]) if cells else 0
    drawn = []
    for i, row in enumerate(cells):
        for j, cell in enumerate(row):
            kinds = ("seen", "excess") if cell else ("unseen", "missing")
            title = f"query {i}, key {j}: {'visible' if cell else 'hidden'}"
            drawn.append(
                f"<rect x={j * CELL} y={i * CELL} width={CELL - 1} height={CELL - 1} "
                f"class={kinds[cell != right[i][j]]}><title>{title}</title></rect>"
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
            drawn = f"<div>{_both(example.expected_grid, example.actual_grid)}</div>"
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
    return f"<details>{heading}{_table('Laws', rows)}</details>"


def _by_reason(reasons: Mapping[str, list[str]]) -> str:
    """A row for each reason, and the laws that share it."""
    rows = "".join(
        f"<tr class=aside><td>{escape(reason)}</td><td><code>{escape(', '.join(laws))}</code></td>"
        f"</tr>"
        for reason, laws in reasons.items()
    )
    return _table("Laws by reason", rows) if rows else ""


def _table(name: str, rows: str) -> str:
    """Rows in a frame of their own, which scrolls where the page is too narrow."""
    frame = f'<div class=frame tabindex=0 role=region aria-label="{name}">'
    return f"{frame}<table class=laws>{rows}</table></div>"
