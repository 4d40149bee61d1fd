"""The report as a page: it loads nothing, and escapes the texts of subjects."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import get_args

import pytest

import subjects
from judged import JUDGED
from regard_verify import Counterexample, Outcome, Report, check
from regard_verify.report.html import page
from regard_verify.report.report import Status


@pytest.fixture(scope="module")
def broken():
    return check(subjects.Tutorial, {"polarity": "keep", "mask": "mask"}, quick=True)


def test_the_page_loads_nothing(broken):
    class Reader(HTMLParser):
        tags: list = []  # noqa: RUF012

        def handle_starttag(self, tag, attrs):
            self.tags.append((tag, dict(attrs)))

    html = page(broken)
    reader = Reader()
    reader.feed(html)
    assert not any({"src", "href"} & set(attrs) for _, attrs in reader.tags)
    addresses = set(re.findall(r"https?://[\w.]+", html))
    assert addresses == {"https://img.shields.io"}  # the badge's text
    assert any(tag == "svg" for tag, _ in reader.tags)
    assert "the mask is read the wrong way round" in html
    assert "query 0, key 1: hidden" in html


TEXT = "<u>'\"&"  # no tag of the page, and what ends an attribute


def test_the_page_escapes_every_text():
    example = Counterexample(TEXT, TEXT, TEXT, TEXT, TEXT, [[True]], [[False]])
    every = [
        Outcome(TEXT + each, each, TEXT, TEXT, TEXT, example, TEXT, 0.0, f"{TEXT}failed", TEXT)
        for each in get_args(Status)
    ]
    report = Report(TEXT, TEXT, {TEXT: TEXT}, {TEXT: TEXT}, [TEXT], every, unjudged=TEXT)
    for made in (report, replace(report, problem=TEXT)):
        html = page(made)
        assert "<u>" not in html
        assert html.count("&lt;u&gt;&#x27;&quot;&amp;") > 20


@pytest.mark.parametrize("given", ["passed", "failed", "unjudged", "problem"])
def test_the_page_shows_the_verdict_in_its_colour(given):
    report = Report("mine", outcomes=[Outcome("a", "passed", "", "")])
    if given == "failed":
        report.outcomes = [Outcome("a", "failed", "", "")]
    elif given != "passed":
        setattr(report, given, "Declare heads.")
    colour = {"passed": "good", "unjudged": "partly"}.get(given, "bad")
    html = page(report)
    assert f"<p class={colour}>{report.summary()}</p>" in html
    assert ("<b>Not judged</b><br>Declare heads.<br>Declare with --like" in html) == (
        given == "unjudged"
    )


def test_the_page_shows_what_the_terminal_shows():
    html = page(JUDGED)
    first = JUDGED.causes[0]
    (follower,) = JUDGED.following(first.law)
    cause = html[html.index(f"<b><code>{first.law}<") :].partition("</details>")[0]
    for text in (
        first.statement,
        "expected 0.818, got nan",
        "line <code>my_attention.py:35: scores = q @ k.mT</code>",
        f"<summary>also broken because of it: {follower}</summary>",
        f"follows from <code>{first.law}</code>",
    ):
        assert text in cause, text
    assert html.count("follows from") == len(JUDGED.having("follows"))  # each is under its cause
    assert "<td>it did not come back within 30 s</td>" in html
    assert "laws/caches.py:12" in html
    assert html.count("it has no past that was found") == 1


def test_a_notebook_shows_the_verdict_and_each_cause():
    html = JUDGED._repr_html_()
    assert JUDGED.summary() in html
    for each in JUDGED.unexplained:
        assert f">{each.law}</th>" in html
        assert "expected 0.818, got nan" in html
    assert not re.search("<script|<style|on\\w+=", html)
    passed = Report("mine", outcomes=[Outcome("a", "passed", "", "")])
    assert "<table" not in passed._repr_html_()
    hostile = replace(JUDGED, subject=TEXT, unjudged=TEXT)
    assert "<u>" not in hostile._repr_html_()


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_opens_in_a_browser_and_fits_a_phone(open_page, dark):
    opened = open_page(page(JUDGED), width=400, dark=dark)
    assert opened.page.locator("h1").text_content() == f"{JUDGED.subject}: regard-verify"
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 400
    opened.page.locator("summary").last.press("Enter")
    assert opened.page.locator("details[open] table").count() == 1
