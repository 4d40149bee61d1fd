"""HTML as tests read it: elements with their attributes, and the cells of tables of curves."""

import json
import re
from html import unescape
from html.parser import HTMLParser


class _Elements(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.found = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def elements(html):
    """The elements, each with its attributes."""
    return _Elements(html).found


def cells_of(html):
    """Of each cell of curves, by its figure, line and context (None in the first table): its text
    and its exact value."""
    found = {}
    for opening, text in re.findall(r"(<td data-figure[^>]*>)([^<]*)</td>", html):
        ((_, each),) = elements(opening)
        context = json.loads(each.get("data-context", "null"))
        value = json.loads(each.get("data-value", "null"))
        found[each["data-figure"], int(each["data-line"]), context] = (unescape(text), value)
    return found
