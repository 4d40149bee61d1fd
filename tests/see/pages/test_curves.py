"""The pages of plans and comparisons, also in a browser: charts and tables are `plan.cost`."""

import json
import re
from dataclasses import asdict, replace
from html import escape

import pytest

from browser import LIGHT, contrasts
from planned import FULL, HOSTILE, MODEL, START, attentions, compared, figures, planned
from regard.cli.app import run
from regard.cli.loading import Loaded
from regard.page.readable import readable_bytes, readable_seconds
from regard.plan.cost import cost_of
from regard.see.pages.curves import (
    CONTEXTS,
    sections_of,
    sections_of_plan,
    write_plan,
    write_result,
)

pytest.importorskip("bokeh")

OF_CURVES = """() => {
  const probe = document.body.appendChild(document.createElement("div"));
  const lights = [...Array(8).keys()].map((at) => `var(--curve-${at})`).concat("var(--paper)")
    .map((name) => { probe.style.color = name; return light(getComputedStyle(probe).color); });
  const paper = lights.pop();
  return lights.map((each) =>
    (Math.max(each, paper) + 0.05) / (Math.min(each, paper) + 0.05));
}""".replace("() => {", f"() => {{\n  const light = {LIGHT};", 1)
COLOURS = """() => Bokeh.documents.map((each) =>
  each.get_model_by_name("figure").renderers[0].glyph.line_color)"""
WIDTH = "document.documentElement.scrollWidth"


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "plan.html"
    write_plan(planned(), path)
    return path.read_text(encoding="utf-8")


def drawn(opened):
    """The page, once its charts are drawn."""
    opened.page.wait_for_function("!document.querySelector('.chart:not([data-drawn])')")
    return opened


def cells(html):
    """The rows of the tables behind the charts, by their captions."""
    return {
        caption: [
            re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
            for row in re.findall("<tr>(.*?)</tr>", body)
        ]
        for caption, body in re.findall(
            r"<caption>(.*?)</caption>.*?<tbody>(.*?)</tbody>", html, re.DOTALL
        )
    }


def test_every_chart_has_a_table_of_costs():
    _, section = sections_of_plan(planned())
    found = cells(section.html)
    cached, seconds = found["Bytes of the cache"], found["Time of a decode step on NVIDIA L4"]
    assert list(section.charts) == ["curves-0", "curves-1"]
    for (tokens, *sizes), (_, *times) in zip(cached, seconds, strict=True):
        at = {**START, "context": int(tokens.replace(",", ""))}
        wanted = [figures(layers, at) for layers in attentions().values()]
        assert sizes == [readable_bytes(nbytes) for nbytes, _ in wanted]
        assert times == [readable_seconds(time) for _, time in wanted]
    assert len(cached) == len({*CONTEXTS, START["context"]})


def test_curves_are_the_tables():
    _, section = sections_of_plan(planned())
    shown = {each.name: each for each in section.charts["curves-0"].renderers}
    for at, layers in enumerate(attentions().values()):
        columns = shown[f"curve{at}"].data_source.data
        found = [figures(layers, {**START, "context": each})[0] for each in columns["x"]]
        assert columns["y"] == found


def test_the_first_table_is_that_of_the_terminal(html):
    heads, rows = planned().table()
    assert all(escape(cell) in html for row in (heads, *rows) for cell in row)


def test_ranks_divide_heads_and_tokens(tmp_path):
    write_plan(planned(tp=3, cp=5), tmp_path / "ranks.html")
    assert "on one rank of tp 3 x cp 5" in (tmp_path / "ranks.html").read_text(encoding="utf-8")
    _, section = sections_of_plan(planned(tp=3, cp=5))
    shipped = next(iter(attentions().values()))
    (_, first, *_), *_ = cells(section.html)["Bytes of the cache"]
    nbytes, _ = figures(shipped, {**START, "context": CONTEXTS[0]}, tp=3, cp=5)
    assert first == readable_bytes(nbytes)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_curves_have_contrast(open_page, html, dark):
    opened, colours = drawn(open_page(html, dark=dark)), []
    for each in opened.page.locator("summary").all():
        each.press("Enter")
    for _ in range(2):
        (worst, which), *_ = contrasts(opened)
        assert worst >= 4.5, which
        assert min(opened.page.evaluate(OF_CURVES)) >= 3  # WCAG 2.2, 1.4.11: of graphics
        colours.append(opened.page.evaluate(COLOURS))
        opened.page.locator("#theme").press("Enter")
    assert colours[0] != colours[1]  # charts have the colours of the theme


