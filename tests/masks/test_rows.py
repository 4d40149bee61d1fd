"""Masks for some rows and queries: they agree with the whole mask there."""

import random

import pytest
import torch

from cases import Sizes, draw_mask
from regard import (
    Causal,
    Chunked,
    Dense,
    Documents,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
    Where,
)
from regard.masks.row_data import row_masks

SQUARE = Span(0, 9, 0, 9)


def edges_of(mask, first, stop):
    return mask.finder()(first, stop - 1).edges_between(first, stop)


@pytest.mark.parametrize("seed", range(40))
def test_the_masks_of_rows_are_the_rows_of_the_mask(seed):
    mask, _ = draw_mask(random.Random(seed), Sizes(3, 2, 1, 1, 1, [0, 0, 0], 9, 0, 9))
    mask = mask.within(SQUARE)
    rows = row_masks(mask, 3)
    if len(rows) == 1:
        assert rows[0] is mask
        return
    whole = mask.dense(SQUARE, batch=3, heads=2).expand(3, 2, 9, 9)
    for row, each in enumerate(rows):
        assert torch.equal(each.dense(SQUARE, heads=2).expand(1, 2, 9, 9)[0], whole[row])


def test_rows_are_known_for_data_alone():
    valid = Padding.from_lengths([3, 9])
    assert len(row_masks(Causal() & valid, 2)) == 2
    assert len(row_masks(valid & Where(lambda b, h, q_idx, kv_idx: b == 0), 2)) == 1
    assert len(row_masks(Causal() & SlidingWindow(3), 2)) == 1


def test_the_mask_of_a_row_is_made_once():
    valid = Padding.from_lengths([3, 9])
    assert row_masks(valid, 2)[1] is row_masks(Causal() & valid, 2)[1].parts[1]


def test_edges_are_where_queries_begin_to_attend_to_other_keys():
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 6, 6]])
    assert edges_of(Documents(ids), 0, 6) == [2, 4, 5]
    assert edges_of(Causal() & Documents(ids[:1]), 3, 6) == [5]
    assert edges_of(Padding.from_lengths([2], total=6), 0, 9) == [2, 6]
    assert edges_of(Chunked(4, start=torch.tensor([1, 3])), 2, 12) == [3, 5, 7, 9, 11]
    assert edges_of(~Prefix(3) | Causal(), 0, 9) == [3]
    assert edges_of(Causal() & SlidingWindow(3), 0, 9) == []


def test_edges_of_a_dense_mask_are_counted_from_its_first_query():
    keep = torch.zeros(256, 256, dtype=torch.bool)
    keep[:128, :128] = keep[128:, 128:] = True
    assert edges_of(Dense(keep).within(Span(10, 266, 0, 256)), 10, 266) == [138]


def test_rules_of_distance_alone():
    assert (Causal() & ~SlidingWindow(2) | SlidingWindow(3)).relative
    assert not (Causal() | Prefix(2)).relative
