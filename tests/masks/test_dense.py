"""A mask that is a tensor: placed at the slots of a call, and made of an additive mask."""

import pytest
import torch

from regard import Dense, Span


def test_a_dense_mask_is_placed_at_the_slots_of_the_span():
    keep = torch.rand(2, 3, 4) < 0.5
    span = Span(5, 8, 2, 6)
    mask = Dense(keep).within(span)
    assert torch.equal(mask.dense(span, batch=2), keep[:, None])
    assert torch.equal(mask.dense(Span(5, 8, 3, 5), batch=2), keep[:, None, :, 1:3])
    assert torch.equal(mask.dense(Span(6, 8, 3, 5), batch=2), keep[:, None, 1:, 1:3])
    b = torch.arange(2)[:, None, None, None]
    q, kv = torch.arange(5, 8)[:, None], torch.arange(2, 6)
    assert torch.equal(mask(b, torch.tensor(0), q, kv), keep[:, None])
    with pytest.raises(ValueError, match=r"\[3, 5\]"):
        Dense(keep).within(Span(0, 3, 0, 5))


def test_an_additive_mask_becomes_a_dense_mask():
    lowest = torch.finfo(torch.float32).min
    added = torch.tensor([[0.0, -torch.inf], [lowest, 0.0], [-1e4, 0.0]])
    assert Dense.from_additive(added).keep.tolist() == [[True, False], [False, True], [False, True]]
    coarse = torch.tensor([[0.0, -1e4]], dtype=torch.bfloat16)  # rounded to -9984
    assert Dense.from_additive(coarse).keep.tolist() == [[True, False]]
    with pytest.raises(ValueError, match="split_additive"):
        Dense.from_additive(torch.tensor([[0.0, -1.0]]))


def test_edges_of_a_dense_mask_are_counted_from_its_first_query():
    keep = torch.zeros(256, 256, dtype=torch.bool)
    keep[:128, :128] = keep[128:, 128:] = True
    mask = Dense(keep).within(Span(10, 266, 0, 256))
    assert mask.finder()(10, 265).edges_between(10, 266) == [138]
