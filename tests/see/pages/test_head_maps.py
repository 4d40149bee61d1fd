"""The page of all heads: its numbers are the maps', and everything is reached by keyboard."""

import json
import random
import re
import zlib
from base64 import b64decode
from dataclasses import replace

import pytest
import torch

from regard.page.page import page
from regard.see import AttentionMaps, attention
from regard.see.pages import head_maps

HOSTILE = ("<b onclick=alert(1)>&amp;", "שלום", "🙂\u200d👧", "\n", " ", "</script>", "a'b\"c")
WORDS = (*HOSTILE, " the", " c", "at", " s", "at", " on", " a", " mat", ".", " The")
SHOWN = ("↵", "␣", "the", "c", "at")
NAMES = 76  # pixels beside and above the cells, as in cells.js
LARGEST = 34  # pixels of a cell at most, as in cells.js


def invented(layers=3, heads=2, tokens=WORDS, seed=0):
    """Maps of random scores: some rows nearly all on one key, others spread."""
    length = len(tokens)
    scores = torch.randn(layers, heads, length, length, generator=torch.manual_seed(seed)) * 3
    later = torch.ones(length, length).triu(1).bool()
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    statistic = torch.rand(layers, heads)
    return AttentionMaps(
        weights=weights,
        tokens=tuple(tokens),
        layers=tuple(range(layers)),
        heads=tuple(range(heads)),
        queries=tuple(range(length)),
        keys=tuple(range(length)),
        past=0,
        overview=weights,
        entropy=torch.rand(layers, heads) * 3,
        distance=torch.rand(layers, heads) * 9,
        sink_share=statistic,
        previous_share=statistic / 2,
        self_share=statistic / 4,
        learned_sink=torch.zeros(layers, heads),
        backends=("sdpa",) * layers,
        names=("layer",) * layers,
    )


def html_of(maps):
    return page("Maps", head_maps.sections(maps))


def decoded(data):
    """The weights that the page holds, read without the page's script."""
    queries, keys = data["queries"], data["keys"]
    number = len(data["heads"])
    cells = [(q, k) for k in range(len(keys)) for q in range(len(queries))]
    if data["causal"]:
        cells = [(q, k) for q, k in cells if keys[k] <= queries[q]]
    weights = torch.zeros(len(data["maps"]), number, len(queries), len(keys))
    for layer, text in enumerate(data["maps"]):
        codes = iter(zlib.decompress(b64decode(text)))
        for head in range(number):
            for q, k in cells:
                weights[layer, head, q, k] = next(codes) / data["steps"]
        assert next(codes, None) is None
    return weights


@pytest.mark.parametrize("kind", ["causal", "chosen rows", "bidirectional"])
def test_a_page_holds_the_weights_up_to_half_a_step(kind):
    maps = invented(2, 3)
    if kind == "chosen rows":
        rows, columns = (4, 9, 16), tuple(range(3, 12))
        chosen = maps.weights[:, :, list(rows)][..., list(columns)]
        maps = replace(maps, weights=chosen, queries=rows, keys=columns)
    elif kind == "bidirectional":
        maps = replace(maps, weights=maps.weights.flip(-1))
    data = head_maps.data_of(maps)
    assert data["causal"] == (kind != "bidirectional")
    assert data["steps"] == 255
    assert (decoded(data) - maps.weights).abs().max() <= 0.5 / 255 + 1e-6


def test_steps_are_coarser_where_there_are_more_weights(monkeypatch):
    maps = invented(tokens=["word"] * 64)
    sizes = {}
    for budget in (12_000, 7_000, 5_000):
        monkeypatch.setattr(head_maps, "BUDGET", budget)
        data = head_maps.data_of(maps)
        sizes[data["steps"]] = sum(map(len, data["maps"]))
        assert sizes[data["steps"]] <= budget
        assert f"multiples of 1/{data['steps']}" in html_of(maps)
    assert len(sizes) == 3
    monkeypatch.setattr(head_maps, "BUDGET", 100)
    with pytest.raises(ValueError, match=r"3 layers of 2 heads over 64 tokens.*choose fewer"):
        head_maps.data_of(maps)


def test_weights_that_are_not_finite_are_refused():
    maps = invented()
    maps.weights[0, 1, 5, 2] = torch.nan
    with pytest.raises(ValueError, match="finite"):
        head_maps.data_of(maps)