def test_a_phone_needs_no_horizontal_scrolling(open_page, html):
    opened = drawn(open_page(html, width=400, height=800))
    for each in opened.page.locator("summary").all():
        each.press("Enter")
    assert opened.page.evaluate(WIDTH) == 400


def test_without_scripts_the_tables_are_there(open_page, html):
    opened = open_page(html, scripts=False)
    opened.page.locator("summary").first.click()
    assert opened.page.locator("details table").first.is_visible()


def test_a_model_named_in_html_is_text(open_page, html):
    opened = drawn(open_page(html))
    assert opened.page.locator("h1").text_content() == f"{HOSTILE}: what each attention costs"
    assert opened.page.locator("img, b").count() == 0
    box = opened.page.locator("#curves-0").bounding_box()
    for share in range(10, 100, 3):
        opened.page.mouse.move(box["x"] + box["width"] * share / 100, box["y"] + 120)


def test_pages_stay_under_2_mb(html, tmp_path):
    assert len(html.encode()) < 1_500_000
    write_result(compared(), tmp_path / "compare.html")
    assert (tmp_path / "compare.html").stat().st_size < 1_500_000


def test_what_the_model_cannot_have_is_told():
    latent = replace(FULL, kv_lora_rank=20, num_kv_heads=8)
    given = planned(replace(MODEL, layers=(latent,)))
    sections = sections_of_plan(given)
    assert [each.id for each in sections] == ["attentions", "curves", "left-out"]
    assert given.left_out
    for name, reason in given.left_out.items():
        assert escape(name) in sections[2].html and escape(reason) in sections[2].html


def test_a_comparison_shows_what_was_measured_and_draws_what_has_a_formula(open_page, tmp_path):
    write_result(compared(), tmp_path / "compare.html")
    opened = drawn(open_page((tmp_path / "compare.html").read_text()))
    picture, measured, missing, caches = opened.page.locator("section").all()
    assert picture.locator("li").count() == 4
    names = measured.locator("tbody th").all_text_contents()
    assert names == ["GQA, as shipped (exact)", "GQA, int8", HOSTILE, "another cache"]
    assert "13.55" in measured.locator("tbody td").all_text_contents()
    assert f"no place for {HOSTILE}" in missing.text_content()
    heads = caches.locator("thead th").all_text_contents()
    assert heads == ["tokens", "GQA, as shipped", *names[1:3]]
    assert opened.page.locator("img, b").count() == 0


def test_the_curves_of_a_comparison_are_the_costs_of_its_layers():
    *_, section = sections_of(compared())
    found = cells(section.html)["Bytes of the cache"]
    for tokens, *shown in found:
        context = int(tokens.replace(",", ""))
        for row, cell in zip(compared().rows, shown, strict=False):
            costs = [cost_of(each, row.storage, context=context) for each in row.layers]
            assert cell == readable_bytes(sum(each.cache_bytes for each in costs))
    assert [tokens for tokens, *_ in found if tokens == "1,000"] == ["1,000"]


def test_a_comparison_without_formulas_has_its_table_alone():
    rows = tuple(replace(row, storage=None) for row in compared().rows)
    assert [each.id for each in sections_of(compared(rows=rows))] == [
        "picture",
        "measured",
        "not-run",
    ]


@pytest.fixture
def command(monkeypatch):
    """`regard compare` whose comparison is `compared()`, without a model."""
    loaded = Loaded(None, None, None, "model")
    monkeypatch.setattr("regard.cli.loading.load_for", lambda path, **options: loaded)
    monkeypatch.setattr("regard.compare.texts_for", lambda tokenizer, **options: None)
    monkeypatch.setattr("regard.compare.compare", lambda model, texts, **options: compared())

    def command(*arguments):
        monkeypatch.setattr("sys.argv", ["regard", "compare", *map(str, arguments)])
        return run()

    return command


def test_compare_writes_a_page(command, tmp_path, capsys):
    path = tmp_path / "compare.html"
    assert command("--html", path) == 0
    assert "written to" in capsys.readouterr().out
    assert escape(HOSTILE) in path.read_text()


def test_compare_prints_only_json_beside_a_page(command, tmp_path, capsys):
    assert command("--html", tmp_path / "compare.html", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    without = {"layers", "storage"}
    assert [set(row) for row in rows] == [asdict(each).keys() - without for each in compared().rows]


@pytest.mark.parametrize("name", ["", "missing/compare.html"])
def test_compare_refuses_a_page_that_cannot_be_written_before_it_starts(
    name, command, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("regard.compare.compare", None)  # it is not reached
    assert command("--html", tmp_path / name) == 2
    assert f"{tmp_path / name} cannot be written" in capsys.readouterr().err
