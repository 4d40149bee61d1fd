"""A section with curves over context lengths: cache bytes and time of a decode step.

Sliders choose among values that `plan.cost` has computed. Tables stand behind the charts, and are
complete without JavaScript.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from regard.page.page import Section, table
from regard.page.readable import readable_bytes, readable_seconds
from regard.plan.devices import Device
from regard.see.pages.charts import COLOURS, DASHES, chart, style_of
from regard.see.pages.lines import Chosen, Line, Slider

UNLIMITED = "any number"


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The content of a section of curves.

    Args:
        lines: the attentions; the first is what the others are compared with.
        sliders: with those named `"context"`, `"batch"` and `"memory"`.
        devices: that decode times are estimated for; no times without one.
        dtype: of weights, hidden states and plain caches.
        beyond: tokens that the model was made for; None if that is not known.
        introduction: a paragraph above them, plain text.
    """

    lines: tuple[Line, ...]
    sliders: tuple[Slider, ...]
    devices: tuple[Device, ...]
    dtype: str
    beyond: int | None = None
    introduction: str = ""

    @property
    def start(self) -> dict[str, int | str]:
        """The values of the sliders at first."""
        return {each.name: each.start for each in self.sliders}

    @property
    def contexts(self) -> list[int]:
        """The context lengths of charts and tables."""
        found = next(each for each in self.sliders if each.name == "context")
        return [int(each) for each in found.values]

    @property
    def rated(self) -> list[Device]:
        """The devices whose rate for this dtype is known."""
        return [each for each in self.devices if self.dtype in each.flops]


def curves(given: Curves, *, id: str = "curves", heading: str = "Cache and decode time") -> Section:
    """A section with sliders, charts, and the table behind each.

    Args:
        given: lines, sliders, devices.
        id: of the section.
        heading: of the section.

    Raises:
        ImportError: if Bokeh is missing.
    """
    units = {"cache_bytes": "bytes"} | ({"decode_seconds": "seconds"} if given.rated else {})
    charts = {
        f"{id}-{name}": chart(
            HEADINGS[name].lower(), unit, given.contexts, len(given.lines), given.beyond
        )
        for name, unit in units.items()
    }
    figures = "".join(_figure(given, id, name) for name in units)
    html = (
        f"<p>{escape(given.introduction)}</p>\n"
        f'<div class="split">\n{_controls(given, id)}<div>\n'
        '<p class="live" aria-live="polite"></p>\n'
        f"{_summary(given)}{figures}{_sources(given)}</div>\n</div>\n"
    )
    return Section(id, heading, html=html, data=_data(given), script="curves.js", charts=charts)


HEADINGS = {
    "cache_bytes": "Bytes of the cache",
    "decode_seconds": "Time of a decode step",
}


def _controls(given: Curves, id: str) -> str:
    """The sliders and the choice of a device; hidden until the script has made them work."""
    parts = []
    for each in given.sliders:
        at = each.values.index(each.start)
        text = each.texts[at]
        name = f"{id}-{each.name}"
        parts.append(
            f'<div><label for="{name}"><span>{escape(each.label)}</span>'
            f'<output for="{name}">{escape(text)}</output></label>\n'
            f'<input type="range" id="{name}" name="{escape(each.name)}" min="0" '
            f'max="{len(each.values) - 1}" value="{at}" aria-valuetext="{escape(text)}"></div>\n'
        )
    if given.rated:
        options = "".join(
            f'<option value="{at}">{escape(each.name)}</option>'
            for at, each in enumerate(given.rated)
        )
        parts.append(
            f'<div><label for="{id}-device">Device</label>\n'
            f'<select id="{id}-device" name="device">{options}</select></div>\n'
        )
    return (
        '<noscript><p class="aside">Sliders and charts need JavaScript; the tables do not.</p>'
        f'</noscript>\n<form class="controls" hidden>\n{"".join(parts)}'
        '<div><button type="reset">Reset</button></div>\n</form>\n'
    )


def _summary(given: Curves) -> str:
    """The table of all attentions at one context, which is the charts' legend, too."""
    start, first = given.start, given.lines[0]
    memory = int(start["memory"])
    heads = [
        "attention",
        f"cache at {int(start['context']):,} tokens",
        "of the first",
        f"tokens in {readable_bytes(memory)}",
        *(["a decode step"] if given.rated else []),
    ]
    whole = first.cache_bytes(start)
    rows = []
    for at, line in enumerate(given.lines):
        cached = line.cache_bytes(start)
        largest = line.largest_context(memory, start)
        cells = [
            _cell("cache_bytes", at, readable_bytes(cached), value=cached),
            _cell("share", at, f"{cached / whole:.2f}" if whole else ""),
            _cell("largest", at, UNLIMITED if largest is None else f"{largest:,}", value=largest),
        ]
        if given.rated:
            seconds = line.seconds(given.rated[0], start)
            cells.append(_cell("decode_seconds", at, readable_seconds(seconds), value=seconds))
        rows.append(f"<tr>{_legend(at, line.name)}{''.join(cells)}</tr>\n")
    head = "".join(
        f'<th scope="col" data-head="{at}">{escape(each)}</th>' for at, each in enumerate(heads)
    )
    return _framed("Every attention at the chosen sizes", head, rows, name="summary")


