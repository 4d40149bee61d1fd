"""Charts of pages, by Bokeh. The section's script gives them the colours of the page's theme."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from regard.page.readable import readable_bytes, readable_seconds

HEIGHT, LEGEND = 340, 24  # pixels of a chart, and of two names in the legend below it
DASHES: tuple[list[int], ...] = ([], [7, 4], [2, 3], [9, 3, 2, 3])  # pixels on, off, ...
MARKERS = ("circle", "square", "triangle", "diamond")
COLOURS = 8  # of curves, in page.css: --curve-0 to --curve-7
BEYOND = 1.25  # how far beyond the first and last value an axis goes
READABLE: dict[str, Callable[[Any], str]] = {"bytes": readable_bytes, "seconds": readable_seconds}
# fmt: off
TICKS: dict[str, dict[Any, str]] = {  # of the vertical axis by what it shows: where, and its text
    "bytes": {1 << power: readable_bytes(1 << power) for power in range(0, 52, 2)},
    "seconds": {
        1e-9: "1 ns", 1e-8: "10 ns", 1e-7: "100 ns", 1e-6: "1 µs", 1e-5: "10 µs", 1e-4: "100 µs",
        1e-3: "1 ms", 1e-2: "10 ms", 1e-1: "100 ms", 1.0: "1 s", 10.0: "10 s", 100.0: "100 s",
    },
}
# fmt: on


def curves(
    unit: str,
    contexts: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    *,
    beyond: int | None = None,
    levels: Mapping[str, float] | None = None,
) -> Any:
    """A Bokeh figure of curves over context lengths, both axes logarithmic.

    A click on a name in the legend hides a curve.

    Args:
        unit: a key of `TICKS`.
        contexts: of the horizontal axis, in order.
        lines: the values of each curve, by its name.
        beyond: the context that the model was made for; what lies beyond is shaded.
        levels: dotted lines: at a `"height"` (a context) or a `"width"` (a value).

    Raises:
        ImportError: if Bokeh is missing.
    """
    from bokeh.models import BoxAnnotation, Range1d, Span

    drawn = _figure(HEIGHT + LEGEND * -(-len(lines) // 2), "tokens of context")
    levels = levels or {}
    values = [each for line in lines.values() for each in line if each > 0]
    ends = [*values, levels["width"]] if "width" in levels else values
    drawn.x_range = Range1d(contexts[0] / BEYOND, contexts[-1] * BEYOND)
    drawn.y_range = Range1d(min(ends, default=1) / BEYOND, max(ends, default=1) * BEYOND)
    powers = [each for each in contexts if each.bit_count() == 1 and each.bit_length() % 2]
    _set_ticks(drawn.xaxis, drawn.xgrid, {each: tokens(each) for each in powers})
    _set_ticks(drawn.yaxis, drawn.ygrid, TICKS[unit])
    if beyond is not None:
        drawn.add_layout(BoxAnnotation(left=beyond, line_color=None))
    for dimension, level in levels.items():
        dotted = Span(location=level, dimension=dimension, line_dash="dotted", line_width=2)
        drawn.add_layout(dotted)
    for at, (name, line) in enumerate(lines.items()):
        shown = [each if each > 0 else float("nan") for each in line]
        data: dict[str, list[Any]] = {
            "x": list(contexts),
            "y": shown,
            "text": [READABLE[unit](each) for each in line],
        }
        _add_curve(drawn, at, name, data)
    drawn.add_layout(drawn.legend[0], "below")
    drawn.legend[0].update(click_policy="hide", ncols=2, border_line_color=None)
    return drawn


def points(places: Mapping[str, tuple[float, float]], best: Sequence[str]) -> Any:
    """A Bokeh figure of cache bytes against perplexity, a point with its number for each name.

    Args:
        places: bytes and perplexity, by name.
        best: the names on the Pareto front, from the fewest bytes.

    Raises:
        ImportError: if Bokeh is missing.
    """
    from bokeh.models import HoverTool, NumeralTickFormatter

    drawn = _figure(HEIGHT, "cache, bytes a token")
    drawn.yaxis.axis_label = "perplexity"
    drawn.xaxis.formatter = drawn.yaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    front = [places[name] for name in best]
    drawn.step(*zip(*front, strict=True), mode="after", line_width=2, name="front")
    numbered = list(enumerate(places.items(), 1))
    for kind in ("best", "other"):
        some = [each for each in numbered if (each[1][0] in best) == (kind == "best")]
        data = {
            "x": [x for _, (_, (x, _)) in some],
            "y": [y for _, (_, (_, y)) in some],
            "name": [name for _, (name, _) in some],
            "number": [str(number) for number, _ in some],
        }
        drawn.text("x", "y", "number", source=data, name=kind, y_offset=-8, text_align="center")
        shown = drawn.scatter("x", "y", source=data, size=9, name=kind)
        drawn.add_tools(HoverTool(renderers=[shown], tooltips=[("", "@name")]))
    return drawn


def _figure(height: int, across: str) -> Any:
    from bokeh.plotting import figure

    return figure(
        name="figure",
        height=height,
        sizing_mode="stretch_width",
        x_axis_type="log",
        y_axis_type="log",
        x_axis_label=across,
        toolbar_location=None,
        tools=[],
    )


def _add_curve(drawn: Any, at: int, name: str, data: dict[str, list[Any]]) -> None:
    from bokeh.models import ColumnDataSource, HoverTool

    source, kind = ColumnDataSource(data), style_of(at)
    look = {"source": source, "name": f"curve{at}", "legend_label": name}
    drawn.line("x", "y", line_width=2.5, line_dash=DASHES[kind], **look)
    shown = drawn.scatter("x", "y", size=6, marker=MARKERS[kind], **look)
    rows = [("context", "@x{0,0} tokens"), ("", "@text")]
    drawn.add_tools(HoverTool(renderers=[shown], tooltips=rows))


def style_of(at: int) -> int:
    """The number of a curve's dash and marker: another one when colours come again.

    Examples:
        >>> from regard.see.pages.charts import COLOURS, style_of
        >>> len({(at % COLOURS, style_of(at)) for at in range(32)})
        32
    """
    return (at + at // COLOURS) % len(DASHES)


def _set_ticks(axis: Any, grid: Any, texts: Mapping[Any, str]) -> None:
    axis.ticker = grid.ticker = list(texts)
    axis.major_label_overrides = dict(texts)


def tokens(context: int) -> str:
    """A power of two as readers of context lengths write it.

    Examples:
        >>> from regard.see.pages.charts import tokens
        >>> [tokens(each) for each in (256, 4096, 1 << 20)]
        ['256', '4K', '1M']
    """
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if context >= unit:
            return f"{context // unit}{name}"
    return str(context)
