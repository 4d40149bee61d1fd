"""Masks as bands and segments: the keys that they show are those of the mask."""

from itertools import pairwise

import pytest
import torch

from cases import draw_case
from regard import (
    Causal,
    Chunked,
    Dense,
    Documents,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
    prepare,
)
from regard.ops.segments import Band, Region, region_of

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 4, 4, 3]])
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])


def call_of(mask, queries=9, keys=9, batch=2, span=None, **options):
    q, k = torch.zeros(batch, 4, queries, 8), torch.zeros(batch, 2, keys, 8)
    span = span or Span(keys - queries, keys, 0, keys)
    return prepare(q, k, k, mask=mask, span=span, **options).call


def shown(region: Region, batch: int, queries: int, keys: int) -> torch.Tensor:
    """The cells `[B, L, S]` that FlashAttention computes for a region, by its documentation."""
    cells = torch.zeros(batch, queries, keys, dtype=torch.bool)
    left, right = (queries + keys if limit < 0 else limit for limit in region.band)
    if region.segments is None:
        segments = [(row, range(queries), range(keys)) for row in range(batch)]
    else:
        assert queries == keys
        ends, tokens = region.segments.ends.tolist(), region.segments.tokens
        places = list(range(batch * queries)) if tokens is None else tokens.tolist()
        segments = []
        for begin, end in pairwise(ends):
            rows = {place // queries for place in places[begin:end]}
            assert len(rows) == 1
            inside = [place % queries for place in places[begin:end]]
            segments.append((rows.pop(), inside, inside))
        assert region.segments.longest == max(map(len, (each[1] for each in segments)), default=0)
    for row, of_queries, of_keys in segments:
        for i, query in enumerate(of_queries):
            beside = i + len(of_keys) - len(of_queries)
            for j, key in enumerate(of_keys):
                cells[row, query, key] = beside - left <= j <= beside + right
    return cells


def assert_same(call):
    region, keep = region_of(call), call.keep()
    batch, queries, keys = call.batch, call.num_queries, call.num_keys
    wide = keep[(None,) * (4 - keep.dim())].expand(batch, -1, queries, keys)
    assert wide[:, :1].expand_as(wide).equal(wide)
    assert shown(region, batch, queries, keys).equal(wide[:, 0])


TAKEN = [
    None,
    Causal(),
    SlidingWindow(3),
    Causal() & SlidingWindow(3),
    Causal() & SlidingWindow(1),
    Documents(IDS),
    Documents(IDS[:1]),
    Documents(IDS[:, :7]),  # the last document goes on
    Causal() & Documents(IDS),
    Causal() & Documents(IDS) & SlidingWindow(2),
    Documents(IDS) & Documents(IDS.flip(1)),
    Causal() & Padding(LEFT),
    Causal() & Padding(LEFT[:, :4]),
    Causal() & Padding(LEFT) & Documents(IDS),
    Causal() & Padding(torch.tensor([[0] * 9, [0] * 8 + [1]])),  # a row without a token
]


@pytest.mark.parametrize("mask", TAKEN, ids=str)
def test_square_masks(mask):
    assert_same(call_of(mask))


@pytest.mark.parametrize("mask", TAKEN[:5], ids=str)
@pytest.mark.parametrize("span", [Span(6, 9, 0, 9), Span(6, 9, 5, 9), Span(3, 9, 0, 9)], ids=str)
def test_chunks(mask, span):
    assert_same(call_of(mask, span.num_queries, span.num_keys, span=span))


@pytest.mark.parametrize("mask", TAKEN[:2], ids=str)
def test_queries_after_all_keys(mask):
    assert_same(call_of(mask, 9, 5, span=Span(0, 9, 0, 5)))


REFUSED = [
    (Chunked(4), {}),
    (Prefix(torch.tensor([4, 5])), {}),
    (Causal() | Prefix(4), {}),
    (~Causal(), {}),
    (Dense(torch.rand(9, 9) < 0.5), {}),
    (Padding(LEFT), {}),  # padded queries would see
    (Causal() & Padding(LEFT.flip(1)), {}),  # padding after real tokens
    (Causal() & Padding(torch.tensor([[0, 1, 0, 1, 1, 1, 1, 1, 1]])), {}),
    (Documents(torch.tensor([0, 0, 1, 1, 0, 0, 2, 2, 2])), {}),  # one in two pieces
    (Causal() & Documents(IDS), {"span": Span(6, 9, 0, 9), "queries": 3}),
    (Causal() & SlidingWindow(3), {"span": Span(0, 9, 0, 5), "keys": 5}),  # the last see none
]


@pytest.mark.parametrize(("mask", "sizes"), REFUSED, ids=str)
def test_other_masks_are_none(mask, sizes):
    assert region_of(call_of(mask, **sizes)) is None


def test_rows_that_start_at_different_slots_are_none():
    starts = torch.tensor([4, 6])
    span = Span.ragged(starts, queries=3, kv_start=0, kv_stop=9, bounds=(4, 6))
    assert region_of(call_of(Causal(), 3, span=span)) is None


def test_a_mask_that_is_a_band_is_told_as_one():
    assert region_of(call_of(Causal() & SlidingWindow(4), 3)).band == Band(3, 0)
    assert region_of(call_of(None)).band == Band(-1, -1)


def test_random_masks_are_right_where_they_are_taken(unchecked):
    taken = 0
    for seed in range(50_000, 50_600):
        case = draw_case(seed, torch.float32)
        call = prepare(case.q, case.k, case.v, **case.given).call
        if call.num_keys and call.num_queries and region_of(call) is not None:
            assert_same(call)
            taken += 1
    assert taken > 60
