"""The page of a mask: every cell says what Mask.explain says, also with rules switched off."""

import random
import re

import pytest
import torch

from regard.masks import (
    EVERYTHING,
    Causal,
    Chunked,
    Dense,
    Documents,
    Nothing,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
    Where,
)
from regard.page.page import page
from regard.see.pages import mask_cells

NAMES = 34  # pixels beside and above the cells, as in mask_cells.js
LARGEST = 34  # pixels of a cell at most, as in cells.js
HERE = Span(3, 10, 0, 10)  # seven queries after three cached tokens
IDS = Documents(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2]]))
KEEP = torch.rand(2, 3, 7, 10, generator=torch.manual_seed(0)) < 0.5


def odd(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 2 == 1


MASKS = {
    "one rule": Causal(),
    "intersection": Causal() & SlidingWindow(3) & IDS & Padding.from_lengths([8]),
    "union": Causal() & SlidingWindow(2) | Prefix(3),
    "nested": (Causal() | Prefix(6)) & ~Chunked(4) & ~(Causal() & SlidingWindow(2)),
    "complement": ~(~Causal() | SlidingWindow(4)),
    "nothing": Nothing() | Chunked(3),
    "function": Where(odd) & Causal(),
    "everything": EVERYTHING,
    "twice": Causal() & ~SlidingWindow(2) | SlidingWindow(2) & Chunked(5),
}
EVERY_SENTENCE = """async () => {
  const canvas = document.querySelector("#mask-cells");
  const sentence = document.querySelector("#mask-sentence");
  const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
  const said = [];
  for (let at = 0; at < 50; at += 1) press("ArrowUp");
  for (let row = 0; row < ROWS; row += 1) {
    press("Home");
    said.push(sentence.textContent);
    for (let column = 1; column < COLUMNS; column += 1) {
      press("ArrowRight");
      said.push(sentence.textContent);
    }
    press("ArrowDown");
  }
  return said;
}"""


def html_of(mask, span=HERE, **place):
    return page(repr(mask), mask_cells.sections(mask, span, **place))


def sentences(opened, span=HERE):
    """What the page says of every cell, reached by the arrow keys."""
    opened.page.wait_for_function("() => document.querySelector('#mask-sentence').textContent")
    script = EVERY_SENTENCE.replace("ROWS", str(span.num_queries))
    return opened.page.evaluate(script.replace("COLUMNS", str(span.num_keys)))


def explained(mask, span=HERE, b=0, h=0):
    queries = range(span.q_start, span.q_stop)
    keys = range(span.kv_start, span.kv_stop)
    return [mask.explain(b, h, q, k) for q in queries for k in keys]


def without(mask, hidden):
    """The rules that stay when those of this code are switched off."""
    parts = getattr(mask, "parts", None) or [mask]
    kept = [part for part in parts if repr(part) != hidden]
    combined = kept[0]
    for part in kept[1:]:
        combined = combined & part
    return combined


@pytest.mark.parametrize("name", MASKS)
def test_every_cell_says_what_explain_says(open_page, name):
    opened = open_page(html_of(MASKS[name]))
    assert sentences(opened) == explained(MASKS[name])
    assert opened.page.locator("#mask-code code").text_content() == repr(MASKS[name])
    assert opened.page.locator("h1").text_content() == repr(MASKS[name])


def test_a_mask_with_batches_and_heads_is_drawn_for_one(open_page):
    mask = Dense(KEEP, place=HERE)
    opened = open_page(html_of(mask, b=1, h=2))
    assert sentences(opened) == explained(mask, b=1, h=2)
    assert "batch row 1 and head 2" in opened.page.locator("main").text_content()


def test_keys_that_do_not_begin_at_0_keep_their_slots(open_page):
    span = Span(40, 45, 37, 45)
    opened = open_page(html_of(Causal() & SlidingWindow(3), span))
    assert sentences(opened, span) == explained(Causal() & SlidingWindow(3), span)
    summary = opened.page.locator("#mask-code").text_content()
    assert summary.endswith(": 15 of 40 cells visible; no query is fully masked.")


@pytest.mark.parametrize("which", range(4))
def test_a_rule_that_is_switched_off_hides_nothing(open_page, which):
    mask = MASKS["intersection"]
    opened = open_page(html_of(mask))
    box = opened.page.locator("#mask-rules input").nth(which)
    box.focus()
    opened.page.keyboard.press("Space")
    rest = without(mask, repr(mask.parts[which]))
    assert sentences(opened) == explained(rest)
    visible = int(rest.dense(HERE).sum())
    summary = opened.page.locator("#mask-code").text_content()
    assert summary.startswith(f"{rest!r}: {visible} of 70 cells visible;")
    opened.page.keyboard.press("Space")
    assert sentences(opened) == explained(mask)


def test_rules_are_switched_off_inside_a_combination(open_page):
    opened = open_page(html_of(MASKS["nested"]))
    opened.page.get_by_label("Chunked(size=4)").uncheck()
    opened.page.get_by_label("Prefix(lengths=6)").uncheck()
    rest = Causal() & ~(Causal() & SlidingWindow(2))
    assert opened.page.locator("#mask-code code").text_content() == repr(rest)
    assert sentences(opened) == explained(rest)


@pytest.mark.parametrize("name", ["one rule", "intersection", "nested"])
def test_without_any_rule_every_key_is_visible(open_page, name):
    opened = open_page(html_of(MASKS[name]))
    for box in opened.page.locator("#mask-rules input").all():
        box.uncheck()
    said = sentences(opened)
    assert all("may attend to" in each and "no rule is switched on" in each for each in said)
    assert "70 of 70 cells visible" in opened.page.locator("#mask-code").text_content()


def test_fully_masked_queries_are_counted(open_page):
    opened = open_page(html_of(Chunked(4) & ~Chunked(8)))
    assert "7 of 7 queries fully masked" in opened.page.locator("#mask-code").text_content()


def test_the_pointer_and_a_live_line_say_the_same(open_page):
    mask, span = Causal(), Span(0, 12, 0, 12)
    opened = open_page(html_of(mask, span), height=1500)
    canvas = opened.page.locator("#mask-cells")
    for row, column in ((0, 0), (11, 3), (4, 9)):
        place = {"x": NAMES + (column + 0.5) * LARGEST, "y": NAMES + (row + 0.5) * LARGEST}
        canvas.hover(position=place)
        opened.page.wait_for_function(
            "said => document.querySelector('#mask-spoken').textContent === said",
            arg=mask.explain(0, 0, row, column),
        )
    assert opened.page.locator("#mask-spoken").get_attribute("aria-live") == "polite"


def test_the_keyboard_alone_reaches_the_rules_the_cells_and_the_table(open_page):
    opened = open_page(html_of(Causal() & SlidingWindow(3)))
    opened.page.wait_for_function("() => document.querySelector('#mask-sentence').textContent")
    found = []
    for _ in range(5):
        opened.page.keyboard.press("Tab")
        found.append(opened.page.evaluate("document.activeElement.tagName"))
    assert found == ["BUTTON", "INPUT", "INPUT", "CANVAS", "SUMMARY"]


def test_colours_of_cells_tell_the_rule_that_hides_them(open_page):
    opened = open_page(html_of(Causal() & SlidingWindow(3), Span(0, 12, 0, 12)), height=1500)
    opened.page.wait_for_function("() => document.querySelector('#mask-sentence').textContent")
    pixel = """([x, y]) => {
      const canvas = document.querySelector("#mask-cells");
      const ratio = canvas.width / canvas.clientWidth;
      return [...canvas.getContext("2d").getImageData(x * ratio, y * ratio, 1, 1).data].slice(0, 3);
    }"""

    def colour(row, column):
        place = [NAMES + (column + 0.3) * LARGEST, NAMES + (row + 0.3) * LARGEST]
        return opened.page.evaluate(pixel, place)

    swatches = [
        [int(part) for part in each.split("(")[1].rstrip(")").split(", ")]
        for each in opened.page.evaluate(
            "[...document.querySelectorAll('.rules i')]"
            ".map((each) => getComputedStyle(each).backgroundColor)"
        )
    ]
    assert colour(2, 9) == swatches[0]
    assert colour(9, 2) == swatches[1]
    assert colour(5, 4) not in swatches
    opened.page.locator("#theme").click()
    assert colour(2, 9) != swatches[0]


def test_the_table_holds_the_visible_keys_of_each_query():
    html = html_of(Causal() & SlidingWindow(3) | Prefix(1), Span(0, 6, 0, 6))
    cells = re.findall(r"<t[hd][^>]*>([\d, -]+)</t[hd]>", html)
    assert cells[:3] == ["0", "1", "0"]
    assert cells[-3:] == ["5", "4", "0, 3-5"]


def test_a_page_of_128_by_128_is_small_and_too_many_cells_are_refused(tmp_path):
    file = tmp_path / "mask.html"
    span = Span(0, 128, 0, 128)
    ids = Documents(torch.randint(9, (1, 128), generator=torch.manual_seed(0)).sort().values)
    mask_cells.write(Causal() & SlidingWindow(32) & ids & ~Chunked(50), span, file)
    assert file.stat().st_size < 200_000
    with pytest.raises(ValueError, match=r"262,144 cells, got 513 queries by 512 keys; give fewer"):
        mask_cells.write(Causal(), Span(0, 513, 0, 512), file)


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_it_without_scrolling_aside(open_page, dark):
    opened = open_page(html_of(MASKS["intersection"], Span(0, 10, 0, 10)), width=400, dark=dark)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 400


def test_random_combinations_say_what_explain_says(open_page):
    draw = random.Random(0)
    rules = [Causal(), SlidingWindow(3), Prefix(2), Chunked(3), IDS, Padding.from_lengths([7])]
    for _ in range(6):
        mask = draw.choice(rules)
        for _ in range(draw.randrange(1, 5)):
            other = draw.choice(rules)
            other = ~other if draw.random() < 0.3 else other
            mask = mask & other if draw.random() < 0.5 else mask | other
            mask = ~mask if draw.random() < 0.2 else mask
        opened = open_page(html_of(mask))
        assert sentences(opened) == explained(mask), repr(mask)
