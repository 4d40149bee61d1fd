"""The order of windows and positions, and the ranges of a recipe's values."""

import pytest

from regard.convert import Recipe
from regard.convert.healing.recipe import positions_of, rows_of


def test_an_epoch_contains_every_window_once():
    orders = []
    for epoch in range(3):
        steps = range(epoch * 5, epoch * 5 + 5)
        seen = [row for s in steps for row in rows_of(s, windows=15, batch=3, seed=1)]
        assert sorted(seen) == list(range(15))
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]
    assert rows_of(0, windows=15, batch=3, seed=2) not in [order[:3] for order in orders]


def test_positions_differ_from_step_to_step():
    first, second = (positions_of(step, length=40, share=0.25, seed=0) for step in (0, 1))
    assert len(first) == len(second) == len(set(first.tolist())) == 10
    assert first.tolist() != second.tolist()
    assert len(positions_of(0, length=40, share=1e-6, seed=0)) == 1


def test_the_rate_rises_over_the_warmup_and_falls_to_zero():
    recipe = Recipe(lr=2.0, warmup=0.2)
    rates = [recipe.rate(share) for share in (0.0, 0.1, 0.2, 0.6, 1.0)]
    assert rates == pytest.approx([0.0, 1.0, 2.0, 1.0, 0.0])
    assert Recipe(lr=2.0, warmup=0.0).rate(0.0) == 2.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch is above 0"),
        ({"lr": 0.0}, "lr is above 0"),
        ({"warmup": 1.5}, "warmup is a share"),
        ({"batch": 4, "at_once": 3}, "at_once=3 does not divide batch=4"),
        ({"train": "head"}, "train is 'attention' or 'all'"),
    ],
)
def test_recipes_out_of_range_are_refused(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        Recipe(**options)
