"""Tokens in messages: what is packed, what arrives, and how it is arranged."""

import pytest
import torch

from ranks import on_ranks
from regard import Causal, Documents
from regard.distributed.context.exchanging import (
    Exchange,
    Round,
    Tokens,
    arrange,
    message_of,
    streams_of,
    token_bytes,
)
from regard.distributed.context.needed import length_of, needs_of, slots_of
from regard.distributed.ranks import Ranks
from regard.distributed.shards import Shards


def tokens(runs, dtypes=(torch.float32,)):
    """Tokens whose elements are their slots."""
    slots = torch.tensor([slot for run in runs for slot in range(*run)])
    shapes = [(2, 1, len(slots), width) for width in (3, 1, 2)]
    pairs = zip(shapes, dtypes, strict=False)
    each = (slots.view(1, 1, -1, 1).expand(shape).to(dtype).clone() for shape, dtype in pairs)
    return Tokens(list(runs), tuple(each))


def slots(found):
    (first, *rest) = (x[0, 0, :, 0].tolist() for x in found.streams)
    assert all(each == first for each in rest)
    return first


def test_messages_hold_streams_of_any_dtypes_aligned():
    dtypes = torch.uint8, torch.float64, torch.bfloat16
    held = tokens([(3, 6), (10, 13)], dtypes)
    runs = [(4, 6), (11, 12)]
    message = message_of(held, runs)
    assert message.dtype == torch.uint8
    assert message.numel() == 3 * token_bytes(held.streams) == 3 * 2 * (3 * 1 + 1 * 8 + 2 * 2)
    found = Tokens(runs, streams_of(message, held.streams, 3))
    assert [x.dtype for x in found.streams] == list(dtypes)
    assert slots(found) == [4, 5, 11]


def test_slots_that_are_not_held_are_an_error():
    with pytest.raises(AssertionError, match=r"\(5, 8\) are not among"):
        message_of(tokens([(3, 6)]), [(5, 8)])


def test_tokens_are_copied_and_added_by_their_slots():
    whole = tokens([(0, 8)])
    part = tokens([(2, 3), (5, 7)])
    whole.add(part, part.runs)
    assert slots(whole) == [0, 1, 4, 3, 4, 10, 12, 7]
    whole.copy(part, [(5, 7)])
    assert slots(whole) == [0, 1, 4, 3, 4, 5, 6, 7]


def test_parts_are_arranged_in_order_of_their_slots():
    found = arrange([tokens([(6, 8)]), tokens([(0, 2), (8, 9)])], [(0, 200)])
    assert found.runs == [(0, 9)]
    assert slots(found) == [0, 1, 0, 0, 0, 0, 6, 7, 8]  # hidden slots between are zeros


def test_runs_are_not_joined_over_other_ranks_tokens():
    held = tokens([(0, 2), (6, 8)])
    assert arrange([held], [(0, 3), (5, 9)]) is held


def test_runs_far_apart_are_not_joined():
    held = tokens([(0, 2), (600, 602)])
    assert arrange([held], [(0, 1000)]) is held


def _arriving(mesh, kind, mask):
    ranks, shards = Ranks(mesh), Shards(23, mesh.size())
    needs = needs_of(mask, shards)
    exchange = Exchange(ranks, needs, kind)
    own = tokens(slots_of(shards, ranks.rank), (torch.float32, torch.int32))
    seen = {}
    for step, found in exchange.arrivals(own):
        assert length_of(found.runs) in (0, found.streams[0].shape[2])
        if found.runs:
            seen[step.sources] = dict(zip(slots_of_runs(found.runs), slots(found), strict=True))
    return seen


def slots_of_runs(runs):
    return [slot for run in runs for slot in range(*run)]


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("mask", [Causal(), Documents(torch.arange(23) // 6)])
def test_what_arrives_is_what_is_needed(number, mask):
    shards = Shards(23, number)
    needs = needs_of(mask, shards)
    for rank, seen in enumerate(on_ranks(number, _arriving, "ring", mask)):
        for other in range(number):
            if other == rank:
                continue
            needed = slots_of_runs(needs.of(rank, other))
            arrived = seen.get((other,), {})
            assert set(needed) <= set(arrived)
            assert all(arrived[slot] == slot for slot in needed)
            assert all(arrived[slot] == 0 for slot in set(arrived) - set(needed))
    for rank, seen in enumerate(on_ranks(number, _arriving, "gather", mask)):
        (arrived,) = seen.values()
        needed = [k for other in range(number) for k in slots_of_runs(needs.of(rank, other))]
        assert set(needed) <= set(arrived)
        assert all(arrived[slot] == slot for slot in needed)


def _rounds(mesh):
    ranks = Ranks(mesh)
    needs = needs_of(Causal(), Shards(8, mesh.size()))
    return Exchange(ranks, needs, "ring").rounds, Exchange(ranks, needs, "gather").rounds


def test_each_message_of_a_step_has_its_receiver_in_the_same_step():
    every = on_ranks(4, _rounds)
    for kind in (0, 1):
        for steps in zip(*(rounds[kind] for rounds in every), strict=True):
            sends = {(rank, to) for rank, step in enumerate(steps) for to in step.receivers}
            arrivals = {
                (source, rank) for rank, step in enumerate(steps) for source in step.sources
            }
            assert sends == {pair for pair in arrivals if pair[0] != pair[1]}
    assert every[1][0][1] == Round((0,), (2,))


def _returned(mesh, kind):
    """Each rank returns, of every token that it has received, its own number."""
    ranks, shards = Ranks(mesh), Shards(23, mesh.size(), "contiguous")
    exchange = Exchange(ranks, needs_of(Causal(), shards), kind)
    own = tokens(slots_of(shards, ranks.rank))
    total = Tokens(own.runs, (torch.zeros_like(own.streams[0]),))
    for step, found in exchange.arrivals(own):
        grads = Tokens(found.runs, (torch.full_like(found.streams[0], 10.0**ranks.rank),))
        for part in exchange.return_gradients(step, grads).wait():
            total.add(part, part.runs)
    return slots(total)


@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_gradients_come_back_to_the_tokens(kind):
    assert [set(each) for each in on_ranks(3, _returned, kind)] == [{110.0}, {100.0}, {0.0}]
