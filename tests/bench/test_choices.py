"""Two sets of rates compared by the calls for which they choose different backends."""

import math
from dataclasses import replace

import pytest
import torch

from own_rates import own_rates
from regard import Causal, prepare
from regard.bench.choices import (
    CELLS,
    DTYPES,
    LONGEST,
    SHORTEST,
    Choices,
    Drawn,
    compare_choices,
    differing,
    draw_calls,
)
from regard.bench.short import Shape
from regard.ops.backends import BACKENDS
from regard.rates import SPEED, typical

__all__ = ["own_rates"]
pytestmark = pytest.mark.usefixtures("own_rates")
CONSTANTS = typical(1)
FOOLISH = replace(CONSTANTS, elements=1e15, products=1e17)  # scores cost nothing: `eager` is best


def test_calls_are_many_kinds_and_the_same_for_a_seed():
    calls = draw_calls(300)
    assert calls == draw_calls(300) != draw_calls(300, seed=1)
    assert {drawn.dtype for drawn in calls} == {*DTYPES}
    assert len({str(drawn.mask).partition("size")[0] for drawn in calls}) == 3
    assert {drawn.shape.queries == 1 for drawn in calls} == {True, False}
    for drawn in calls:
        shape = drawn.shape
        assert shape.heads % shape.kv_heads == 0
        assert shape.batch * shape.heads * shape.queries * shape.keys <= CELLS


def test_a_call_is_described_as_with_memory_of_its_own():
    for drawn in draw_calls(40):
        shape = drawn.shape
        q = torch.empty(shape.batch, shape.heads, shape.queries, shape.head_dim, dtype=drawn.dtype)
        k, v = torch.empty(
            2, shape.batch, shape.kv_heads, shape.keys, shape.head_dim, dtype=drawn.dtype
        )
        call = prepare(q, k, v, mask=drawn.mask, span=shape.span).call
        described = drawn.describe()
        for backend in BACKENDS.values():
            assert backend.estimate(described) == backend.estimate(call)
            assert backend.objection(described) == backend.objection(call)


def test_differing_calls_have_the_choice_of_each_set_of_rates():
    calls, before = draw_calls(60), SPEED.now()
    pairs = differing(calls, FOOLISH, CONSTANTS)
    assert SPEED.now() == before
    assert 5 < len(pairs) < 60
    for at, speed in enumerate((FOOLISH, CONSTANTS)):
        SPEED.use(speed)
        for drawn, names in pairs:
            shape = drawn.shape
            q = torch.zeros(shape.batch, shape.heads, shape.queries, 1, dtype=drawn.dtype)
            k = torch.zeros(shape.batch, shape.kv_heads, shape.keys, 1, dtype=drawn.dtype)
            q, k = (x.expand(*x.shape[:3], shape.head_dim).contiguous() for x in (q, k))
            made = prepare(q, k, k.clone(), mask=drawn.mask, span=shape.span)
            assert made.name == names[at] != names[1 - at]
            if speed is CONSTANTS:
                assert SHORTEST <= BACKENDS[made.name].estimate(made.call) <= LONGEST
    assert differing(calls, CONSTANTS, CONSTANTS) == []
    assert differing(calls, CONSTANTS.faster(0.37), CONSTANTS) == []  # ratios alone matter


def test_rates_that_choose_slow_backends_are_told_from_those_that_choose_fast_ones(monkeypatch):
    """By the clock: eager attention is slower than the kernels where these are expected to win."""
    shapes = [Shape("square", 8, 8, 72, n, n) for n in range(200, 440, 40)]  # no width of `tiled`
    calls = [Drawn(shape, torch.float32, Causal()) for shape in shapes]
    monkeypatch.setattr("regard.bench.choices.draw_calls", lambda number: calls)
    worse = compare_choices(FOOLISH, CONSTANTS, timed=6, cold=1 << 24)
    assert len(worse.ratios) == 6
    assert worse.average > 1.15
    assert worse.objection() is not None
    better = compare_choices(CONSTANTS, FOOLISH, timed=6, cold=1 << 24)
    assert better.average < 1 / 1.15
    assert better.objection() is None


@pytest.mark.parametrize(
    ("ratios", "average", "objects"),
    [
        ([], 1.0, True),
        ([0.5, 0.5, 0.5, 0.5, 0.5], 0.5, True),  # too few
        ([0.5, 0.5, 0.5, 0.5, 0.5, 0.5], 0.5, False),
        ([0.9, 0.8, 0.9, 0.8, 0.9, 0.8], 0.8485, False),
        ([0.5, 1.5, 0.5, 1.5, 0.9, 0.9], 0.8772, True),  # it may be chance
        ([1.1, 1.1, 1.1, 1.1, 1.1, 1.1], 1.1, True),
    ],
)
def test_the_constants_stay_unless_others_choose_faster_backends_beyond_chance(
    ratios, average, objects
):
    choices = Choices(ratios)
    assert math.isclose(choices.average, average, rel_tol=1e-3)
    assert choices.objection() == (str(choices) if objects else None)
    assert ratios == [] or str(choices).startswith(f"of {len(ratios)} calls for which")
