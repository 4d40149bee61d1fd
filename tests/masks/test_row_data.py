"""Data that masks hold for each row: what may be given, what is read of it, how it is printed."""

import pytest
import torch

from regard import Causal, Padding, Span
from regard.masks.row_data import (
    bounds,
    chunk,
    clip,
    code,
    distinct,
    equal,
    first_true,
    last_true,
    positive,
    readable,
    row,
    rows,
    vector,
    zero_or_one,
)
from regard.versions import ChangedInPlace


@pytest.mark.parametrize("size", [0, -1, 1.0, True, None])
def test_a_size_is_a_whole_number_of_at_least_one(size):
    with pytest.raises(ValueError, match=r"Window has a whole size of at least 1, got .*because"):
        positive("Window", "because", size)
    positive("Window", "because", 1)


def test_one_row_serves_all_sequences():
    ids = torch.tensor([3, 4])
    assert rows("Documents", "ids", ids).shape == (1, 2)
    assert rows("Documents", "ids", ids[None]).shape == (1, 2)
    data = rows("Documents", "ids", ids)
    assert row(data, torch.tensor([5, 7])).tolist() == [3, 4]
    both = torch.tensor([[3, 4], [5, 6]])
    assert row(both, torch.tensor([1, 0])).tolist() == [[5, 6], [3, 4]]


def test_what_is_not_of_rows_is_refused(unchecked):
    with pytest.raises(TypeError, match=r"Documents takes ids as a tensor .*got list"):
        rows("Documents", "ids", [1, 2])
    with pytest.raises(ValueError, match=r"a mask of queries by keys is Dense\(keep\)"):
        rows("Documents", "ids", torch.zeros(1, 2, 3))
    for wrong in (torch.zeros(2), torch.zeros(1, 2, dtype=torch.long), 3):
        with pytest.raises(ValueError, match=r"start is \[B\], one whole number for each row"):
            vector("start", wrong)
    vector("start", None)


def test_numbers_are_zero_or_one():
    assert zero_or_one(torch.tensor([0, 1, 1])).tolist() == [False, True, True]
    with pytest.raises(TypeError, match=r"takes booleans, or whole numbers 0 and 1, got torch.fl"):
        zero_or_one(torch.ones(2))
    with pytest.raises(ValueError, match=r"got numbers from 0 to 2: .*Documents\(ids\)"):
        zero_or_one(torch.tensor([0, 2]))


def test_what_is_read_of_data():
    flags = torch.tensor([[False, True, False, False], [False, False, True, False]])
    assert (first_true(flags), last_true(flags)) == (1, 3)
    assert (first_true(flags[:, :1]), last_true(flags[:, :1])) == (1, 0)
    assert distinct(torch.tensor([3, 1, 3])) == (1, 3)
    assert bounds(torch.tensor([4, 2])) == (2, 4)
    assert bounds(7) == (7, 7)
    assert bounds(torch.tensor([], dtype=torch.long)) is None


def test_values_of_meta_tensors_are_not_read():
    away = torch.zeros(2, 3, dtype=torch.bool, device="meta")
    assert not readable(away)
    assert first_true(away) is last_true(away) is distinct(away) is bounds(away) is None


def test_indices_stay_inside_and_chunks_go_on_below_zero():
    assert clip(torch.tensor([-2, 0, 5]), 3).tolist() == [0, 0, 2]
    assert clip(torch.tensor([5]), 1) == 0
    assert chunk(torch.tensor([-1, 0, 3, 4]), 4).tolist() == [-1, 0, 0, 1]


def test_masks_are_equal_by_their_numbers_and_by_the_same_tensors():
    valid = torch.tensor([[True, False]])
    assert equal(Padding(valid), Padding(valid), ("valid",))
    assert not equal(Padding(valid), Padding(valid.clone()), ("valid",))
    assert not equal(Padding(valid), Causal(), ("valid",))


def test_data_written_in_place_is_noticed():
    valid = torch.ones(1, 3, dtype=torch.bool)
    mask = Padding(valid)
    assert mask.dense(Span(0, 3, 0, 3)).all()
    valid[0, 1] = False
    with pytest.raises(ChangedInPlace, match="written in place after the mask had read it"):
        mask.dense(Span(0, 3, 0, 3))


def test_code_names_tensors_by_their_shapes():
    assert code("Chunked", size=3, start=None) == "Chunked(size=3)"
    assert code("Chunked", start=torch.zeros(2)) == "Chunked(start=<[2] float32>)"
