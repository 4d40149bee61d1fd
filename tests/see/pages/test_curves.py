"""The pages of plans and comparisons, in a browser: sliders move curves, tables are `plan.cost`."""

import json
import re
from dataclasses import asdict, replace
from html import escape
from pathlib import Path

import pytest

from browser import LIGHT, contrasts, focused
from planned import FULL, HOSTILE, MODEL, START, attentions, compared, figures, planned
from reading_html import cells_of
from regard.cli import compare as verb
from regard.cli.app import run
from regard.cli.loading import Loaded
from regard.plan.cost import cost_of
from regard.plan.shapes import STORAGES
from regard.see.pages.curves import (
    curves_of_plan,
    sections_of_comparison,
    sections_of_plan,
    write_comparison,
    write_plan,
)

pytest.importorskip("bokeh")

CURVES = """() => Object.fromEntries(Bokeh.documents.map((each) => [
  each.get_model_by_name("figure").y_range.id,
  { ...each.get_model_by_name("source").data },
]))"""
SHOWN = """() => Bokeh.documents.map((each) =>
  each.get_model_by_name("figure").renderers.filter((one) => one.visible).map((one) => one.name))"""
OF_CURVES = """() => {
  const probe = document.body.appendChild(document.createElement("div"));
  const lights = [...Array(8).keys()].map((at) => `var(--curve-${at})`).concat("var(--paper)")
    .map((name) => { probe.style.color = name; return light(getComputedStyle(probe).color); });
  const paper = lights.pop();
  return lights.map((each) =>
    (Math.max(each, paper) + 0.05) / (Math.min(each, paper) + 0.05));
}""".replace("() => {", f"() => {{\n  const light = {LIGHT};", 1)
ALL = 99  # steps: to the end
WIDTH = "document.documentElement.scrollWidth"


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "plan.html"
    write_plan(planned(), path)
    return path.read_text(encoding="utf-8")


@pytest.fixture
def opened(open_page, html):
    return drawn(open_page(html))


def drawn(opened):
    """The page, once its charts are drawn."""
    opened.page.wait_for_function("!document.querySelector('.chart:not([data-drawn])')")
    return opened


def slide(opened, name, steps):
    """Move a slider by so many arrow keys, or to an end."""
    slider = opened.page.locator(f"#curves-{name}")
    slider.focus()
    if abs(steps) == ALL:
        opened.page.keyboard.press("End" if steps > 0 else "Home")
    else:
        for _ in range(abs(steps)):
            opened.page.keyboard.press("ArrowRight" if steps > 0 else "ArrowLeft")


def chosen(opened):
    """The values of the sliders, from what the page shows beside them."""
    found = {}
    for name in START:
        text = opened.page.locator(f"output[for=curves-{name}]").text_content()
        found[name] = text if name in ("storage", "memory") else int(text.replace(",", ""))
    named = re.search(r"\((.+)\)", found["storage"])[1]
    found["storage"] = named if named in STORAGES else "plain"  # which is shown by its dtype
    count, unit = found["memory"].split()
    found["memory"] = int(count) << {"MiB": 20, "GiB": 30, "TiB": 40}[unit]
    return found


def check_figures(opened, device="l4"):
    """Every number of every table is that of `plan.cost`, and the curves are the tables."""
    at_sliders, contexts = (
        chosen(opened),
        [int(each) for each in curves_of_plan(planned()).contexts],
    )
    cells = cells_of(opened.page.locator("main").inner_html())
    by_chart = {tuple(each["line0"]): each for each in opened.page.evaluate(CURVES).values()}
    for at, layers in enumerate(attentions().values()):
        rows = [figures(layers, {**at_sliders, "context": each}, device) for each in contexts]
        for context, (cached, seconds) in zip(contexts, rows, strict=True):
            assert cells["cache_bytes", at, context][1] == cached
            assert cells["decode_seconds", at, context][1] == pytest.approx(seconds, rel=1e-12)
        shown = {tuple(each[f"line{at}"]) for each in by_chart.values()}
        assert tuple(cached for cached, _ in rows) in shown
        assert len(shown) == 2
        cached, seconds = figures(layers, at_sliders, device)
        assert cells["cache_bytes", at, None][1] == cached
        assert cells["decode_seconds", at, None][1] == pytest.approx(seconds, rel=1e-12)
        largest = cells["largest", at, None][1]
        fits = [
            figures(layers, {**at_sliders, "context": each})[0] <= at_sliders["memory"]
            for each in (max(largest, 1), largest + 1)
        ]
        assert fits == [largest > 0, False]
    names = opened.page.locator("tbody [data-name]").all_text_contents()
    assert names == list(attentions())