def test_a_statistic_that_is_not_finite_is_unknown():
    maps = invented()
    maps.previous_share[1, 1] = torch.nan
    (found,) = [s for s in head_maps.data_of(maps)["statistics"] if "before" in s["name"]]
    assert found["values"][1][1] is None
    json.dumps(found, allow_nan=False)


def test_a_learned_sink_has_a_column_where_there_is_one():
    maps = invented()
    assert "learned sink" not in html_of(maps)
    assert "learned sink" in html_of(replace(maps, learned_sink=maps.self_share))


def look_at(opened, maps, row, column):
    """Point at a cell of the map in view, and read the sentence."""
    canvas = opened.page.locator("#heads-map")
    frame = canvas.bounding_box()
    size = min(LARGEST, (frame["width"] - NAMES - 1) / len(maps.keys))
    x, y = NAMES + (column + 0.5) * size, NAMES + (row + 0.5) * size
    canvas.hover(position={"x": x, "y": y})
    opened.page.wait_for_function(
        "tokens => document.querySelector('#map-sentence').textContent.includes(tokens)",
        arg=f"(tokens {maps.queries[row]} and {maps.keys[column]};",
    )
    return opened.page.locator("#map-sentence").text_content()


def said_at(opened, maps, places):
    """The sentences of many cells: the pointer moves by events, each drawn before the next."""
    script = """async ([places, tokens, names, largest]) => {
      const canvas = document.querySelector("#heads-map");
      const frame = canvas.getBoundingClientRect();
      const size = Math.min(largest, (frame.width - names - 1) / tokens);
      const said = [];
      for (const [row, column] of places) {
        const clientX = frame.left + names + (column + 0.5) * size;
        const clientY = frame.top + names + (row + 0.5) * size;
        canvas.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY }));
        await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
        said.push(document.querySelector("#map-sentence").textContent);
      }
      return said;
    }"""
    return opened.page.evaluate(script, [places, len(maps.keys), NAMES, LARGEST])


def weight_of(sentence):
    """The weight that a sentence says; 0 for one that is said to be smaller."""
    said = re.search(r"key '.*': (less than |hidden)?([\d.]*)", sentence)
    return 0.0 if said[1] else float(said[2])


def test_the_page_says_the_weights_of_200_cells(open_page):
    maps = invented()
    opened = open_page(html_of(maps), height=2000)
    cells = random.Random(0)
    worst = 0.0
    for layer in maps.layers:
        for head in maps.heads:
            opened.page.locator("#heads-layer").select_option(str(layer))
            opened.page.locator("#heads-head").select_option(str(head))
            where = f"Layer {layer}, head {head}"
            opened.page.wait_for_function(
                "name => document.querySelector('#heads-title').textContent === name", arg=where
            )
            places = [[cells.randrange(len(WORDS)) for _ in range(2)] for _ in range(34)]
            for (row, column), sentence in zip(places, said_at(opened, maps, places), strict=True):
                assert f"(tokens {row} and {column}; {where.lower()})" in sentence
                true = maps.weights[layer, head, row, column].item()
                worst = max(worst, abs(weight_of(sentence) - true))
                assert ("hidden" in sentence) == (column > row)
    assert 0 < worst <= 0.5 / 255 + 0.0005  # half a step, and the third digit


def stops(opened, most=80):
    """What Tab comes to, in order, by id, class or tag."""
    opened.page.evaluate("document.activeElement.blur()")
    found = []
    for _ in range(most):
        opened.page.keyboard.press("Tab")
        name = opened.page.evaluate(
            """() => {
              const at = document.activeElement;
              return at.id || at.parentElement.id || at.parentElement.className || at.tagName;
            }"""
        )
        if found and name == found[0]:
            break
        found.append(name)
    return found


def test_the_keyboard_alone_reaches_everything(open_page):
    opened = open_page(html_of(invented()))
    found = stops(opened)
    wanted = {
        "theme", "heads-shade", "heads-order", "heads-all", "heads-layer", "heads-head",
        "heads-first", "heads-count", "heads-threshold", "heads-find", "heads-map",
        "tokens queries", "tokens keys", "heads-table",
    }  # fmt: skip
    assert wanted <= set(found)
    assert len(found) < 25, "each group of buttons is one stop"


def spoken(opened, name, text):
    opened.page.wait_for_function(
        "([name, text]) => document.querySelector(name).textContent.includes(text)",
        arg=[name, text],
    )


