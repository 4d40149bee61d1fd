"""Charts: both axes logarithmic, ticks in words, every curve told apart; points and their front."""

import pytest

from regard.compare.frontiers import front
from regard.see.pages.charts import (
    COLOURS,
    DASHES,
    MARKERS,
    TICKS,
    curves,
    points,
    style_of,
    tokens,
)

pytest.importorskip("bokeh")

CONTEXTS = [256, 512, 1000, 1024, 4096]


def chart(lines=2, unit="bytes", **options):
    given = {f"line {at}": [each * (at + 1) for each in CONTEXTS] for at in range(lines)}
    return curves(unit, CONTEXTS, given, **options)


def of_type(drawn, name):
    return [each for each in drawn.center if type(each).__name__ == name]


def test_axes_are_logarithmic_with_ticks_at_powers_of_four():
    drawn = chart()
    assert type(drawn.x_scale).__name__ == type(drawn.y_scale).__name__ == "LogScale"
    assert drawn.xaxis[0].ticker.ticks == [256, 1024, 4096]
    assert drawn.xaxis[0].major_label_overrides == {256: "256", 1024: "1K", 4096: "4K"}
    assert drawn.yaxis[0].major_label_overrides[1 << 30] == "1 GiB"
    assert drawn.x_range.start < 256 and drawn.x_range.end > 4096
    assert drawn.y_range.start < 256 and drawn.y_range.end > 2 * 4096


def test_every_line_has_a_curve_points_and_a_name_in_the_legend():
    drawn = chart(11)
    assert [each.name for each in drawn.renderers] == [f"curve{at // 2}" for at in range(22)]
    legend = drawn.below[-1]
    assert [each.label.value for each in legend.items] == [f"line {at}" for at in range(11)]
    assert legend.click_policy == "hide"
    assert drawn.renderers[2].data_source.data["text"][0] == "512 B"


def test_a_value_of_0_has_no_place_on_a_logarithmic_axis():
    drawn = curves("bytes", [1, 4], {"a window": [0, 8]})
    assert drawn.renderers[0].data_source.data["y"][0] != 0


def test_levels_are_dotted_and_inside():
    drawn = chart(levels={"height": 1000, "width": 1 << 40})
    assert {each.location for each in of_type(drawn, "Span")} == {1000, 1 << 40}
    assert drawn.y_range.end > 1 << 40


def test_what_lies_beyond_the_model_is_shaded():
    assert of_type(chart(beyond=2048), "BoxAnnotation")[0].left == 2048
    assert not of_type(chart(), "BoxAnnotation")


@pytest.mark.parametrize("at", range(COLOURS * len(DASHES)))
def test_no_two_curves_look_alike(at):
    looks = {(each % COLOURS, style_of(each)) for each in range(at)}
    assert (at % COLOURS, style_of(at)) not in looks
    assert len(MARKERS) == len(DASHES)


def test_ticks_of_times_are_what_their_texts_say():
    units = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
    for value, text in TICKS["seconds"].items():
        count, unit = text.split()
        assert value == pytest.approx(int(count) * units[unit])


@pytest.mark.parametrize(("context", "text"), [(128, "128"), (2048, "2K"), (3 << 20, "3M")])
def test_tokens(context, text):
    assert tokens(context) == text


def test_points_have_their_numbers_and_the_front_is_of_the_best():
    places = {"small": (1.0, 3.0), "both worse": (2.5, 3.5), "large": (2.0, 1.0)}
    drawn = points(places, front(places))
    shown = {each.name: each.data_source.data for each in drawn.renderers}
    assert shown["best"]["name"] == ["small", "large"] and shown["best"]["number"] == ["1", "3"]
    assert shown["other"]["name"] == ["both worse"]
    assert list(shown["front"]["x"]) == [1.0, 2.0]
