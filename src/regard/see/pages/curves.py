"""Pages of a plan, a comparison and a frontier: charts, and the tables behind them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from regard.compare.frontiers import Frontier, front
from regard.compare.result import Comparison
from regard.page.page import Section, table, write_page
from regard.page.readable import readable_bytes
from regard.plan.cost import Cost, cost_of
from regard.plan.devices import roofline_seconds
from regard.plan.planning import Plan
from regard.plan.shapes import LayerShape, Storage
from regard.see.pages import charts
from regard.words import counted

CONTEXTS = tuple(1 << power for power in range(8, 21))  # tokens: 256 to 1,048,576
ROOFLINE = (
    "The time of a layer is the longer of two: its operations at the device's rate, and the bytes "
    "it moves at the device's bandwidth. It is the least that the attention of a decode step can "
    "take; the rest of the model comes on top."
)


@dataclass(frozen=True)
class Line:
    """An attention of a model, drawn as one curve: its layers, and how its cache is stored."""

    name: str
    layers: tuple[LayerShape, ...]
    storage: Storage

    def costs(self, **call: Any) -> list[Cost]:
        """The costs of layers that are alike, together; `call` are arguments of `cost_of`."""
        counts = Counter(self.layers).items()
        return [cost_of(layer, self.storage, **call) * count for layer, count in counts]


def write_plan(plan: Plan, path: Path) -> None:
    """Write a page of a plan: its attentions as curves.

    Args:
        plan: from `regard.plan`.
        path: of the HTML file.

    Raises:
        ImportError: if Bokeh is missing.
        OSError: if the file cannot be written.
    """
    write_page(path, f"{plan.model.name}: what each attention costs", sections_of_plan(plan))


def sections_of_plan(plan: Plan) -> list[Section]:
    """The sections of the page of a plan."""
    layers = counted(len(plan.model.layers), "layer")
    ranks = "" if plan.tp == plan.cp == 1 else f", on one rank of tp {plan.tp} x cp {plan.cp}"
    about = (
        f"{layers} of {plan.model.architecture} together{ranks}, in {plan.dtype}; "
        f"{counted(plan.context, 'token')} in {counted(plan.batch, 'row')}"
    )
    attentions = Section("attentions", "Every attention", html=table(about, *plan.table()))
    lines = {row.key: Line(row.attention, row.layers, row.storage) for row in reversed(plan.rows)}
    call = {name: getattr(plan, name) for name in ("batch", "dtype", "tp", "cp")}
    drawn = _figures([*lines.values()][::-1], call, plan)
    sections = [attentions, _curves(drawn, plan.context, plan.memory, plan.model.max_positions)]
    if plan.left_out:
        left_out = table("Other attentions", ["attention", "reason"], plan.left_out.items())
        sections.append(Section("left-out", "Left out", html=left_out))
    return sections


def write_result(result: Comparison | Frontier, path: Path) -> None:
    """Write a page of a comparison or a frontier: what was measured, and curves of the caches.

    Args:
        result: from `regard.compare`.
        path: of the HTML file.

    Raises:
        ImportError: if Bokeh is missing.
        OSError: if the file cannot be written.
    """
    write_page(path, result.title, sections_of(result))


def sections_of(result: Comparison | Frontier) -> list[Section]:
    """The sections of the page. Speeds are measured, and not in the curves."""
    places = {
        row.name: (float(row.cache_bytes_per_token), float(shown))
        for row in result.rows
        if row.cache_bytes_per_token and (shown := result.drawn(row))
    }
    sections = [_picture(places)] if len(places) > 1 else []
    sections.append(Section("measured", "Measured", html=result._repr_html_()))
    missing = [(row.name, row.remark) for row in result.rows if row.remark]
    if missing:
        not_run = table("Attentions that did not run", ["attention", "reason"], missing)
        sections.append(Section("not-run", "Not run", html=not_run))
    if isinstance(result, Comparison):
        lines = [Line(r.name, r.layers, r.storage) for r in result.rows if r.storage is not None]
        if lines:
            drawn = _figures(lines, {"dtype": result.cache_dtype}, None, result.context)
            sections.append(_curves(drawn, result.context, result.memory, None))
    return sections


def _picture(places: Mapping[str, tuple[float, float]]) -> Section:
    """Cache against perplexity; both axes are logarithmic."""
    best = front(dict(places))
    names = "".join(
        f'<li class="best">{escape(name)}</li>' if name in best else f"<li>{escape(name)}</li>"
        for name in places
    )
    html = (
        '<div class="chart" id="picture-points" role="img" aria-label="Perplexity against bytes of '
        'the cache a token; the list below names the points."></div>\n'
        f'<ol class="named">{names}</ol>\n'
        '<p class="aside">Green: no other has both a smaller cache and a lower perplexity.</p>\n'
    )
    drawn = {"picture-points": charts.points(places, best)}
    return Section(
        "picture", "Cache against perplexity", html=html, script="charts.js", charts=drawn
    )


@dataclass(frozen=True)
class _Figure:
    """A chart: its heading, its unit, its contexts and the values of each curve."""

    heading: str
    unit: str
    contexts: Sequence[int]
    lines: Mapping[str, Sequence[float]]
    about: str = ""


def _figures(
    lines: Iterable[Line], call: Mapping[str, Any], plan: Plan | None, context: int = 0
) -> list[_Figure]:
    """Bytes of caches, and times of a decode step on each device of a plan."""
    contexts = sorted({*CONTEXTS, plan.context if plan else context})
    costs = {line.name: [line.costs(context=each, **call) for each in contexts] for line in lines}
    cached = {
        name: [sum(each.cache_bytes for each in own) for own in line]
        for name, line in costs.items()
    }
    found = [_Figure("Bytes of the cache", "bytes", contexts, cached)]
    for device in plan.devices.values() if plan else ():
        rate, gigabytes = device.flops[call["dtype"]] / 1e12, device.memory_bandwidth / 1e9
        rates = f"{rate:,.4g} TFLOP/s in {call['dtype']}, {gigabytes:,.4g} GB/s ({device.source})"
        seconds = {
            name: [
                sum(
                    roofline_seconds(
                        each.visible_decode_flops, each.decode_bytes, device, call["dtype"]
                    )[0]
                    for each in own
                )
                for own in line
            ]
            for name, line in costs.items()
        }
        heading, about = f"Time of a decode step on {device.name}", f"{ROOFLINE} {rates}."
        found.append(_Figure(heading, "seconds", contexts, seconds, about))
    return found


def _curves(figures: Sequence[_Figure], context: int, memory: int, beyond: int | None) -> Section:
    """A section of charts over context lengths, with the table behind each."""
    html, drawn = "", {}
    for number, each in enumerate(figures):
        levels: dict[str, float] = {"height": context}
        dotted = f"Dotted: {context:,} tokens"
        if each.unit == "bytes":
            levels["width"] = memory
            dotted += f", and {readable_bytes(memory)} of memory"
        shaded = "" if beyond is None else f" Shaded: beyond the model's {beyond:,} tokens."
        caption = f"{dotted}.{shaded} {each.about}".strip()
        readable = charts.READABLE[each.unit]
        rows = [
            [f"{tokens:,}", *(readable(values[at]) for values in each.lines.values())]
            for at, tokens in enumerate(each.contexts)
        ]
        html += (
            f"<figure>\n<figcaption><h3>{escape(each.heading)}</h3>{escape(caption)}</figcaption>\n"
            f'<div class="chart" id="curves-{number}" role="img" aria-label="Curves: '
            f"{escape(each.heading.lower())} against tokens of context. The table below has the "
            'same figures."></div>\n</figure>\n'
            f"<details><summary>Table: {escape(each.heading)}</summary>\n"
            f"{table(each.heading, ['tokens', *each.lines], rows)}</details>\n"
        )
        drawn[f"curves-{number}"] = charts.curves(
            each.unit, each.contexts, each.lines, beyond=beyond, levels=levels
        )
    return Section("curves", "Over context lengths", html=html, script="charts.js", charts=drawn)
