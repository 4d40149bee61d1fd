"""A report as one HTML page: laws, counter-examples, pictures of visible keys."""

from html import escape

from regard.verify.report.report import Outcome, Report

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#1b1f24;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.25rem .6rem;
border-bottom:1px solid #e4e7eb;vertical-align:top}
.passed{color:#127a3e}.failed{color:#b42318;font-weight:600}.advice{color:#9a6700}
.aside{color:#6b7280}code{font-size:.9em}
.example{border-left:3px solid #b42318;padding:.3rem .8rem;margin:.8rem 0}
.example.advice{border-color:#d4a72c;color:inherit}
figure{display:inline-block;margin:.5rem 1.5rem .5rem 0}figcaption{font-size:.85rem;color:#6b7280}
svg{display:inline-block;margin-right:1rem}
@media (prefers-color-scheme:dark){body{background:#14171a;color:#e6e8ea}
td,th{border-color:#2c3238}.passed{color:#4cc27d}.failed{color:#ff8a80}.advice{color:#e3b341}}
"""
WORDS = {"passed": "kept", "failed": "broken", "advice": "advice"}
CELL = 16  # pixels of a cell of a picture


def page(report: Report) -> str:
    """The page.

    >>> page(Report("mine"))[:15]
    '<!doctype html>'
    """
    applied = [each for each in report.outcomes if each.status != "not applicable"]
    parts = [
        f"<h1>{escape(report.subject)}</h1><p>{escape(report.summary())}</p>",
        _inferred(report),
        _pictures(report),
        *(_example(each) for each in applied if each.example is not None),
        _laws(applied),
        _aside(report),
        f"<p class=aside><code>{escape(report.badge())}</code></p>",
    ]
    title = escape(f"{report.subject}: regard verify")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _inferred(report: Report) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(words)}</td></tr>"
        for name, words in report.inferred.items()
    )
    notes = "".join(f"<p class=aside>{escape(note)}</p>" for note in report.notes)
    return f"<h2>What was found out</h2><table>{rows}</table>{notes}"


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


def _example(each: Outcome) -> str:
    example = each.example
    assert example is not None
    where = " at ".join(filter(None, (example.shape, example.cell)))
    known = f" <span class=aside>known: {escape(each.known)}</span>" if each.known else ""
    drawn = ""
    if example.expected_grid and example.actual_grid:
        drawn = f"<p>{_both(example.expected_grid, example.actual_grid)}</p>"
    return (
        f"<div class='example {each.status}'><b>{each.law}</b>{known}<br>"
        f"{escape(each.statement)}<br><code>{escape(where)}</code><br>"
        f"expected {escape(example.expected)}, got {escape(example.got)}<br>"
        f"{escape(example.cause)}{drawn}</div>"
    )


def _laws(outcomes: list[Outcome]) -> str:
    rows = "".join(
        f"<tr><td><code>{each.law}</code></td><td class={each.status}>{WORDS[each.status]}</td>"
        f"<td>{each.kind}</td><td>{escape(each.statement)}</td></tr>"
        for each in outcomes
    )
    return f"<h2>The laws</h2><table>{rows}</table>"


def _aside(report: Report) -> str:
    rows = "".join(
        f"<tr class=aside><td><code>{each.law}</code></td><td>{escape(each.reason)}</td></tr>"
        for each in report.having("not applicable")
    )
    return f"<h2>Not applicable</h2><table>{rows}</table>" if rows else ""
