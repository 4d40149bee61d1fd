"""The picture of a comparison: perplexity against the bytes of the cache, as SVG in a page."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import product

from regard.compare.frontiers import front
from regard.compare.measure import Row

WIDTH, HEIGHT = 360, 250  # of the drawing: as wide as a phone, whose letters are then 11 pixels
LEFT, RIGHT, TOP, BOTTOM = 38, 12, 22, 34  # margins around the points
RADIUS = 8  # of a point, which has the number of its row inside
STEPS = (1, 1.5, 2, 3, 4, 5, 6, 8)  # of a decade: where ticks of an axis may be
TICKS = 5  # at most, of an axis
STYLE = """<style>
.scatter { display: block; width: 100%; max-width: 40rem; font-size: 11px; }
.scatter text { fill: var(--ink); }
.scatter .tick { stroke: var(--line); }
.scatter .front { fill: none; stroke: var(--good); stroke-width: 2; }
.scatter circle { fill: var(--panel); stroke: var(--aside); }
.scatter .best circle { fill: var(--good); stroke: none; }
.scatter .best text { fill: var(--paper); font-weight: 600; }
.named { columns: 17rem; padding-left: 2rem; }
.named .best { color: var(--good); }
</style>
"""
Point = tuple[float, float]


def scatter(rows: Iterable[Row]) -> str:
    """The HTML of a picture of the rows that ran, and the list of their names.

    Both axes are logarithmic. Rows than which no other has both a smaller cache and a lower
    perplexity are on the Pareto front.

    Args:
        rows: of a comparison.

    Returns:
        "" if fewer than two rows ran.

    Examples:
        >>> from regard.compare import Row
        >>> from regard.see.pages.scatter import scatter
        >>> rows = [Row("GQA, as shipped", True, 512.0, perplexity=13.5),
        ...     Row("GQA, int8 cache", False, 272.0, perplexity=13.6)]
        >>> scatter(rows).count("<circle")
        2
    """
    found = {
        row.name: (float(row.cache_bytes_per_token), float(row.perplexity))
        for row in rows
        if row.cache_bytes_per_token and row.perplexity
    }
    if len(found) < 2:
        return ""
    best = front(found)
    (left, right), (low, high) = (_range(each) for each in zip(*found.values(), strict=True))

    def place(point: Point) -> Point:
        return (
            LEFT + _share(point[0], left, right) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - _share(point[1], low, high) * (HEIGHT - TOP - BOTTOM),
        )

    across = [_tick_across(place((each, low))[0], each) for each in _ticks(left, right)]
    up = [_tick_up(place((left, each))[1], each) for each in _ticks(low, high)]
    line = _front([place(found[name]) for name in best])
    taken: list[Point] = []
    points = [
        _point(_free(place(point), taken), number, name in best)
        for number, (name, point) in enumerate(found.items(), 1)
    ]
    names = "".join(
        f'<li class="best">{escape(name)}</li>' if name in best else f"<li>{escape(name)}</li>"
        for name in found
    )
    return (
        f'{STYLE}<svg class="scatter" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="'
        f'Perplexity against bytes of the cache a token; the list below names the points.">'
        f'{"".join((*across, *up))}<text x="0" y="11">perplexity</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">cache, bytes a token</text>'
        f'{line}{"".join(points)}</svg>\n<ol class="named">{names}</ol>\n'
        '<p class="aside">Green: no other has both a smaller cache and a lower perplexity.</p>\n'
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis: beyond the values by a tenth of their range, and by 2 % at least."""
    low, high = min(values), max(values)
    beyond = max((high / low) ** 0.1, 1.02)
    return low / beyond, high * beyond


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers of an axis, few enough to be read."""
    powers = range(math.floor(math.log10(low)) - 2, math.ceil(math.log10(high)) + 1)
    round_numbers = [step * 10.0**power for power, step in product(powers, STEPS)]
    linear = 10.0 ** math.floor(math.log10(high - low))
    even = [linear * at for at in range(math.ceil(low / linear), math.floor(high / linear) + 1)]
    inside = [each for each in round_numbers if low <= each <= high]
    found = inside if len(inside) > 1 else even
    return found[:: -(-len(found) // TICKS)]


def _tick_across(x: float, value: float) -> str:
    return (
        f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 13}" text-anchor="middle">{value:,.6g}</text>'
    )


def _tick_up(y: float, value: float) -> str:
    return (
        f'<line class="tick" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{value:,.4g}</text>'
    )


def _front(places: Sequence[Point]) -> str:
    """The Pareto front as a step curve, from the top edge through its points to the right edge."""
    (x, _), *_ = places
    drawn = f"M{x:.1f} {TOP}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in places)
    return f'<path class="front" d="{drawn}H{WIDTH - RIGHT}"/>'


def _free(place: Point, taken: list[Point]) -> Point:
    """The place nearest to a point that covers none of those before; it is appended to them."""
    x, y = place
    moves = sorted(product(range(-4, 5), repeat=2), key=lambda move: math.hypot(*move))
    step = 2 * RADIUS
    places = ((x + step * right, y + step * down) for right, down in moves)
    inside = (
        (x, y) for x, y in places if LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM
    )
    free = (each for each in inside if all(math.dist(each, other) >= step for other in taken))
    taken.append(next(free, place))
    return taken[-1]


def _point(place: Point, number: int, best: bool) -> str:
    x, y = place
    kind = ' class="best"' if best else ""
    return (
        f'<g{kind}><circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}"/>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{number}</text></g>'
    )
