"""Intervals of visible keys against the masks as tensors."""

import pytest
import torch

from regard.masks import (
    EVERYTHING,
    NOTHING,
    Causal,
    Chunked,
    Dense,
    Documents,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
)
from regard.masks.intervals import intervals_of

IDS = torch.tensor([[4, 4, 1, 1, 1, 7], [0, 0, 0, 0, 2, 2]])
INTERVALS = {
    "everything": EVERYTHING,
    "nothing": NOTHING,
    "causal": Causal(),
    "window": SlidingWindow(3),
    "chunks": Chunked(4),
    "chunks from rows' starts": Chunked(4, start=torch.tensor([1, 3])),
    "left padding": Padding(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()),
    "documents": Documents(IDS),
    "all of them": Causal() & SlidingWindow(4) & Documents(IDS) & Padding.from_lengths([12, 9]),
}
OTHERS = {
    "two runs": Padding(torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()),
    "a document in pieces": Documents(torch.tensor([[1, 2, 1]])),
    "a prefix": Causal() | Prefix(3),
    "a tensor": Dense(torch.ones(4, 9).bool()),
}
RAGGED = Span.ragged(torch.tensor([2, 5]), queries=4, kv_start=0, kv_stop=9, bounds=(2, 5))
SPANS = [Span(0, 9, 0, 9), Span(5, 9, 2, 9), Span(3, 4, 0, 12), RAGGED]


@pytest.mark.parametrize("span", SPANS, ids=str)
@pytest.mark.parametrize("name", INTERVALS)
def test_an_interval_contains_the_visible_keys(name, span):
    mask = INTERVALS[name]
    keep = mask.dense(span, batch=2, heads=1).expand(2, 1, span.num_queries, span.num_keys)[:, 0]
    if name == "all of them" and span.kv_stop > 9:
        return  # the second row's padding ends inside this span: two runs
    found = intervals_of(mask, span)
    assert found is not None
    starts, stops = (each[..., None] for each in found)
    keys = torch.arange(span.num_keys)
    assert ((keys >= starts) & (keys < stops)).expand_as(keep).equal(keep)
    assert intervals_of(mask, span) is found or span is RAGGED  # memoised


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_have_none(name):
    assert intervals_of(OTHERS[name], Span(0, 4, 0, 9)) is None
