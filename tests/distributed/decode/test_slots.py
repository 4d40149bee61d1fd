"""The table of slots, against a list that holds the rank of every slot."""

from copy import copy
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.distributed.decode.slots import Segment, Slots
from regard.distributed.shards import Shards


def owners(slots):
    """The rank of each slot, and the indices of each rank's slots in its storage."""
    ranks, indices = [None] * slots.length, [[] for _ in slots.counts]
    for rank, pieces in enumerate(slots.pieces):
        for piece in pieces:
            for offset, slot in enumerate(range(piece.start, piece.stop)):
                assert ranks[slot] is None
                ranks[slot] = rank
                assert piece.at + offset == len(indices[rank])
                indices[rank].append(slot)
    assert None not in ranks
    assert [len(each) for each in indices] == slots.counts
    return ranks, indices


@pytest.mark.parametrize("page", [1, 3, 64])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pages_go_round_the_ranks(ranks, page):
    slots = Slots(ranks, page)
    for new in (1, 1, 0, 200, 5, 1):
        slots.add(slots.following(new))
    assert owners(slots)[0] == [slot // page % ranks for slot in range(208)]


sizes = st.lists(st.tuples(st.booleans(), st.integers(0, 23)), max_size=12)


@given(st.integers(2, 4), st.sampled_from([1, 3, 8]), sizes)
def test_truncating_undoes_what_was_appended(ranks, page, steps):
    slots = Slots(ranks, page)
    for append, number in steps:
        if append:
            before = copy(slots)
            slots.add(slots.following(number))
            again = copy(slots)
            again.truncate(before.length)
            assert vars(again) == vars(before)
        else:
            slots.truncate(min(number, slots.length))
        assert owners(slots)[0] == [slot // page % ranks for slot in range(slots.length)]


@given(st.integers(2, 4), st.integers(1, 40), st.data())
def test_segments_are_the_tokens_in_runs(ranks, length, data):
    slots = Slots(ranks, data.draw(st.integers(1, 5)))
    slots.add(slots.following(length))
    edges = sorted(data.draw(st.sets(st.integers(0, length + 3), max_size=6)))
    runs = list(zip(edges[::2], edges[1::2], strict=False))
    visible = {slot for start, stop in runs for slot in range(start, stop)}
    _, indices = owners(slots)
    for rank in range(ranks):
        segments = slots.segments(rank, runs)
        found = [index for start, stop, _ in segments for index in range(start, stop)]
        assert found == [at for at, slot in enumerate(indices[rank]) if slot in visible]
        named = [slot for segment in segments for start, stop in segment.runs
                 for slot in range(start, stop)]  # fmt: skip
        assert named == [indices[rank][at] for at in found]
        assert all(a.stop < b.start for a, b in pairwise(segments))


def test_pages_side_by_side_are_one_segment():
    slots = Slots(2, 2)
    slots.add(slots.following(4000))
    (segment,) = slots.segments(1, [(0, 4000)])
    assert segment[:2] == (0, 2000)
    assert segment.runs[:2] == [(2, 4), (6, 8)]
    assert slots.segments(1, [(4, 6)]) == []
    assert slots.segments(0, [(5, 9)]) == [Segment(3, 5, [(5, 6), (8, 9)])]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("length", [1, 5, 26])
def test_shards_then_pages_for_the_rank_with_the_fewest_tokens(layout, length):
    shards, slots = Shards(length, 3, layout), Slots(3, 2)
    slots.add(slots.placed(shards.pieces(rank) for rank in range(3)))
    ranks, _ = owners(slots)
    assert all(ranks[slot] == rank for rank in range(3) for slot in shards.positions(rank).tolist())
    for _ in range(30):
        slots.add(slots.following(1))
    owners(slots)
    assert max(slots.counts) - min(slots.counts) <= 2
    slots.truncate(length // 2)
    assert owners(slots)[0] == ranks[: length // 2]


def test_held_below():
    slots = Slots(2, 3)
    slots.add(slots.following(10))
    ranks, _ = owners(slots)
    for rank in range(2):
        expected = [ranks[:slot].count(rank) for slot in range(11)]
        assert [slots.held_below(slot, rank) for slot in range(11)] == expected


@pytest.mark.parametrize("pieces", [[[(0, 2)], [(3, 4)]], [[(0, 2)], [(1, 3)]], [[(1, 2)]]])
def test_pieces_hold_each_slot_once(pieces):
    with pytest.raises(ValueError, match="hold each slot once"):
        Slots(2, 2).placed(pieces)


def test_pages_of_one_rank_side_by_side():
    """The first rank has 8 tokens less, so that it is given two pages before pages go round."""
    slots = Slots(2, 4)
    slots.add(slots.placed([[(0, 2)], [(2, 12)]]))
    for _ in range(16):
        slots.add(slots.following(1))
    assert owners(slots)[0][12:] == 12 * [0] + 4 * [1]