def test_at_the_start_the_script_writes_what_python_wrote(opened, html):
    assert cells_of(opened.page.locator("main").inner_html()) == cells_of(html)
    assert chosen(opened) == START
    check_figures(opened)


def test_ranks_divide_heads_and_tokens_in_the_browser_too(open_page, tmp_path):
    write_plan(planned(tp=3, cp=5), tmp_path / "ranks.html")
    html = (tmp_path / "ranks.html").read_text(encoding="utf-8")
    opened = drawn(open_page(html))
    assert cells_of(opened.page.locator("main").inner_html()) == cells_of(html)
    assert "on one rank of tp 3 x cp 5" in html


@pytest.mark.parametrize(
    "steps",
    [
        {"batch": 4},
        {"context": -2},
        {"storage": -1},
        {"storage": -2, "batch": 7, "context": 5},
        {"memory": -9, "batch": ALL},
        {"storage": -1, "memory": 2},
        {"context": ALL, "batch": ALL},
        {
            "context": -ALL,
            "batch": -ALL,
            "storage": -ALL,
            "memory": -ALL,
        },
    ],
    ids=str,
)
def test_sliders_move_curves_and_tables(opened, steps):
    before = opened.page.evaluate(CURVES)
    for name, count in steps.items():
        slide(opened, name, count)
    assert chosen(opened) != START
    check_figures(opened)
    if steps.keys() - {"context", "memory"}:
        assert opened.page.evaluate(CURVES) != before


def test_another_device_has_other_times(opened):
    opened.page.locator("#curves-device").select_option(label="NVIDIA H100")
    check_figures(opened, "h100")
    assert "On NVIDIA H100." in opened.page.locator("[data-caption=decode_seconds]").text_content()


def test_reset_is_where_it_began(opened, html):
    for name in START:
        slide(opened, name, 1)
    opened.page.locator("button[type=reset]").press("Enter")
    assert chosen(opened) == START
    assert cells_of(opened.page.locator("main").inner_html()) == cells_of(html)


def test_the_live_line_says_what_changed(opened):
    live = opened.page.locator(".live")
    slide(opened, "batch", -1)
    told = "Batch, rows: 1. Cache at 3,000 tokens: "
    opened.page.wait_for_function(
        "each => each.textContent.startsWith('Batch')", arg=live.element_handle()
    )
    text = live.text_content()
    assert text.startswith(told)
    assert "with GQA-4, as shipped" in text and "(the least)" in text
    assert "Largest context in 256 MiB: " in text


def test_the_keyboard_alone_reaches_and_works_everything(opened):
    reached = []
    opened.page.keyboard.press("Tab")
    while (now := focused(opened)) not in reached:
        reached.append(now)
        if now.startswith("summary"):
            opened.page.keyboard.press("Enter")  # opens it, so that the next stop is inside
        opened.page.keyboard.press("Tab")
        if opened.page.evaluate("document.activeElement === document.body"):
            break
    wanted = {f"input curves-{name}" for name in START} | {"button theme", "button Reset"}
    wanted |= {"select curves-device"} | {f"input {at}" for at in range(8)}
    wanted |= {f"summary Table: {each}" for each in ("bytes of the cache", "time of a decode step")}
    wanted |= {"div Bytes of the cache", "div Time of a decode step"}
    assert wanted <= set(reached), reached
    assert opened.page.locator("details:not([open])").count() == 0
    assert not {each for each in reached if each.startswith(("canvas", "div curves"))}


def test_focus_is_seen(opened):
    for name in ("#curves-batch", "#theme", "summary >> nth=0", "[data-show='1']"):
        opened.page.locator(name).focus()
        opened.page.keyboard.press("Shift+Tab")
        opened.page.keyboard.press("Tab")
        width = opened.page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
        assert width == "3px", name


def test_a_box_hides_a_line_in_both_charts(opened):
    opened.page.locator("[data-show='1']").focus()
    opened.page.keyboard.press("Space")
    for names in opened.page.evaluate(SHOWN):
        assert "curve0" in names and not {"curve1", "points1"} & set(names)
    opened.page.keyboard.press("Space")
    assert all("curve1" in names for names in opened.page.evaluate(SHOWN))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_curves_have_contrast(open_page, html, dark):
    opened = drawn(open_page(html, dark=dark))
    for each in opened.page.locator("summary").all():
        each.press("Enter")
    for _ in range(2):
        (worst, which), *_ = contrasts(opened)
        assert worst >= 4.5, which
        assert min(opened.page.evaluate(OF_CURVES)) >= 3  # WCAG 2.2, 1.4.11: of graphics
        opened.page.locator("#theme").press("Enter")


