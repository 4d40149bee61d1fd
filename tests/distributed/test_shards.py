"""Which tokens each rank holds."""

import pytest
import torch

from regard.distributed.shards import Shards

LAYOUTS = ("zigzag", "contiguous")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [0, 1, 5, 8, 33, 100])
def test_every_slot_is_held_once_and_lengths_are_even(layout, ranks, length):
    shards = Shards(length, ranks, layout)
    slots = [shards.positions(rank).tolist() for rank in range(ranks)]
    assert sorted(slot for each in slots for slot in each) == list(range(length))
    assert [len(each) for each in slots] == list(shards.lengths)
    assert max(shards.lengths) - min(shards.lengths) <= (2 if layout == "zigzag" else 1)


def test_a_zigzag_takes_pieces_from_both_ends():
    shards = Shards(16, 4)
    assert [shards.pieces(rank) for rank in range(4)] == [
        ((0, 2), (14, 16)),
        ((2, 4), (12, 14)),
        ((4, 6), (10, 12)),
        ((6, 8), (8, 10)),
    ]


def test_contiguous_shards_follow_one_another():
    assert [Shards(7, 3, "contiguous").pieces(rank) for rank in range(3)] == [
        ((0, 2),),
        ((2, 4),),
        ((4, 7),),
    ]


def test_empty_pieces_are_left_out():
    assert [Shards(2, 4).pieces(rank) for rank in range(4)] == [((1, 2),), (), (), ((0, 1),)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_taken_and_joined_tokens_are_the_sequence(layout, dim):
    x = torch.randn(11, 11, 11)
    shards = Shards(11, 3, layout)
    taken = [shards.take(x, rank, dim) for rank in range(3)]
    for rank, each in enumerate(taken):
        assert torch.equal(each, x.index_select(dim, shards.positions(rank)))
    assert torch.equal(shards.joined(taken, dim), x)


def test_taking_has_a_gradient():
    x = torch.zeros(5, requires_grad=True)
    Shards(5, 2).take(x, 0, 0).sum().backward()
    assert x.grad.tolist() == [1, 0, 0, 1, 1]


def test_what_is_refused(unchecked):
    with pytest.raises(ValueError, match="length is 0 or more tokens, got -1"):
        Shards(-1, 2)
    with pytest.raises(ValueError, match="ranks is 1 or more, got 0"):
        Shards(4, 0)
    with pytest.raises(ValueError, match="got 'striped'"):
        Shards(4, 2, "striped")
    with pytest.raises(ValueError, match=r"x has 3 tokens along dim 1 \(shape \(4, 3\)\)"):
        Shards(4, 2).take(torch.zeros(4, 3), 0)


def test_a_zigzag_balances_causal_work():
    """Query i sees i + 1 keys."""
    even, uneven = (
        [int((shards.positions(rank) + 1).sum()) for rank in range(4)]
        for shards in (Shards(8192, 4, "zigzag"), Shards(8192, 4, "contiguous"))
    )
    assert max(even) <= 1.01 * min(even)
    assert max(uneven) > 6 * min(uneven)
