"""The frames of charts over context lengths, by Bokeh: both axes logarithmic, a curve a line.

The script of the section fills them in: values, colours of the theme, names.
"""

from collections.abc import Sequence
from typing import Any

from regard.page.readable import readable_bytes

HEIGHT = 340  # pixels
COLOURS = 8  # of curves, in page.css: --curve-0 to --curve-7
DASHES: tuple[list[int], ...] = ([], [7, 4], [2, 3], [9, 3, 2, 3])  # pixels on, off, ...
MARKERS = ("circle", "square", "triangle", "diamond")
MARKER_SIZE, LINE_WIDTH = 6, 2.5  # pixels
NEAREST, FARTHEST = 0.8, 1.25  # how far beyond the first and last context the axis goes
# fmt: off
TICKS: dict[str, dict[Any, str]] = {  # of the vertical axis by what it shows: where, and its text
    "bytes": {1 << power: readable_bytes(1 << power) for power in range(0, 52, 2)},
    "seconds": {
        1e-9: "1 ns", 1e-8: "10 ns", 1e-7: "100 ns", 1e-6: "1 µs", 1e-5: "10 µs", 1e-4: "100 µs",
        1e-3: "1 ms", 1e-2: "10 ms", 1e-1: "100 ms", 1.0: "1 s", 10.0: "10 s", 100.0: "100 s",
    },
}
# fmt: on


def chart(name: str, unit: str, contexts: Sequence[int], lines: int, beyond: int | None) -> Any:
    """A Bokeh figure without values, which the page's script fills in.

    Args:
        name: what it shows, for the label of a point.
        unit: a key of `TICKS`.
        contexts: of the horizontal axis, in order.
        lines: how many there are.
        beyond: the context that the model was made for; what lies beyond is shaded.

    Raises:
        ImportError: if Bokeh is missing.
    """
    from bokeh.models import BoxAnnotation, ColumnDataSource, Range1d, Span
    from bokeh.plotting import figure

    empty = [float("nan")] * len(contexts)
    columns = {f"line{at}": empty for at in range(lines)}
    texts = {f"text{at}": [""] * len(contexts) for at in range(lines)}
    source = ColumnDataSource({"context": list(contexts), **columns, **texts}, name="source")
    drawn = figure(
        name="figure",
        height=HEIGHT,
        sizing_mode="stretch_width",
        x_axis_type="log",
        y_axis_type="log",
        x_range=Range1d(contexts[0] * NEAREST, contexts[-1] * FARTHEST),
        y_range=Range1d(1, 10),
        x_axis_label="tokens of context",
        toolbar_location=None,
        tools=[],
    )
    _set_ticks(drawn, unit, contexts)
    if beyond is not None:
        drawn.add_layout(BoxAnnotation(left=beyond, name="beyond", line_color=None))
    for span, dimension in (("at", "height"), ("memory", "width")):
        drawn.add_layout(
            Span(name=span, dimension=dimension, line_dash="dotted", line_width=2, visible=False)
        )
    for at in range(lines):
        _add_curve(drawn, source, name, at)
    return drawn


def _add_curve(drawn: Any, source: Any, name: str, at: int) -> None:
    from bokeh.models import HoverTool

    given = {"x": "context", "y": f"line{at}", "source": source}
    drawn.line(
        **given,
        line_width=LINE_WIDTH,
        line_dash=DASHES[style_of(at)],
        name=f"curve{at}",
    )
    marker = MARKERS[style_of(at)]
    points = drawn.scatter(**given, size=MARKER_SIZE, marker=marker, name=f"points{at}")
    rows = [("context", "@context{0,0} tokens"), (name, f"@text{at}")]
    drawn.add_tools(HoverTool(renderers=[points], tooltips=rows))


def style_of(at: int) -> int:
    """Which dash and marker a curve has: another one when colours come again.

    Examples:
        >>> from regard.see.pages.charts import COLOURS, style_of
        >>> len({(at % COLOURS, style_of(at)) for at in range(32)})
        32
    """
    return (at + at // COLOURS) % len(DASHES)


def _set_ticks(drawn: Any, unit: str, contexts: Sequence[int]) -> None:
    """Set the ticks of both axes: powers of four, few enough for a phone."""
    powers = [each for each in contexts if each.bit_count() == 1 and each.bit_length() % 2]
    for axis, grid, texts in (
        (drawn.xaxis, drawn.xgrid, {each: tokens(each) for each in powers}),
        (drawn.yaxis, drawn.ygrid, TICKS[unit]),
    ):
        axis.ticker = list(texts)
        axis.major_label_overrides = texts
        grid.ticker = list(texts)


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
