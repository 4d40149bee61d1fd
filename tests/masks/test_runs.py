"""Runs of keys that blocks of queries may attend to: no visible key is missing."""

import itertools
import random

import pytest
import torch

import cases
from cases import Sizes, draw_leaf, draw_mask, table
from regard.masks.runs import (
    ALL,
    NONE,
    complement,
    contains,
    intersection,
    true_runs,
    union,
    without_gaps,
)


@pytest.mark.parametrize("seed", range(60))
def test_runs_contain_all_keys_visible_to_some_and_only_keys_visible_to_all(seed):
    rng = random.Random(seed)
    sizes = Sizes(2, 2, 1, 1, 1, [0, 0], 9, 0, 9)
    mask, sees = draw_mask(rng, sizes)
    cells = table(cases.Case(seed, sizes, *[torch.empty(0)] * 3, sees=sees))
    find = mask.within(sizes.span()).finder()
    for first, last in itertools.combinations(range(9), 2):
        some, every, _ = find(first, last)
        here = cells[:, :, first : last + 1]
        for key in range(9):
            case = (mask, first, last, key)
            assert contains(some, key, key + 1) or not here[..., key].any(), case
            assert not contains(every, key, key + 1) or here[..., key].all(), case


@pytest.mark.parametrize("seed", range(60))
def test_runs_without_reading_are_no_narrower_than_those_of_the_data(seed):
    """`runs` reads no tensor: it shows no fewer keys to some, and no more to all, than `finder`."""
    sizes = Sizes(2, 2, 1, 1, 1, [0, 0], 9, 0, 9)
    mask, _ = draw_mask(random.Random(seed), sizes)
    placed = mask.within(sizes.span())
    for first, last in itertools.combinations(range(9), 2):
        known, read = placed.runs(first, last), placed.finder()(first, last)
        assert intersection(known.some, read.some) == union(read.some)
        assert intersection(known.every, read.every) == union(known.every)


@pytest.mark.parametrize("kind", ["causal", "window", "chunked", "prefix", "documents", "padding"])
@pytest.mark.parametrize("seed", range(5))
def test_runs_of_simple_rules_are_exact(kind, seed):
    """For one query of one row, both lists of runs equal the rule."""
    sizes = Sizes(1, 1, 1, 1, 1, [0], 9, 0, 9)
    mask, sees = draw_leaf(random.Random(seed), sizes, kind)
    find = mask.finder()
    for query, key in itertools.product(range(9), repeat=2):
        some, every, _ = find(query, query)
        visible = sees(0, 0, query, key)
        assert contains(some, key, key + 1) == contains(every, key, key + 1) == visible


def test_runs_are_joined_intersected_and_inverted():
    some, others = [(0, 3), (5, 9)], [(2, 6), (20, 21)]
    assert union(some, others) == [(0, 9), (20, 21)]
    assert intersection(some, others) == [(2, 3), (5, 6)]
    assert intersection(some, complement(some)) == []
    assert union(some, complement(some)) == ALL
    assert complement(NONE) == ALL and complement(ALL) == NONE


def test_runs_with_small_gaps_are_joined():
    assert without_gaps([(0, 2), (3, 5), (9, 10)], gap=2) == [(0, 5), (9, 10)]
    assert without_gaps([(0, 2), (3, 5)], gap=1) == [(0, 2), (3, 5)]


def test_runs_of_true_flags():
    flags = torch.tensor([True, True, False, True])
    assert true_runs(flags[:0]) == true_runs(flags[2:3]) == []
    assert true_runs(flags) == [(0, 2), (3, 4)]
    assert contains([(0, 2), (3, 4)], 3, 4) and not contains([(0, 2), (3, 4)], 1, 4)