def test_a_phone_needs_no_horizontal_scrolling(open_page, html):
    opened = drawn(open_page(html, width=400, height=800))
    for each in opened.page.locator("summary").all():
        each.press("Enter")
    assert opened.page.evaluate(WIDTH) == 400
    slide(opened, "batch", ALL)
    assert opened.page.evaluate(WIDTH) == 400
    summary = opened.page.locator("[data-table=summary]")
    assert summary.evaluate("each => each.scrollWidth <= each.parentElement.clientWidth")


def test_without_scripts_the_tables_are_there(open_page, html):
    opened = open_page(html, scripts=False)
    assert opened.page.locator("form").is_hidden()
    assert opened.page.locator("noscript p").is_visible()
    opened.page.locator("summary").first.click()
    assert opened.page.locator("[data-table=cache_bytes]").is_visible()


def test_a_model_named_in_html_is_text(opened):
    assert opened.page.locator("h1").text_content() == f"{HOSTILE}: what each attention costs"
    assert opened.page.locator("img, b").count() == 0
    box = opened.page.locator("#curves-cache_bytes").bounding_box()
    for share in range(10, 100, 3):
        opened.page.mouse.move(box["x"] + box["width"] * share / 100, box["y"] + 120)


def test_pages_stay_under_2_mb(html, tmp_path):
    assert len(html.encode()) < 1_500_000
    write_comparison(compared(), tmp_path / "compare.html")
    assert (tmp_path / "compare.html").stat().st_size < 1_500_000


def test_a_model_whose_layers_differ_has_lines():
    wider = replace(FULL, num_heads=16, num_kv_heads=8)
    found = curves_of_plan(planned(replace(MODEL, layers=(FULL, wider))))
    assert {each.name for each in found.sliders} == START.keys()
    assert len(found.lines) > 3


def test_a_plan_of_one_attention_has_its_line_alone():
    found = curves_of_plan(planned(attentions=["mqa"]))
    assert [each.name for each in found.lines] == ["MQA"]


def test_what_the_model_cannot_have_is_told():
    latent = replace(FULL, kv_lora_rank=20, num_kv_heads=8)
    given = planned(replace(MODEL, layers=(latent,)))
    sections = sections_of_plan(given)
    assert [each.id for each in sections] == ["curves", "left-out"]
    assert given.left_out
    for name, reason in given.left_out.items():
        assert escape(name) in sections[1].html and escape(reason) in sections[1].html


def test_a_comparison_shows_what_was_measured_and_draws_what_has_a_formula(open_page, tmp_path):
    write_comparison(compared(), tmp_path / "compare.html")
    opened = drawn(open_page((tmp_path / "compare.html").read_text()))
    picture, measured, missing, caches = opened.page.locator("section").all()
    assert picture.locator("circle").count() == picture.locator("li").count() == 4
    names = measured.locator("tbody th").all_text_contents()
    assert names == ["GQA, as shipped (exact)", "GQA, int8", HOSTILE, "another cache"]
    assert "13.55" in measured.locator("tbody td").all_text_contents()
    assert f"no place for {HOSTILE}" in missing.text_content()
    assert caches.locator("tbody [data-name]").all_text_contents() == [
        "GQA, as shipped",
        *names[1:3],
    ]
    assert opened.page.locator("img, b").count() == 0


def test_the_curves_of_a_comparison_are_the_costs_of_its_layers(open_page, tmp_path):
    write_comparison(compared(), tmp_path / "compare.html")
    opened = drawn(open_page((tmp_path / "compare.html").read_text()))
    slide(opened, "batch", 2)
    cells = cells_of(opened.page.locator("main").inner_html())
    for at, row in enumerate(compared().rows[:3]):
        for context in (256, 1000, 1 << 20):
            costs = [cost_of(each, row.storage, context=context, batch=4) for each in row.layers]
            assert cells["cache_bytes", at, context][1] == sum(each.cache_bytes for each in costs)


def test_a_comparison_without_formulas_has_its_table_alone():
    rows = tuple(replace(row, storage=None) for row in compared().rows)
    assert [each.id for each in sections_of_comparison(compared(rows=rows))] == [
        "picture",
        "measured",
        "not-run",
    ]


@pytest.fixture
def command(monkeypatch):
    """`regard compare` whose comparison is `compared()`, without a model."""
    monkeypatch.setattr(verb, "fetch_smollm2", lambda: Path("model"))
    monkeypatch.setattr(verb, "load_for", lambda path, **options: Loaded(None, None, None))
    monkeypatch.setattr(verb, "texts_for", lambda tokenizer, **options: None)
    monkeypatch.setattr(verb, "compare", lambda model, texts, **options: compared())

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
    monkeypatch.setattr(verb, "compare", None)  # it is not reached
    assert command("--html", tmp_path / name) == 2
    assert f"{tmp_path / name} cannot be written" in capsys.readouterr().err
