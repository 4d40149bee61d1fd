"""The frames of charts: both axes logarithmic, ticks in words, every curve told apart."""

import pytest

from regard.see.pages.charts import COLOURS, DASHES, MARKERS, TICKS, chart, style_of, tokens

pytest.importorskip("bokeh")

CONTEXTS = [256, 512, 1000, 1024, 4096]


def named(drawn, name):
    return drawn.select(name=name)


def test_axes_are_logarithmic_with_ticks_at_powers_of_four():
    drawn = chart("cache", "bytes", CONTEXTS, 2, None)
    assert type(drawn.x_scale).__name__ == type(drawn.y_scale).__name__ == "LogScale"
    assert drawn.xaxis[0].ticker.ticks == [256, 1024, 4096]
    assert drawn.xaxis[0].major_label_overrides == {256: "256", 1024: "1K", 4096: "4K"}
    assert drawn.yaxis[0].major_label_overrides[1 << 30] == "1 GiB"
    assert drawn.x_range.start < 256 and drawn.x_range.end > 4096


def test_every_line_has_a_curve_and_points_of_one_source():
    drawn = chart("cache", "bytes", CONTEXTS, 11, None)
    assert {each.name for each in drawn.renderers} == {
        f"{kind}{at}" for kind in ("curve", "points") for at in range(11)
    }
    sources = {each.data_source.id for each in drawn.renderers}
    assert len(sources) == 1
    columns = next(iter(drawn.renderers)).data_source.data
    assert list(columns["context"]) == CONTEXTS
    assert {f"line{at}" for at in range(11)} | {f"text{at}" for at in range(11)} < set(columns)


def test_what_lies_beyond_the_model_is_shaded():
    assert named(chart("cache", "bytes", CONTEXTS, 1, 2048), "beyond")[0].left == 2048
    assert not list(named(chart("cache", "bytes", CONTEXTS, 1, None), "beyond"))


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