def _legend(at: int, name: str) -> str:
    """The first cell of a row: the line as drawn, its name, and a box that shows or hides it."""
    dash = " ".join(map(str, DASHES[style_of(at)])) or "none"
    return (
        f'<th scope="row"><label class="legend"><input type="checkbox" checked data-show="{at}">'
        f'<svg width="36" height="12" aria-hidden="true"><line x1="0" y1="6" x2="36" y2="6" '
        f'stroke-width="3" stroke-dasharray="{dash}" style="stroke: var(--curve-{at % COLOURS})"/>'
        f'</svg><span data-name="{at}">{escape(name)}</span></label></th>'
    )


def _figure(given: Curves, id: str, name: str) -> str:
    """A chart with its table."""
    heading = HEADINGS[name]
    start = given.start
    head = '<th scope="col">tokens</th>' + "".join(
        f'<th scope="col">{escape(line.name)}</th>' for line in given.lines
    )
    rows = []
    for context in given.contexts:
        chosen = {**start, "context": context}
        cells = []
        for at, line in enumerate(given.lines):
            value, text = _value(given, name, line, chosen)
            cells.append(_cell(name, at, text, value=value, context=context))
        rows.append(f'<tr><th scope="row">{context:,}</th>{"".join(cells)}</tr>\n')
    made_for = (
        f" Shaded: beyond the {given.beyond:,} tokens that the model was made for."
        if given.beyond is not None
        else ""
    )
    return (
        f'<figure>\n<figcaption><h3>{heading}</h3><span data-caption="{name}">'
        f"{escape(_caption(given, name))}</span>{made_for}</figcaption>\n"
        f'<div class="chart" '
        f'id="{id}-{name}" role="img" aria-label="Curves: {heading.lower()} against tokens of '
        f'context. The table below has the same figures."></div>\n</figure>\n'
        f"<details><summary>Table: {heading.lower()}</summary>\n"
        f"{_framed(heading, head, rows, name=name)}</details>\n"
    )


def _caption(given: Curves, name: str) -> str:
    """A caption on the dotted lines of a chart and, for times, on the device."""
    at = f"{int(given.start['context']):,} tokens"
    if name == "cache_bytes":
        return f"Dotted: {at}, and {readable_bytes(int(given.start['memory']))} of memory."
    return f"On {given.rated[0].name}. Dotted: {at}."


def _value(given: Curves, name: str, line: Line, chosen: Chosen) -> tuple[Any, str]:
    """A figure of a line, as a number and as text."""
    if name == "cache_bytes":
        cached = line.cache_bytes(chosen)
        return cached, readable_bytes(cached)
    seconds = line.seconds(given.rated[0], chosen)
    return seconds, readable_seconds(seconds)


def _cell(name: str, at: int, text: str, *, value: Any = None, context: int | None = None) -> str:
    """A cell that the script updates: of which figure, line and context; its exact value."""
    where = "" if context is None else f' data-context="{context}"'
    exact = "" if value is None else f' data-value="{value}"'
    return f'<td data-figure="{name}" data-line="{at}"{where}{exact}>{escape(text)}</td>'


def _framed(caption: str, head: str, rows: Iterable[str], *, name: str) -> str:
    return (
        f'<div class="frame" tabindex="0" role="region" aria-label="{escape(caption)}">\n'
        f'<table data-table="{name}"><caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody></table></div>\n"
    )


def _sources(given: Curves) -> str:
    if not given.rated:
        return ""
    rows = [
        (
            each.name,
            f"{each.flops[given.dtype] / 1e12:,.4g}",
            f"{each.memory_bandwidth / 1e9:,.4g}",
            each.source,
        )
        for each in given.rated
    ]
    head = ["device", f"TFLOP/s in {given.dtype}", "GB/s of memory", "source"]
    inside = table("Rates of devices", head, rows)
    return (
        "<details><summary>The devices</summary>\n<p>The time of a layer is the longer of two: its "
        "operations at the device's rate, and the bytes it moves at the device's bandwidth. It is "
        "the least that the attention of a decode step can take; the rest of the model comes on "
        f"top.</p>\n{inside}</details>\n"
    )


def _data(given: Curves) -> dict[str, Any]:
    """The data of the page's script: tables of values for each line and storage, and the
    sliders."""
    values = {each.name: each.values for each in given.sliders}
    shares = sorted({int(m) // int(b) for m in values["memory"] for b in values["batch"]})
    return {
        "lines": [
            {"name": line.name, "stored": line.tables(given.contexts, shares)}
            for line in given.lines
        ],
        "contexts": given.contexts,
        "sliders": [asdict(each) for each in given.sliders],
        "devices": [
            {
                "name": each.name,
                "flops": each.flops[given.dtype],
                "bandwidth": each.memory_bandwidth,
            }
            for each in given.rated
        ],
        "unlimited": UNLIMITED,
    }
