"""A picture shows what the mask is, cell by cell, and how large it is by itself."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import draw_mask, draw_sizes
from regard import Causal, Dense, Documents, Padding, SlidingWindow, Span, Where


def read(picture: str) -> tuple[list[int], list[int], list[list[bool]]]:
    """A picture taken apart: its key slots, its query slots, its cells."""
    header, *lines = picture.splitlines()[1:]
    rows = [line.split() for line in lines]
    cells = [[cell == "■" for cell in row[1:]] for row in rows]
    return [int(key) for key in header.split()], [int(row[0]) for row in rows], cells


@given(st.integers(0, 10**9))
def test_a_picture_is_the_mask(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes = draw_sizes(rng)
    mask, sees = draw_mask(rng, sizes)
    span = sizes.span()
    if 0 in (span.num_queries, span.num_keys):
        return
    b, h = rng.randrange(sizes.batch), rng.randrange(sizes.heads)
    keys, queries, cells = read(mask.draw(span, b=b, h=h))
    assert keys == list(range(span.kv_start, span.kv_stop))
    assert queries == list(range(sizes.starts[b], sizes.starts[b] + span.num_queries))
    assert cells == [[bool(sees(b, h, q, k)) for k in keys] for q in queries]


def test_a_picture_looks_like_this():
    assert (Causal() & SlidingWindow(2)).draw(Span(9, 11, 8, 11)).splitlines() == [
        "Causal() & SlidingWindow(size=2)",
        "    8  9 10",
        " 9  ■  ■  ·",
        "10  ·  ■  ■",
    ]


@pytest.mark.parametrize(
    ("mask", "sizes"),
    [
        (Causal(), (8, 8)),
        (Causal() & Padding(torch.ones(2, 5).bool()), (5, 5)),
        (~Documents(torch.zeros(3).long()) | Padding(torch.ones(2).bool()), (3, 3)),
        (Dense(torch.ones(2, 4).bool()), (2, 4)),
        (Dense(torch.ones(2, 4).bool()).within(Span(6, 8, 3, 7)) & Causal(), (2, 4)),
    ],
)
def test_a_picture_is_as_large_as_the_data(mask, sizes):
    keys, queries, _ = read(mask.draw())
    assert (len(queries), len(keys)) == sizes


def test_a_picture_is_as_large_as_one_asks():
    for asked, sizes in (({"queries": 3}, (3, 3)), ({"keys": 4}, (4, 4))):
        keys, queries, _ = read(Causal().draw(**asked))
        assert (len(queries), len(keys)) == sizes
    keys, queries, _ = read(Causal().draw(2, 5))
    assert (len(queries), len(keys)) == (2, 5)


def test_a_placed_rectangle_is_drawn_at_its_place():
    keys, queries, _ = read(Dense(torch.ones(2, 4).bool()).within(Span(6, 8, 3, 7)).draw())
    assert (queries, keys) == ([6, 7], [3, 4, 5, 6])


def test_rows_and_heads_are_drawn_one_by_one():
    padded = Padding(torch.tensor([[1, 0], [0, 1]]))
    assert padded.draw(1, b=0, keys=2).endswith("0 ■ ·")
    assert padded.draw(1, b=1, keys=2).endswith("0 · ■")
    assert Where(lambda b, h, q, kv: kv <= h).draw(1, 3, h=1).endswith("0 ■ ■ ·")
    heads = Dense(torch.eye(2).bool().view(1, 2, 1, 2))
    assert heads.draw(h=1).endswith("0 · ■")
