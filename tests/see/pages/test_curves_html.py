"""The section of curves without a browser: its inputs, its tables, its data."""

import json
from dataclasses import replace

import pytest

from planned import HOSTILE, START, attentions, figures, planned
from reading_html import cells_of, elements
from regard.page.readable import readable_bytes, readable_seconds
from regard.see.pages.curves import curves_of_plan
from regard.see.pages.curves_html import curves

pytest.importorskip("bokeh")


@pytest.fixture(scope="module")
def given():
    return curves_of_plan(planned())


@pytest.fixture(scope="module")
def section(given):
    return curves(given)


def inputs(section):
    return {
        each["name"]: each
        for tag, each in elements(section.html)
        if tag == "input"
        if "name" in each
    }


def test_every_size_has_a_native_slider_with_a_label_and_its_value(section):
    assert set(inputs(section)) == START.keys()
    labels = {each.get("for") for tag, each in elements(section.html) if tag == "label"}
    outputs = {each.get("for") for tag, each in elements(section.html) if tag == "output"}
    for each in inputs(section).values():
        assert each["type"] == "range"
        assert each["id"] in labels and each["id"] in outputs
        assert each["aria-valuetext"]


def test_the_sliders_start_at_the_plan(given):
    assert given.start == START


def test_every_chart_has_a_table_with_every_line_and_context(section, given):
    found = cells_of(section.html)
    for name in ("cache_bytes", "decode_seconds"):
        for context in given.contexts:
            chosen = {**START, "context": context}
            for at, layers in enumerate(attentions().values()):
                cached, seconds = figures(layers, chosen)
                text, value = found[name, at, context]
                if name == "cache_bytes":
                    assert (text, value) == (readable_bytes(cached), cached)
                else:
                    assert text == readable_seconds(value)
                    assert value == pytest.approx(seconds, rel=1e-12)


def test_the_first_table_has_the_chosen_context_and_the_memory(section):
    found = cells_of(section.html)
    for at, layers in enumerate(attentions().values()):
        cached, _ = figures(layers, START)
        assert found["cache_bytes", at, None] == (readable_bytes(cached), cached)
        text, largest = found["largest", at, None]
        assert text == f"{largest:,}"
        assert figures(layers, {**START, "context": largest})[0] <= START["memory"]
        assert figures(layers, {**START, "context": largest + 1})[0] > START["memory"]


def test_a_live_line_tells_what_changed(section):
    live = [each for _, each in elements(section.html) if each.get("aria-live")]
    assert [each["aria-live"] for each in live] == ["polite"]


def test_the_data_has_every_figure_of_every_line_and_storage(section, given):
    data = section.data
    json.dumps(data)
    assert data["contexts"] == given.contexts
    for layers, shown in zip(attentions().values(), data["lines"], strict=True):
        for storage, table in shown["stored"].items():
            for at, context in enumerate(given.contexts):
                chosen = {**START, "context": context, "storage": storage, "batch": 1}
                cached, _ = figures(layers, chosen)
                assert table["cache_bytes"][at] == cached


def test_devices_without_a_rate_for_the_dtype_are_left_out(given):
    assert "Tesla T4" in {each.name for each in given.devices}
    assert "Tesla T4" not in {each.name for each in given.rated}


def test_without_a_device_there_are_no_times(given):
    section = curves(replace(given, devices=()))
    assert list(section.charts) == ["curves-cache_bytes"]
    assert "decode" not in section.html


def test_names_are_text(given):
    first, *others = given.lines
    html = curves(replace(given, lines=(replace(first, name=HOSTILE), *others))).html
    assert "<img" not in html and "<b>" not in html
