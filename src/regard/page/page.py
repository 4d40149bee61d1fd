"""One self-contained HTML file from sections: text, tables, charts, and scripts with their data.

A page loads nothing: its Content-Security-Policy names the digests of its own scripts, so no other
script runs in it, whatever a model or a law is called.
"""

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from regard import whole_file
from regard.page.readable import are_words
from regard.words import without_controls

ESCAPED = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}
CONTROLS = re.compile(  # as JSON escapes them: control characters, and those that change directions
    r"\\\\|\\u(?:00[01][0-9a-f]|007f|00[89][0-9a-f]|061c|200[ef]|202[a-e]|206[6-9])"
)
POLICY = (  # a page may style itself and show drawn pictures; all else is named or refused
    "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
    "style-src 'unsafe-inline'; script-src {scripts}"
)
START = "regard.start();"


@dataclass(frozen=True)
class Section:
    """A part of a page under its own heading.

    Attributes:
        id: of the HTML element, unique in the page.
        heading: plain text.
        html: the content, with text in it already escaped (`html.escape`, `table`).
        data: what the script gets, of dictionaries, lists, numbers and text.
        script: name of a file beside this one, as `"curves.js"`; it calls
            `regard.define("curves", (section, data, charts) => ...)`.
        uses: names of the files that the script calls, in the order in which they run before it.
        charts: Bokeh's models by the id of the element that each is drawn in.

    Examples:
        >>> from regard.page.page import Section
        >>> Section("sizes", "Sizes", html="<p>Nothing is cached.</p>").heading
        'Sizes'
    """

    id: str
    heading: str
    html: str = ""
    data: Any = None
    script: str = ""
    uses: Sequence[str] = ()
    charts: Mapping[str, Any] = field(default_factory=dict)


def page(title: str, sections: Sequence[Section]) -> str:
    """The HTML of a page, with everything that it needs inside.

    Args:
        title: plain text.
        sections: in order.

    Returns:
        The whole file. With charts it holds Bokeh's JavaScript, 1.27 MB; without, 10 KB.

    Raises:
        ValueError: if two sections have the same id, or data holds NaN or infinity.
        ImportError: if a section has charts and Bokeh is missing.

    Examples:
        >>> from regard.page.page import Section, page
        >>> html = page("My <model>", [Section("sizes", "Sizes", html="<p>8 heads</p>")])
        >>> "<h1>My &lt;model&gt;</h1>" in html, "<p>8 heads</p>" in html
        (True, True)
    """
    ids = [each.id for each in sections]
    if len(ids) != len(set(ids)):
        raise ValueError(f"sections of a page need ids of their own; got {', '.join(ids)}")
    scripts = list(_scripts(sections))
    policy = POLICY.format(scripts=" ".join(map(_digest, scripts)))
    title = escape(without_controls(title))
    breakable = re.sub(r"([:/])(?=\S)", r"\1<wbr>", title)  # names of files, on phones
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{file_beside('page.css')}</style>\n</head>\n"
    )
    body = (
        f'<body>\n<header>\n<h1>{breakable}</h1>\n<button type="button" id="theme" hidden>'
        f"Dark</button>\n</header>\n<main>\n{''.join(map(_section, sections))}</main>\n"
        f"{''.join(f'<script>{script}</script>{chr(10)}' for script in scripts)}</body>\n</html>\n"
    )
    return (head + body).encode(errors="replace").decode()  # names of files may hold stray bytes


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write a page to a file; arguments as of `page`.

    Raises:
        OSError: if the file cannot be written; an earlier file of that name is as before.
    """
    whole_file.write_whole(path, page(title, sections).encode())


def check_can_write(path: Path) -> None:
    """Refuse a page with charts before the work that it shows, if it could not be written.

    Args:
        path: of the HTML file.

    Raises:
        OSError: if no file can be written there; the error names the path and the way out.
        ImportError: if Bokeh is missing.

    Examples:
        >>> from pathlib import Path
        >>> from regard.page.page import check_can_write
        >>> check_can_write(Path("costs.html"))
    """
    whole_file.check_can_write(path)
    _imported("bokeh.resources")


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The HTML of a table of plain text, whose first column names the rows.

    It scrolls in its own frame, also by keyboard, where it is wider than the page.

    Args:
        caption: what it shows.
        head: of the columns.
        rows: their cells.

    Examples:
        >>> from regard.page.page import table
        >>> table("Sizes", ["layer", "heads"], [["0", "<8>"]]).count("&lt;8&gt;")
        1
    """
    cells = [list(row) for row in rows]
    words = [' class="words"' if are_words(column) else "" for column in _columns(cells, head)]
    columns = "".join(
        f'<th scope="col"{kind}>{escape(each)}</th>' for kind, each in zip(words, head, strict=True)
    )
    lines = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(
            f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(words[1:], others, strict=True)
        )
        + "</tr>\n"
        for first, *others in cells
    )
    return (
        f'<div class="frame" tabindex="0" role="region" aria-label="{escape(caption)}">\n<table>'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{columns}</tr></thead>\n"
        f"<tbody>\n{lines}</tbody></table></div>\n"
    )


def _columns(rows: Sequence[Sequence[str]], head: Sequence[str]) -> Iterator[list[str]]:
    for at in range(len(head)):
        yield [row[at] for row in rows]


def json_in_html(data: Any) -> str:
    """Data as JSON that can stand inside a script element, whatever text it holds.

    Args:
        data: of dictionaries, lists, numbers and text.

    Raises:
        ValueError: if a number is NaN or infinite, which JSON cannot say.

    Examples:
        >>> from regard.page.page import json_in_html
        >>> json_in_html({"name": "</script>"})
        '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    text = CONTROLS.sub(lambda found: found[0] if found[0] == r"\\" else rf"\{found[0]}", text)
    return text.translate(ESCAPED)


def file_beside(name: str) -> str:
    """The text of a style sheet or script of this folder."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _section(section: Section) -> str:
    data = ""
    if section.script:
        items = {"data": section.data, "charts": _charts(section.charts)}
        data = f'<script type="application/json">{json_in_html(items)}</script>\n'
    name = escape(section.script.removesuffix(".js"))
    return (
        f'<section id="{escape(section.id)}" data-script="{name}">\n'
        f"{without_controls(f'<h2>{escape(section.heading)}</h2>{chr(10)}{section.html}')}{data}"
        "</section>\n"
    )


def _scripts(sections: Sequence[Section]) -> Iterator[str]:
    """The scripts in the order in which they run; none if no section has one."""
    if any(each.charts for each in sections):
        yield _bokeh()
    yield file_beside("page.js")
    names = (name for each in sections for name in (*each.uses, each.script) if each.script)
    for name in dict.fromkeys(names):
        yield file_beside(name)
    yield START


def _digest(script: str) -> str:
    """The source of a Content-Security-Policy that allows this script."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _bokeh() -> str:
    """The JavaScript of Bokeh's charts, without its widgets and tables."""
    resources_of = _imported("bokeh.resources").Resources
    return "\n".join(resources_of(mode="inline", components=["bokeh"]).js_raw)


def _charts(charts: Mapping[str, Any]) -> dict[str, Any]:
    if not charts:
        return {}
    embed = _imported("bokeh.embed")
    return {name: embed.json_item(model, name) for name, model in charts.items()}


def _imported(name: str) -> Any:
    """A module of Bokeh, which is optional."""
    try:
        return __import__(name, fromlist=[""])
    except ImportError as error:
        raise ImportError(
            "pages with charts need bokeh: python -m pip install 'regard[page]'"
        ) from error
