"""Which keys blocks of queries may attend to: runs of slots, never too few and never too many."""

import itertools
import random

import pytest
import torch

import cases
from cases import Sizes, draw_leaf, draw_mask, table
from regard.masks.visible_runs import (
    ALL,
    NONE,
    bridged,
    covers,
    join,
    meet,
    sight,
    true_runs,
    without,
)


@pytest.mark.parametrize("seed", range(60))
def test_what_blocks_see_is_never_too_little_nor_what_all_see_too_much(seed):
    rng = random.Random(seed)
    sizes = Sizes(2, 2, 1, 1, 1, [0, 0], 9, 0, 9)
    mask, sees = draw_mask(rng, sizes)
    cells = table(cases.Case(seed, sizes, *[torch.empty(0)] * 3, sees=sees))
    look = sight(mask.within(sizes.span()))
    for first, last in itertools.combinations(range(9), 2):
        seen, full = look(first, last)
        here = cells[:, :, first : last + 1]
        for key in range(9):
            assert covers(seen, key, key + 1) or not here[..., key].any(), (mask, first, last, key)
            assert not covers(full, key, key + 1) or here[..., key].all(), (mask, first, last, key)


@pytest.mark.parametrize("kind", ["causal", "window", "chunked", "prefix", "documents", "padding"])
@pytest.mark.parametrize("seed", range(5))
def test_of_simple_rules_nothing_is_seen_in_vain(kind, seed):
    """For one query of one row both answers are the rule itself."""
    sizes = Sizes(1, 1, 1, 1, 1, [0], 9, 0, 9)
    mask, sees = draw_leaf(random.Random(seed), sizes, kind)
    look = sight(mask)
    for query, key in itertools.product(range(9), repeat=2):
        seen, full = look(query, query)
        assert covers(seen, key, key + 1) == covers(full, key, key + 1) == sees(0, 0, query, key)


def test_runs_are_joined_intersected_and_inverted():
    some, others = [(0, 3), (5, 9)], [(2, 6), (20, 21)]
    assert join(some, others) == [(0, 9), (20, 21)]
    assert meet(some, others) == [(2, 3), (5, 6)]
    assert meet(some, without(some)) == []
    assert join(some, without(some)) == ALL
    assert without(NONE) == ALL and without(ALL) == NONE


def test_near_runs_are_made_one():
    assert bridged([(0, 2), (3, 5), (9, 10)], gap=2) == [(0, 5), (9, 10)]
    assert bridged([(0, 2), (3, 5)], gap=1) == [(0, 2), (3, 5)]


def test_flags_become_runs():
    assert true_runs([]) == true_runs([False]) == []
    assert true_runs([True, True, False, True]) == [(0, 2), (3, 4)]
    assert covers([(0, 2), (3, 4)], 3, 4) and not covers([(0, 2), (3, 4)], 1, 4)
