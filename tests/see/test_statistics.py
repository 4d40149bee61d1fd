"""Means over queries, and overviews, against loops over single weights."""

import math

import pytest
import torch

from regard.see.row_weights import RowBlock
from regard.see.statistics import CELLS, Totals, shares

NAMES = ("entropy", "distance", "sink_share", "previous_share", "self_share", "learned_sink")


def random_weights(heads, queries, keys, sink):
    """Causal weights of the last queries; with a sink, rows sum to less than 1."""
    scores = torch.randn(heads, queries, keys + 1, dtype=torch.float64) * 2
    later = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None]
    scores[..., :keys].masked_fill_(later, -torch.inf)
    scores[..., keys] = 1.0 if sink else -torch.inf
    return scores.softmax(-1)[..., :keys]


def by_loops(rows, past, counted, first):
    """The statistics of one head, a weight at a time: a list of rows of Python numbers."""
    found = {name: [] for name in NAMES}
    for at, row in enumerate(rows):
        if not counted[at] or not sum(row):
            continue
        query, rest = past + at, max(0.0, 1 - sum(row))
        found["entropy"].append(-sum(w * math.log(w) for w in (*row, rest) if w > 1e-12))
        distance = sum(weight * abs(query - key) for key, weight in enumerate(row))
        found["distance"].append(distance / sum(row))
        found["sink_share"].append(row[first])
        found["self_share"].append(row[query])
        found["learned_sink"].append(rest)
        if query > first:
            found["previous_share"].append(row[query - 1])
    return {name: sum(each) / len(each) for name, each in found.items()}


def totals_of(weights, counted, first, *, sinks, size):
    """The means, of blocks of `size` rows that hold the keys up to their last query."""
    heads, queries, keys = weights.shape
    totals, past = Totals(heads, counted, first, keys, sinks=sinks), keys - queries
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        totals.add(RowBlock(weights[:, start:stop, first : past + stop], past + start, first))
    return totals.means()


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("past", [0, 3])
def test_means_are_those_of_loops(past, sinks, size):
    weights = random_weights(2, 9, 9 + past, sinks)
    found = totals_of(weights, torch.ones(9, dtype=torch.bool), 0, sinks=sinks, size=size)
    for head in range(2):
        wanted = by_loops(weights[head].tolist(), past, [True] * 9, 0)
        for name in NAMES:
            assert getattr(found, name)[head] == pytest.approx(wanted[name], abs=1e-6), name


def test_padding_and_fully_masked_rows_do_not_count():
    weights = random_weights(1, 7, 7, False)
    weights[:, :, :2] = 0
    weights[:, 4] = 0
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    counted = torch.tensor([False, False, True, True, True, True, False])
    found = totals_of(weights, counted, 2, sinks=False, size=3)
    wanted = by_loops(weights[0].tolist(), 0, counted.tolist(), 2)
    for name in NAMES:
        assert getattr(found, name)[0] == pytest.approx(wanted[name], abs=1e-6), name


def test_rows_of_an_overview_are_means_over_the_queries_that_count():
    tokens = 2 * CELLS
    weights = random_weights(1, tokens, tokens, False)
    weights[:, 10] = 0
    counted = torch.arange(tokens) != 13
    (overview,) = totals_of(weights, counted, 0, sinks=False, size=9).overview.double()
    joined = weights[0].unflatten(1, (CELLS, 2)).sum(-1)
    for row, query in ((5, 11), (6, 12)):  # of queries 10 and 11, and of 12 and 13
        torch.testing.assert_close(overview[row], joined[query], rtol=0, atol=1e-6)


def test_no_row_counts():
    found = totals_of(
        torch.zeros(1, 3, 3), torch.zeros(3, dtype=torch.bool), 0, sinks=False, size=9
    )
    assert not any(getattr(found, name).any() for name in (*NAMES, "overview"))


def test_an_overview_of_few_tokens_is_the_map():
    weights = random_weights(3, 20, 20, True)
    found = totals_of(weights, torch.ones(20, dtype=torch.bool), 0, sinks=True, size=6)
    torch.testing.assert_close(found.overview.double(), weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [5, 100])
def test_an_overview_holds_means_over_queries_of_sums_over_keys(size):
    tokens = 2 * CELLS + 6
    weights = random_weights(1, tokens, tokens, False)
    found = totals_of(weights, torch.ones(tokens, dtype=torch.bool), 0, sinks=False, size=size)
    fine = weights[0].repeat_interleave(CELLS, 0).repeat_interleave(CELLS, 1) / CELLS
    wanted = fine.view(CELLS, tokens, CELLS, tokens).sum(3).mean(1)
    torch.testing.assert_close(found.overview[0].double(), wanted, rtol=0, atol=1e-6)
    assert (found.overview.sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize(("count", "cells"), [(1, 1), (7, 3), (32, 32), (33, 32), (100, 32)])
def test_tokens_are_laid_over_intervals(count, cells):
    parts = shares(count, cells)
    assert parts.sum(1).allclose(torch.ones(count, dtype=torch.float64))
    assert parts.sum(0).allclose(torch.full((cells,), count / cells, dtype=torch.float64))
