"""A page of a mask, cell by cell, whose rules are switched on and off: why a key is visible."""

import zlib
from base64 import b64encode
from html import escape
from pathlib import Path
from typing import Any

from regard.masks import AllOf, AnyOf, Mask, Not, Span
from regard.masks.draw import grid, slots
from regard.page.page import Section, file_beside, table, write_page
from regard.words import ranges

CELLS = 1 << 18  # cells of a page at most: 512 x 512, so that a cell is at least a pixel


def write(mask: Mask, span: Span, path: Path, *, b: int = 0, h: int = 0) -> None:
    """Write a page that draws a mask and says of each cell why it is visible or hidden.

    Args:
        mask: the rules.
        span: the slots that are drawn.
        path: of the HTML file.
        b: the batch row.
        h: the head.

    Raises:
        ValueError: if there are more than 262,144 cells.
        OSError: if the file cannot be written.

    Examples:
        >>> import tempfile
        >>> from regard.masks import Causal, SlidingWindow, Span
        >>> from regard.see.pages import mask_cells
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "mask.html"
        ...     mask_cells.write(Causal() & SlidingWindow(4), Span(0, 8, 0, 8), file)
        ...     "<h1>Causal() &amp; SlidingWindow(size=4)</h1>" in file.read_text()
        True
    """
    write_page(path, repr(mask), sections(mask, span, b=b, h=h))


def sections(mask: Mask, span: Span, *, b: int = 0, h: int = 0) -> list[Section]:
    """The parts of the page, for `regard.page.page.page`."""
    size = span.num_queries * span.num_keys
    if size > CELLS:
        raise ValueError(
            f"a page draws at most {CELLS:,} cells, got {span.num_queries:,} queries by "
            f"{span.num_keys:,} keys; give fewer of them"
        )
    html = f"<style>\n{file_beside('mask_cells.css')}</style>\n{_said(span, b, h)}"
    html += file_beside("mask_cells.html") + _table(mask, span, b, h)
    data = data_of(mask, span, b, h)
    return [Section("mask", "Cell by cell", html, data, "mask_cells.js", ("cells.js",))]


def data_of(mask: Mask, span: Span, b: int, h: int) -> dict[str, Any]:
    """The data of the page's script.

    `tree` combines rules by their place in `rules`: 2 is a rule, `["&", 0, 1]` an intersection,
    `["|", 0, 1]` a union, `["~", 0]` a complement. `visible` is a byte a cell; `hidden` has a line
    for each hidden cell, in the same order: which keys the rule hides, as `Mask.explain` says it.
    """
    rules: list[Mask] = []
    queries, keys = slots(span, b)
    return {
        "queries": list(queries),
        "keys": list(keys),
        "tree": _tree(mask, rules),
        "rules": [_rule(rule, span, b, h) for rule in rules],
    }


def _tree(mask: Mask, rules: list[Mask]) -> Any:
    """The combination of the rules, which are appended to `rules`."""
    match mask:
        case AllOf(parts=parts):
            return ["&", *(_tree(part, rules) for part in parts)]
        case AnyOf(parts=parts):
            return ["|", *(_tree(part, rules) for part in parts)]
        case Not(mask=inner):
            return ["~", _tree(inner, rules)]
    if mask not in rules:
        rules.append(mask)
    return rules.index(mask)


def _rule(rule: Mask, span: Span, b: int, h: int) -> dict[str, str]:
    visible = grid(rule, span, b, h)
    queries, _ = slots(span, b)
    lines = [
        rule._hidden_keys(b, queries[row], span.kv_start + column)
        for row, column in (~visible).nonzero().tolist()
    ]
    return {
        "code": repr(rule),
        "visible": _packed(bytes(visible.flatten().tolist())),
        "hidden": _packed("\n".join(lines).encode()),
    }


def _packed(content: bytes) -> str:
    return b64encode(zlib.compress(content, 9)).decode()


def _said(span: Span, b: int, h: int) -> str:
    where = f" of batch row {b} and head {h}" if b or h else ""
    return (
        f"<p>{span.num_queries:,} queries by {span.num_keys:,} keys{where}: each cell says whether "
        "the query may attend to the key. A rule that is switched off hides nothing.</p>"
    )


def _table(mask: Mask, span: Span, b: int, h: int) -> str:
    """The visible keys of each query as ranges."""
    visible = grid(mask, span, b, h)
    rows = []
    for query, row in zip(slots(span, b)[0], visible, strict=True):
        keys = (row.nonzero().flatten() + span.kv_start).tolist()
        rows.append([str(query), str(len(keys)), ranges(keys) or "none"])
    drawn = table("Visible keys of each query", ["query", "number", "keys"], rows)
    return f"<details><summary>{escape('All rules as a table')}</summary>{drawn}</details>"
