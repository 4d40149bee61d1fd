"""The picture of a comparison: a point for each row that ran, none on another, all inside."""

import math
import re
from html import escape

import pytest

from planned import HOSTILE
from regard.compare import Row
from regard.see.pages.scatter import HEIGHT, RADIUS, WIDTH, front, scatter

POINT = re.compile(r'<circle cx="([\d.]+)" cy="([\d.]+)"')


def rows(*points):
    return [Row(f"row {at}", False, float(x), perplexity=y) for at, (x, y) in enumerate(points)]


def places(html):
    return [(float(x), float(y)) for x, y in POINT.findall(html)]


@pytest.mark.parametrize(
    "points",
    [
        [(23_040, 13.5), (12_240, 13.55), (7_200, 14.1), (69_120, 13.5), (7_680, 31.3)],
        [(100, 5.0), (100, 5.0), (100, 5.0)],
        [(1e9, 2.0), (1, 90_000.0)],
        [(100, 5.001), (99, 5.002)],
    ],
)
def test_points_are_inside_and_apart(points):
    found = places(scatter(rows(*points)))
    assert len(found) == len(points)
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in found)
    for at, place in enumerate(found):
        assert all(math.dist(place, other) >= 2 * RADIUS - 0.2 for other in found[:at])


def test_less_is_left_and_worse_is_above():
    (small, worse), (large, better) = places(scatter(rows((100, 30.0), (1_000, 10.0))))
    assert small < large and worse < better  # pixels go down


def test_the_front_is_green_and_names_are_text():
    given = [*rows((1, 3.0), (2, 1.0), (2, 2.0)), Row(HOSTILE, False, 9.0, perplexity=9.0)]
    html = scatter(given)
    assert html.count('<li class="best">') == html.count('<g class="best">') == 2
    assert escape(HOSTILE) in html and HOSTILE not in html
    assert front({"a": (2.0, 1.0), "b": (1.0, 3.0)}) == ["b", "a"]


def test_rows_that_did_not_run_have_no_point():
    missing = Row("MQA", False, remark="no")
    assert scatter([*rows((1, 2.0)), missing]) == ""
    assert len(places(scatter([*rows((1, 2.0), (2, 1.0)), missing]))) == 2
