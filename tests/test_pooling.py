"""Blocks of cells: what is visible of each, counted cell by cell."""

import random

import pytest
import torch

from regard import Span
from regard.pooling import pooled


def by_hand(cells, rows, columns):
    """The blocks as lists of their cells, for the smallest powers of two that fit."""
    high, wide = (1, 1)
    while -(-len(cells) // high) > rows:
        high *= 2
    while -(-len(cells[0]) // wide) > columns:
        wide *= 2
    blocks = [
        [
            [c for row in cells[y : y + high] for c in row[x : x + wide]]
            for x in range(0, len(cells[0]), wide)
        ]
        for y in range(0, len(cells), high)
    ]
    return blocks, high, wide


@pytest.mark.parametrize("seed", range(40))
def test_blocks_hold_what_their_cells_hold(seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr("regard.pooling.STRIP", rng.choice([1, 7, 50, 10_000]))
    queries, keys = rng.randint(1, 40), rng.randint(1, 40)
    share = rng.choice([0.1, 0.5, 0.95])
    cells = [[rng.random() < share for _ in range(keys)] for _ in range(queries)]
    first = rng.randint(0, 5)
    asked = []

    def cells_of(span):
        asked.append((span.first_query, span.last_query))
        return torch.tensor(cells[span.first_query - first : span.last_query - first + 1])

    rows, columns = rng.randint(1, 12), rng.randint(1, 12)
    found = pooled(cells_of, Span(first, first + queries, 3, 3 + keys), rows=rows, columns=columns)
    blocks, high, wide = by_hand(cells, rows, columns)
    assert (found.high, found.wide) == (high, wide)
    assert found.some.tolist() == [[any(block) for block in row] for row in blocks]
    assert found.every.tolist() == [[all(block) for block in row] for row in blocks]
    assert found.visible == sum(map(sum, cells))
    assert found.masked == sum(not any(row) for row in cells)
    assert asked[0][0] == first
    assert asked[-1][1] == first + queries - 1


def test_no_more_blocks_than_asked_for():
    for queries in range(1, 70):
        found = pooled(
            lambda span: torch.ones(span.num_queries, span.num_keys).bool(),
            Span(0, queries, 0, 5),
            rows=7,
            columns=9,
        )
        assert len(found.some) <= 7
        assert found.high == 1 or -(-queries // (found.high // 2)) > 7  # half as high does not fit
        assert found.wide == 1


def test_too_many_cells_are_refused_before_any_is_evaluated():
    with pytest.raises(ValueError, match="at most 268,435,456 cells, got 100,000 queries x 9,000"):
        pooled(lambda span: None, Span(0, 100_000, 0, 9000), rows=8, columns=8)


def test_a_ragged_span_stays_ragged():
    starts = torch.tensor([3, 5])
    seen = []

    def cells_of(span):
        seen.append(span.q_start.tolist())
        return torch.zeros(span.num_queries, 4).bool()

    pooled(cells_of, Span(starts, starts + 2, 0, 4), rows=2, columns=4)
    assert seen == [[3, 5]]
