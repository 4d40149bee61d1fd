"""Which combinations of a test's parameters a normal run takes; a long run takes all."""

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

from session import LONG

FEW = 24  # combinations, which an ordinary run takes all
CHECKED = 8  # cases of a test, which an ordinary run takes all with checked annotations


def covering(*axes: Iterable, together: int = 2) -> list[tuple]:
    """The product of the axes, or the part of it that a normal run takes.

    In that part, any `together` values of different axes occur in one combination at least: 2 for
    every pair, 1 for every value.

    """
    product = list(itertools.product(*axes))
    return product if LONG else cover(product, together)


def few(cases: Iterable[Any], step: int) -> list[Any]:
    """All cases, or in a normal run one of `step`, the first among them."""
    return list(cases)[:: 1 if LONG else step]


def covering_items(items: Sequence[Any]) -> list[Any]:
    """The items of pytest, but of each large product of parameters a part that has every pair.

    A product is one of three or more `parametrize` of a test, or fixtures with parameters.

    """
    left_out: set[Any] = set()
    for cases in _cases(items):
        places = [_place(case) for case in cases]
        if len(cases) > FEW and len(places[0]) > 2:
            taken = {*cover(places, 2)}
            left_out |= {
                case for case, place in zip(cases, places, strict=True) if place not in taken
            }
    return [item for item in items if item not in left_out]


def unchecked_items(items: Sequence[Any]) -> list[Any]:
    """Three of four cases of each test that has many: these run without checked annotations."""
    many = (cases for cases in _cases(items) if len(cases) > CHECKED)
    return [case for cases in many for at, case in enumerate(cases) if at % 4]


def _cases(items: Sequence[Any]) -> Iterable[list[Any]]:
    """The items of each test."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests.values()


def _place(item: Any) -> tuple[Any, ...]:
    """The identity of the item's value on each axis of its product."""
    if not hasattr(item, "callspec"):
        return ()
    params = dict(item.callspec.params)
    place = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        values = tuple(id(params.pop(name.strip(), None)) for name in names)
        place.append(values)
    return *place, *map(id, params.values())


def cover(product: list[tuple], together: int) -> list[tuple]:
    """Greedily, the combination that adds most; among equals a random one, the same every time."""
    left = random.Random(0).sample(range(len(product)), len(product))
    places = list(itertools.combinations(range(len(product[0])), together))
    missing = {at: {_values(product[at], place) for place in places} for at in left}
    chosen = []
    while missing:
        best = max(missing, key=lambda at: len(missing[at]))
        found = missing.pop(best)
        chosen.append(best)
        missing = {at: rest for at, each in missing.items() if (rest := each - found)}
    return [product[at] for at in sorted(chosen)]


def _values(combination: tuple, place: tuple[int, ...]) -> tuple:
    """Some values of a combination, told apart by where they are and what they are printed as."""
    return tuple((at, repr(combination[at])) for at in place)