def test_keys_go_from_head_to_cell_to_token(open_page):
    opened = open_page(html_of(invented()))
    keyboard = opened.page.keyboard
    opened.page.locator("#heads-all button").first.focus()
    spoken(opened, "#heads-spoken", "Layer 0, head 0: entropy")
    keyboard.press("ArrowDown")
    keyboard.press("ArrowRight")
    spoken(opened, "#heads-spoken", "Layer 1, head 1: entropy")
    keyboard.press("Enter")
    spoken(opened, "#map-spoken", "(tokens 16 and 16; layer 1, head 1)")
    assert opened.page.evaluate("document.activeElement.id") == "heads-map"
    for key in ("ArrowUp", "ArrowLeft", "ArrowLeft"):
        keyboard.press(key)
    spoken(opened, "#map-spoken", "query '.' -> key 'mat': ")
    keyboard.press("Home")
    spoken(opened, "#map-spoken", "(tokens 15 and 0; layer 1, head 1)")
    opened.page.locator('.queries [aria-pressed="true"]').focus()
    keyboard.press("ArrowUp")
    spoken(opened, "#map-spoken", "query 'mat' -> key '<b onclick=alert(1)>&amp;': ")
    assert opened.page.evaluate("document.activeElement.textContent") == "mat"


def test_lines_go_from_the_focused_token_to_its_keys(open_page):
    maps = invented()
    opened = open_page(html_of(maps))
    opened.page.locator(".queries button").nth(12).focus()
    spoken(opened, "#map-spoken", "query 'on'")
    expected = (maps.weights[0, 0, 12] * 255).round() / 255
    opacities = [
        float(path.get_attribute("stroke-opacity"))
        for path in opened.page.locator("#heads-lines path").all()
    ]
    right = [max(0.06, weight**0.5) for weight in expected.tolist() if weight > 0]
    assert opacities == pytest.approx(right, abs=6e-4)
    opened.page.locator("#heads-threshold").fill("0.2")
    opened.page.wait_for_function(
        "number => document.querySelectorAll('#heads-lines path').length === number",
        arg=int((expected >= 0.2).sum()),
    )


def test_tokens_are_text_whatever_they_hold(open_page):
    opened = open_page(html_of(invented()))
    said = opened.page.locator(".keys button").all_text_contents()
    assert said == [*HOSTILE[:3], "↵", "␣", *HOSTILE[5:], *(word.strip() for word in WORDS[7:])]
    assert opened.page.locator("section b").count() == 0


def test_search_finds_tokens_also_across_their_borders(open_page):
    opened = open_page(html_of(invented()))
    box = opened.page.locator("#heads-find")
    box.fill("cAt")
    spoken(opened, "#heads-found", "1 of 1")
    spoken(opened, "#map-sentence", "(tokens 8 and 8;")
    box.fill("the")
    spoken(opened, "#heads-found", "1 of 2")
    box.press("Enter")
    spoken(opened, "#heads-found", "2 of 2")
    spoken(opened, "#map-sentence", "(tokens 16 and 16;")
    box.fill("nowhere")
    spoken(opened, "#heads-found", "not in the text")


def test_a_window_of_tokens_moves(open_page):
    tokens = [f"w{at}" for at in range(60)]
    maps = invented(1, 1, tokens)
    opened = open_page(html_of(maps), height=2000)
    opened.page.locator("#heads-count").fill("20")
    opened.page.locator("#heads-first").fill("30")
    spoken(opened, "#map-sentence", "(tokens 49 and 49;")
    keys = opened.page.locator(".keys button").all_text_contents()
    assert keys == tokens[30:50]
    before = opened.page.locator(".keys .rest").text_content()
    true = maps.weights[0, 0, 49, :30].sum().item()
    assert re.fullmatch(r"30 before: \d\.\d\d", before)
    assert float(before.split()[-1]) == pytest.approx(true, abs=0.005 + 30 * 0.5 / 255)
    opened.page.locator("#heads-find").fill("w15")
    spoken(opened, "#map-sentence", "(tokens 15 and 15;")
    assert opened.page.locator("#heads-first-out").text_content() == "5"  # in the middle


def test_chosen_rows_and_columns_keep_their_numbers(open_page):
    maps = invented()
    rows, columns = (4, 9, 16), tuple(range(3, 12))
    some = replace(
        maps, weights=maps.weights[:, :, list(rows)][..., 3:12], queries=rows, keys=columns
    )
    opened = open_page(html_of(some), height=2000)
    spoken(opened, "#map-sentence", "query 'The' -> key 'at': ")
    for row, column in ((0, 1), (0, 4), (2, 8), (1, 6)):
        said = weight_of(look_at(opened, some, row, column))
        assert said == pytest.approx(some.weights[0, 0, row, column].item(), abs=0.0025)
    assert opened.page.locator("#heads-first-out").text_content() == "3"
    opened.page.locator("#heads-find").fill("mat")
    spoken(opened, "#heads-found", "not in the text")  # of these rows and columns


