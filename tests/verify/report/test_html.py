"""The report as a page: it loads nothing, and escapes the texts of subjects."""

import re
from html.parser import HTMLParser

import pytest

import subjects
from regard.verify import Report, check
from regard.verify.report.html import page


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
    assert "http" not in html.replace("https://img.shields.io", "")
    assert any(tag == "svg" for tag, _ in reader.tags)
    assert "the mask is read the wrong way round" in html
    assert "query 0, key 1: hidden" in html


def test_the_page_escapes_the_texts_of_subjects():
    report = Report("<script>", notes=["<b>"], problem="<i>")
    assert not re.search("<script>|<b>|<i>", page(report))
