"""Masks as SVG: each cell where it belongs, few shapes, and text that can be read aloud."""

import random
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch

from regard import Causal, Documents, Padding, SlidingWindow, Span
from regard.pooling import pooled
from regard.svg import runs, svg

NAMES = {"svg": "http://www.w3.org/2000/svg"}


def drawn(cells, q=0, k=0, **style):
    span = Span(q, q + len(cells), k, k + cells.shape[1])
    blocks = pooled(lambda part: cells, span, rows=512, columns=512)
    queries, keys = range(q, q + len(cells)), range(k, k + cells.shape[1])
    return svg("Causal()", blocks, queries, keys, **style)


def painted(path, rows, columns):
    """How often each cell is inside a rectangle of a path."""
    cells = [[0] * columns for _ in range(rows)]
    shapes = re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-(\d+)z", path)
    assert path == "".join("M{} {}h{}v{}h-{}z".format(*each) for each in shapes)
    for x, y, width, height, back in (map(int, each) for each in shapes):
        assert width == back
        for row in range(y, y + height):
            for column in range(x, x + width):
                cells[row][column] += 1
    return cells


@pytest.mark.parametrize("seed", range(20))
def test_every_visible_cell_is_painted_once(seed):
    rng = random.Random(seed)
    rows, columns = rng.randint(1, 12), rng.randint(1, 12)
    cells = torch.rand(rows, columns) < rng.choice([0.0, 0.2, 0.8, 1.0])
    paths = [
        each.get("d") for each in ElementTree.fromstring(drawn(cells)).findall(".//svg:path", NAMES)
    ]
    assert painted(paths[0], rows, columns) == cells.int().tolist()
    assert paths[1] == ""  # no block is partly visible
    assert painted(paths[2], rows, 1) == [[int(not any(row))] for row in cells.tolist()]


def test_blocks_that_are_partly_visible_are_paler():
    text = Causal()._repr_html_()
    assert "pale" not in text
    cells = torch.ones(1024, 1024).bool().tril()
    found = ElementTree.fromstring(drawn(cells)).findall(".//svg:path", NAMES)
    assert [each.get("fill-opacity") for each in found[:2]] == [None, ".45"]
    some, every = (sum(map(sum, painted(each.get("d"), 512, 512))) for each in (found[1], found[0]))
    assert (some, every) == (512, 512 * 511 // 2)  # the diagonal, and what is below it
    assert "a cell is 2 queries x 2 keys; pale: some are visible" in drawn(cells)


def test_a_large_mask_is_a_small_file():
    mask, span = Causal() & SlidingWindow(64), Span(0, 256, 0, 256)
    text = drawn(mask.dense(span))
    assert len(text) < 12_000
    assert len(drawn(torch.ones(512, 512).bool())) < 6_000


def test_equal_rows_are_one_rectangle():
    docs = Documents(torch.tensor([0, 0, 0, 1, 1]))
    (path, *_) = re.findall(r' d="([^"]*)"', drawn(docs.dense(Span(0, 5, 0, 5))))
    assert path == "M0 0h3v3h-3zM3 3h2v2h-2z"


def test_what_it_shows_is_said_in_words():
    cells = Padding(torch.tensor([[0, 0, 1]])).dense(Span(0, 3, 0, 3)) & torch.eye(3).bool()
    root = ElementTree.fromstring(drawn(cells, q=4, k=2))
    assert root.find("svg:title", NAMES).text == root.get("aria-label") == "Causal()"
    assert root.get("role") == "img"
    assert root.find("svg:desc", NAMES).text == (
        "3 queries (slots 4 to 6) by 3 keys (slots 2 to 4); 1 of 9 cells are visible; "
        "2 fully masked rows."
    )
    texts = [each.text for each in root.findall(".//svg:text", NAMES)]
    assert texts == ["4", "5", "6", "2", "3", "4", "queries", "keys", "red: fully masked rows"]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (30, 30), (256, 256), (1, 4000), (4000, 1)])
def test_labels_do_not_touch(rows, columns):
    root = ElementTree.fromstring(drawn(torch.ones(rows, columns).bool(), q=100_000))
    labels = [each for each in root.findall(".//svg:text", NAMES) if each.text.isdecimal()]
    down = [float(each.get("y")) for each in labels if each.get("text-anchor") == "end"]
    across = [float(each.get("x")) for each in labels if each.get("text-anchor") == "middle"]
    for places, least in ((down, 12), (across, 12)):
        assert places
        assert all(b - a >= least for a, b in pairwise(places))
    assert float(root.get("width")) < 640
    assert float(root.get("height")) < 640


def test_code_is_escaped():
    cells = pooled(lambda span: torch.ones(1, 1).bool(), Span(0, 1, 0, 1), rows=1, columns=1)
    text = svg('Where(<script>"&)', cells, [0], [0])
    assert ElementTree.fromstring(text).get("aria-label") == 'Where(<script>"&)'
    assert "<script>" not in text


def test_text_takes_the_colour_of_its_page_and_in_a_file_one_that_reads_on_any():
    root, inside = (
        ElementTree.fromstring(drawn(torch.ones(2, 2).bool(), alone=alone))
        for alone in (True, False)
    )
    assert root.get("fill") == inside.get("fill") == "currentColor"
    assert inside.get("color") is None
    assert all(contrast(root.get("color"), paper) > 3.5 for paper in ("#ffffff", "#000000"))


def contrast(one, other):
    """As in the Web Content Accessibility Guidelines 2.2."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def test_runs_of_true():
    assert list(runs([True, True, False, True])) == [(0, 2), (3, 1)]
    assert list(runs([])) == []