def order_of(opened):
    return opened.page.locator("#heads-all button").all_text_contents()


def test_the_overview_has_a_cell_for_every_head_and_is_sorted_by_a_statistic(open_page):
    maps = invented()
    opened = open_page(html_of(maps))
    assert len(order_of(opened)) == 6
    opened.page.locator("#heads-order").select_option(label="entropy, largest first")
    names = {
        f"{layer}.{head}": maps.entropy[layer, head].item()
        for layer in range(3)
        for head in range(2)
    }
    assert order_of(opened) == sorted(names, key=names.get, reverse=True)
    opened.page.locator("#heads-shade").select_option(label="entropy")
    spoken(opened, "#heads-scale", f"{max(names.values()):.2f} nats")
    colours = opened.page.evaluate(
        "[...document.querySelectorAll('#heads-all button')].map((b) => b.style.backgroundColor)"
    )
    assert len(set(colours)) == 6
    opened.page.locator("#theme").click()
    spoken(opened, "#heads-scale", "nats")


def test_all_heads_can_be_coloured_by_the_chosen_pair(open_page):
    maps = invented()
    opened = open_page(html_of(maps))
    opened.page.locator(".queries button").nth(9).focus()
    opened.page.locator(".keys button").nth(2).focus()
    opened.page.locator("#heads-shade").select_option("pair")
    weights = ((maps.weights[:, :, 9, 2] * 255).round() / 255).flatten()
    spoken(opened, "#heads-scale", f"weight of the chosen pair: {weights.min():.3f}")
    spoken(opened, "#heads-scale", f" {weights.max():.3f}")


def test_the_table_holds_the_statistics_and_sorts(open_page):
    maps = invented()
    opened = open_page(html_of(maps))
    opened.page.locator("#heads-table summary").click()
    rows = opened.page.locator("#heads-table tbody tr")
    assert rows.nth(3).locator("td").nth(1).text_content() == f"{maps.distance[1, 1]:.1f}"
    opened.page.get_by_role("button", name="distance (tokens)").click()
    column = [
        float(text) for text in opened.page.locator("tbody td:nth-child(3)").all_text_contents()
    ]
    assert column == sorted(column, reverse=True)
    assert opened.page.locator('th[aria-sort="descending"]').count() == 1


def test_heads_whose_maps_were_not_asked_for_cannot_be_opened(open_page):
    maps = invented()
    some = replace(maps, weights=maps.weights[1:2, :1], layers=(1,), heads=(0,))
    opened = open_page(html_of(some))
    assert opened.page.locator('#heads-all [aria-disabled="true"]').count() == 5
    opened.page.locator("#heads-all button").nth(5).click(force=True)
    spoken(opened, "#heads-spoken", "its map was not asked for")
    assert opened.page.locator("#heads-title").text_content() == "Layer 1, head 0"
    none = replace(maps, weights=maps.weights[:0, :0], layers=(), heads=())
    opened = open_page(html_of(none))
    assert opened.page.locator("#heads-map").count() == 0
    assert opened.page.locator("#heads-all button").count() == 6


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_it_without_scrolling_aside(open_page, dark):
    opened = open_page(html_of(invented(30, 9)), width=400, dark=dark)
    spoken(opened, "#map-sentence", "(tokens 16 and 16;")
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 400


def test_all_maps_of_a_real_model_fit_in_2_mb(tmp_path):
    import pydoc_data.topics

    import regard.hf

    try:
        model, tokenizer = regard.hf.smollm2()
    except (ImportError, OSError) as error:
        pytest.skip(f"no SmolLM2: {error}")
    text = pydoc_data.topics.topics["with"] + pydoc_data.topics.topics["assignment"]
    ids = tokenizer(text).input_ids[:256]
    maps = attention(
        model, torch.tensor(ids), layers=range(30), names=[tokenizer.decode(i) for i in ids]
    )
    assert maps.weights.shape == (30, 9, 256, 256)
    head_maps.write(maps, tmp_path / "heads.html")
    assert 1_000_000 < (tmp_path / "heads.html").stat().st_size < 2_000_000
    assert head_maps.data_of(maps)["steps"] >= 100
