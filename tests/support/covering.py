"""Which combinations of a test's parameters a normal run takes; a long run takes all."""

import itertools
import random
from collections.abc import Iterable

from session import LONG


def covering(*axes: Iterable, together: int = 2) -> list[tuple]:
    """The product of the axes, or the part of it that a normal run takes.

    In that part, any `together` values of different axes occur in one combination at least: 2 for
    every pair, 1 for every value.

    """
    product = list(itertools.product(*axes))
    return product if LONG else cover(product, together)


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
