"""Masks drawn as text: the cells and the size."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import draw_mask, draw_sizes
from regard import Causal, Dense, Documents, Padding, SlidingWindow, Span, Where


def read(drawing: str) -> tuple[list[int], list[int], list[list[bool]]]:
    """The key slots, the query slots and the cells of a drawing."""
    header, *lines = drawing.splitlines()[1:]
    rows = [line.split() for line in lines]
    cells = [[cell == "■" for cell in row[1:]] for row in rows]
    return [int(key) for key in header.split()], [int(row[0]) for row in rows], cells


@given(st.integers(0, 10**9))
def test_a_drawing_has_the_cells_of_the_mask(seed):
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


def test_a_drawing_of_a_window():
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
def test_a_drawing_is_as_large_as_the_data_of_the_mask(mask, sizes):
    keys, queries, _ = read(mask.draw())
    assert (len(queries), len(keys)) == sizes


def test_a_drawing_has_the_size_that_is_given():
    for size, sizes in (({"queries": 3}, (3, 3)), ({"keys": 4}, (4, 4))):
        keys, queries, _ = read(Causal().draw(**size))
        assert (len(queries), len(keys)) == sizes
    keys, queries, _ = read(Causal().draw(2, 5))
    assert (len(queries), len(keys)) == (2, 5)


def test_a_placed_dense_mask_is_drawn_at_its_slots():
    keys, queries, _ = read(Dense(torch.ones(2, 4).bool()).within(Span(6, 8, 3, 7)).draw())
    assert (queries, keys) == ([6, 7], [3, 4, 5, 6])


def test_one_batch_row_and_one_head_are_drawn():
    padded = Padding(torch.tensor([[1, 0], [0, 1]]))
    assert padded.draw(1, b=0, keys=2).endswith("0 ■ ·")
    assert padded.draw(1, b=1, keys=2).endswith("0 · ■")
    assert Where(lambda b, h, q, kv: kv <= h).draw(1, 3, h=1).endswith("0 ■ ■ ·")
    heads = Dense(torch.eye(2).bool().view(1, 2, 1, 2))
    assert heads.draw(h=1).endswith("0 · ■")


def test_a_notebook_shows_picture_and_code():
    html = (Causal() & Documents(torch.tensor([0, 0, 1])))._repr_html_()
    assert "<code>Causal() &amp; Documents(ids=&lt;[1, 3] int64&gt;)</code>" in html
    assert "4 of 9 cells are visible" in html
    assert "<style" not in html  # of a notebook, all cells would get it


def test_a_notebook_shows_a_large_mask_in_blocks_and_none_that_takes_seconds():
    assert "pale" in Padding(torch.ones(1, 3000).bool())._repr_html_()
    assert Padding(torch.ones(1, 100_000).bool())._repr_html_() is None


def test_a_notebook_shows_no_picture_of_what_cannot_be_drawn():
    ids = torch.tensor([0, 0, 1])
    same = Where(lambda b, h, q, kv: ids[q] == ids[kv])  # has no data for 8 slots
    assert same._repr_html_() is None
    documents = Documents(ids)
    ids += 1
    assert documents._repr_html_() is None
