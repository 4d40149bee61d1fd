"""The frame of every page: nothing runs or loads but what the page brought."""

import json
import re
from html.parser import HTMLParser

import pytest

from browser import contrasts
from regard.page import page as module
from regard.page.page import Section, json_in_html, page, table, write_page

HOSTILE = "</title></script><img src=x onerror=alert(1)><script>alert(2)</script>&amp;\u2028'\""


class Elements(HTMLParser):
    """Every element with its attributes, and the text outside scripts and styles."""

    def __init__(self, html):
        super().__init__()
        self.found, self.inside, self.text = [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_endtag(self, tag):
        if tag in self.inside:
            while self.inside.pop() != tag:
                pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self.inside[-1:]):
            self.text += data


def sample(**given):
    html = table("Sizes", ["layer", HOSTILE], [[HOSTILE, "<b>8</b>"]])
    return Section("sizes", HOSTILE, html=html, **given)


def test_names_with_html_in_them_are_text():
    elements = Elements(page(HOSTILE, [sample()]))
    assert not {"img", "b"} & {tag for tag, _ in elements.found}
    assert elements.text.count(HOSTILE) == 5  # title, h1, h2, a head, a row


def test_nothing_in_a_page_leads_outside():
    html = page("Sizes", [sample(data={"name": HOSTILE}, script="charts.js")])
    for _, attributes in Elements(html).found:
        assert not {"src", "href", "srcset", "action"} & attributes.keys()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)[1]
    assert policy.startswith("default-src 'none'; base-uri 'none'; form-action 'none'")
    assert "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_data_survives_inside_a_script_element():
    data = {"name": HOSTILE, "counts": [1, 2**53 - 1], "deep": {"share": 0.1}}
    text = json_in_html(data)
    assert json.loads(text) == data
    assert not set("<>&\u2028\u2029") & set(text)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_refused(number):
    with pytest.raises(ValueError, match="JSON"):
        json_in_html({"number": number})


def test_two_sections_of_one_id_are_refused():
    with pytest.raises(ValueError, match="sizes, sizes"):
        page("Sizes", [sample(), sample()])


def test_a_name_with_stray_bytes_can_be_written(tmp_path):
    name = b"\xff.gguf".decode(errors="surrogateescape")
    write_page(tmp_path / "page.html", name, [Section("sizes", name)])
    assert "<h1>?.gguf</h1>" in (tmp_path / "page.html").read_text()


def test_a_missing_bokeh_says_how_to_install_it(monkeypatch):
    def missing(name, fromlist):
        raise ImportError(name)

    monkeypatch.setattr(module, "__import__", missing, raising=False)
    with pytest.raises(ImportError, match=r"pip install 'regard\[page\]'"):
        page("Sizes", [sample(script="charts.js", charts={"bytes": None})])


def test_a_page_without_charts_is_small_and_one_with_them_stays_under_2_mb():
    pytest.importorskip("bokeh")
    from bokeh.plotting import figure

    assert len(page("Sizes", [sample()]).encode()) < 20_000
    section = sample(script="charts.js", charts={"bytes": figure()})
    assert 1_000_000 < len(page("Sizes", [section]).encode()) < 1_500_000


def test_hostile_names_run_nothing_in_a_browser(open_page):
    opened = open_page(page(HOSTILE, [sample()]))
    assert opened.page.title().split() == HOSTILE.split()
    assert opened.page.locator("h1").text_content() == HOSTILE
    assert opened.page.locator("img").count() == 0


def test_a_script_that_the_page_did_not_bring_is_refused_by_the_browser(open_page):
    section = Section("sizes", "Sizes", html="<script>document.title = 'taken'</script>")
    opened = open_page(page("Sizes", [section]))
    assert opened.page.title() == "Sizes"
    assert "Content Security Policy" in opened.errors.pop()


def test_a_request_is_noticed(open_page):
    html = page("Sizes", [Section("a", "A")]).replace("img-src data:", "img-src *")
    opened = open_page(html.replace("</h1>", "</h1><img src='http://example.invalid/a.png'>"))
    assert opened.requests.pop() == "http://example.invalid/a.png"
    opened.errors.clear()  # the browser complains that it did not load


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_and_a_button_changes_the_theme(open_page, dark):
    opened = open_page(page("Sizes", [sample()]), dark=dark)
    for _ in range(2):
        (worst, which), *_ = contrasts(opened)
        assert worst >= 4.5, which
        before = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        opened.page.locator("#theme").press("Enter")
        after = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert before != after


def test_a_wide_table_scrolls_in_its_own_frame(open_page):
    cells = [f"{10**at:,}" for at in range(12)]
    html = table("Sizes", ["layer", *cells], [["0", *cells]])
    opened = open_page(page("Sizes", [Section("sizes", "Sizes", html=html)]), width=400)
    width = "document.documentElement.scrollWidth"
    assert opened.page.evaluate(width) <= 400
    frame = opened.page.locator(".frame")
    assert frame.evaluate("each => each.scrollWidth > each.clientWidth")
    opened.page.keyboard.press("Tab")
    opened.page.keyboard.press("Tab")
    assert frame.evaluate("each => each === document.activeElement")
