"""Rectangles of scores: their places, and attention over each as a partial result."""

import pytest
import torch

from regard import EVERYTHING, Causal, Documents, Padding, Prefix, SlidingWindow, attend
from regard.distributed.context.rectangles import (
    Rectangle,
    Scoring,
    attend_rectangle,
    from_diagonal,
    rectangles,
    tiles,
)
from regard.masks import Span
from regard.ops.partial import Partial


def scoring(mask, **options):
    given = {"scale": 0.5, "softcap": None, "rule": None, "biased": False, "backend": "auto"}
    given |= {"precision": "strict", "device": torch.device("cpu"), **options}
    return Scoring(mask=mask, **given)


def test_places():
    whole = Rectangle(Span(10, 14, 20, 26), first=3, key=5)
    x = torch.arange(40).view(1, 1, 40, 1)
    assert whole.of_queries(x).flatten().tolist() == [3, 4, 5, 6]
    assert whole.of_keys(x).flatten().tolist() == [5, 6, 7, 8, 9, 10]
    part = whole.at(12, 13, 21, 23)
    assert part == Rectangle(Span(12, 13, 21, 23), first=5, key=6)
    scores = torch.arange(900).view(30, 30)
    assert part.of_scores(scores).tolist() == [[12 * 30 + 21, 12 * 30 + 22]]
    assert part.of_scores(torch.ones(2, 1, 30)).shape == (2, 1, 2)
    assert part.of_scores(torch.ones(30, 1)).shape == (1, 1)
    assert part.of_scores(torch.ones(())).shape == ()


def places(found):
    return [(each.span, each.first, each.key) for each in found]


def test_each_run_of_queries_meets_each_run_of_keys():
    assert places(rectangles([(0, 2), (6, 9)], [(3, 4), (9, 10)])) == [
        (Span(0, 2, 3, 4), 0, 0),
        (Span(0, 2, 9, 10), 0, 1),
        (Span(6, 9, 3, 4), 2, 0),
        (Span(6, 9, 9, 10), 2, 1),
    ]


def test_a_causal_mask_begins_with_its_diagonal():
    whole = Rectangle(Span(4, 8, 0, 9), first=2, key=3)
    cut = [(Span(4, 8, 0, 4), 2, 3), (Span(4, 8, 4, 9), 2, 7)]
    assert places(from_diagonal(Causal(), whole)) == cut
    assert places(from_diagonal(Causal() | Prefix(3), whole)) == cut
    assert places(from_diagonal(Causal() & SlidingWindow(3), whole)) == [(whole.span, 2, 3)]
    after = Rectangle(Span(4, 8, 4, 9), 0, 0)
    assert places(from_diagonal(Causal(), after)) == [(after.span, 0, 0)]


def test_tiles_hold_the_visible_keys_of_their_queries():
    mask = Causal() & SlidingWindow(50)
    whole = Rectangle(Span(0, 1000, 0, 1000), 0, 0)
    found = list(tiles(scoring(mask), whole, heads=1 << 14))
    assert [tile.span.num_queries for tile in found[:2]] == [64, 64]
    assert sum(tile.span.num_queries for tile in found) == 1000
    for tile in found:
        first, last = tile.span.first_query, tile.span.last_query
        assert (tile.span.kv_start, tile.span.kv_stop) == (max(0, first - 49), last + 1)
    documents = Documents(torch.arange(1000) // 500)
    hidden = Rectangle(Span(0, 500, 500, 1000), 0, 0)
    assert list(tiles(scoring(documents), hidden, heads=1)) == []


MASKS = [
    EVERYTHING,
    Causal(),
    Causal() & SlidingWindow(70),
    Causal() & Documents(torch.arange(600) // 170),
    Padding(torch.arange(600) % 3 != 0),
    SlidingWindow(5) & ~Causal(),
]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_rectangles_add_up_to_the_whole(mask, softcap):
    """Queries 200..500 of 600; keys in three runs, in any order."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 600, 4, dtype=torch.float64) for h in (2, 1, 1))
    found = Partial(
        q.new_zeros(1, 2, 300, 4), q.new_full((1, 2, 300), -torch.inf, dtype=torch.float64)
    )
    how, rows = scoring(mask, softcap=softcap), q[:, :, 200:500]
    for run in ((450, 600), (0, 250), (250, 450)):
        keys = [x[:, :, run[0] : run[1]] for x in (k, v)]
        for place in rectangles([(200, 500)], [run]):
            attend_rectangle(how, place, rows, *keys, None, found)
    expected = attend(q, k, v, mask=mask, scale=0.5, softcap=softcap, backend="eager")
    torch.testing.assert_close(found.out, expected[:, :, 200:500])


def test_which_calls_are_fused():
    assert scoring(Causal()).fused
    assert scoring(Causal(), backend="sdpa").fused
    others = ({"softcap": 1.0}, {"biased": True}, {"scale": -1.0}, {"backend": "eager"})
    assert not any(scoring(Causal(), **other).fused for other in others)
    assert not scoring(Causal(), device=torch.device("meta")).fused


def test_hidden_scores_that_overflow_have_no_effect():
    """A hidden score of +inf, plus -inf, would be NaN."""
    q = torch.full((1, 1, 4, 2), 1e30)
    k = torch.tensor([1e30, -1e30, 1.0, 1.0]).view(1, 1, 4, 1).expand(1, 1, 4, 2).contiguous()
    mask = Padding(torch.tensor([[False, True, True, True]]))
    found = Partial(torch.zeros(1, 1, 4, 2), torch.full((1, 1, 4), -torch.inf))
    place = Rectangle(Span(0, 4, 0, 4), 0, 0)
    attend_rectangle(scoring(mask), place, q, k, torch.ones(1, 1, 4, 2), None, found)
    assert torch.equal(found.out, torch.ones(1, 1, 4, 2))
