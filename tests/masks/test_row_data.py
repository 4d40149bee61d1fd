"""Tensors of masks: checks, summaries, indices, and writes in place."""

import random

import pytest
import torch

from cases import Sizes, draw_mask
from regard import Causal, Chunked, Documents, Padding, Prefix, SlidingWindow, Span, Where
from regard.masks.row_data import (
    as_booleans,
    as_rows,
    at_row,
    bounds,
    check_size,
    check_vector,
    clamped,
    distinct,
    first_true,
    last_true,
    readable,
    row_masks,
)
from regard.versions import ChangedInPlace

SQUARE = Span(0, 9, 0, 9)


@pytest.mark.parametrize("size", [0, -1, 1.0, True, None])
def test_a_size_is_a_whole_number_of_at_least_one(size):
    with pytest.raises(ValueError, match=r"Window has a whole size .*at least 1, got .*because"):
        check_size("Window", size, "because")
    check_size("Window", 1, "because")


def test_a_single_row_broadcasts():
    ids = torch.tensor([3, 4])
    assert as_rows("Documents", "ids", ids).shape == (1, 2)
    assert as_rows("Documents", "ids", ids[None]).shape == (1, 2)
    data = as_rows("Documents", "ids", ids)
    assert at_row(data, torch.tensor([5, 7])).tolist() == [3, 4]
    both = torch.tensor([[3, 4], [5, 6]])
    assert at_row(both, torch.tensor([1, 0])).tolist() == [[5, 6], [3, 4]]


def test_errors_of_shape_and_dtype(unchecked):
    with pytest.raises(TypeError, match=r"Documents takes ids as a tensor .*got list"):
        as_rows("Documents", "ids", [1, 2])
    with pytest.raises(ValueError, match=r"a mask of queries by keys is Dense\(keep\)"):
        as_rows("Documents", "ids", torch.zeros(1, 2, 3))
    for wrong in (torch.zeros(2), torch.zeros(1, 2, dtype=torch.long), 3):
        with pytest.raises(ValueError, match=r"start is \[B\], one whole number for each row"):
            check_vector("start", wrong)
    check_vector("start", None)


def test_integers_0_and_1_become_booleans():
    assert as_booleans(torch.tensor([0, 1, 1])).tolist() == [False, True, True]
    with pytest.raises(TypeError, match=r"takes booleans, or whole numbers 0 and 1, got torch.fl"):
        as_booleans(torch.ones(2))
    with pytest.raises(ValueError, match=r"got numbers from 0 to 2: .*Documents\(ids\)"):
        as_booleans(torch.tensor([0, 2]))


def test_columns_elements_and_bounds():
    flags = torch.tensor([[False, True, False, False], [False, False, True, False]])
    assert (first_true(flags), last_true(flags)) == (1, 3)
    assert (first_true(flags[:, :1]), last_true(flags[:, :1])) == (1, 0)
    assert distinct(torch.tensor([3, 1, 3])) == (1, 3)
    assert bounds(torch.tensor([4, 2])) == (2, 4)
    assert bounds(7) == (7, 7)
    assert bounds(torch.tensor([], dtype=torch.long)) is None


def test_meta_tensors_are_not_read():
    meta = torch.zeros(2, 3, dtype=torch.bool, device="meta")
    assert not readable(meta)
    assert first_true(meta) is last_true(meta) is distinct(meta) is bounds(meta) is None


def test_indices_are_clamped():
    assert clamped(torch.tensor([-2, 0, 5]), 3).tolist() == [0, 0, 2]
    assert clamped(torch.tensor([5]), 1) == 0


def test_masks_with_the_same_tensors_are_equal():
    starts = torch.tensor([1, 0])
    mask = Chunked(2, starts)
    assert mask == Chunked(2, starts) and hash(mask) == hash(Chunked(2, starts))
    others = Chunked(3, starts), Chunked(2, starts.clone()), Prefix(2, starts), Causal()
    assert not any(mask == other for other in others)


def test_data_written_in_place_is_refused():
    valid = torch.ones(1, 3, dtype=torch.bool)
    mask = Padding(valid)
    assert mask.dense(Span(0, 3, 0, 3)).all()
    valid[0, 1] = False
    with pytest.raises(ChangedInPlace, match="written in place after the mask was made"):
        mask.dense(Span(0, 3, 0, 3))


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


def test_rules_of_distance_alone():
    assert (Causal() & ~SlidingWindow(2) | SlidingWindow(3)).relative
    assert not (Causal() | Prefix(2)).relative
