"""Which tokens are sent: no more than some query of the receiver may attend to."""

from collections import OrderedDict
from itertools import product

import pytest
import torch

from regard import EVERYTHING, Causal, Chunked, Dense, Documents, Mask, SlidingWindow, Where
from regard.distributed.context import needed
from regard.distributed.context.needed import Bytes, bytes_sent, needs_of, slots_of
from regard.distributed.shards import Shards
from regard.masks.runs import FAR, Shown
from shard_calls import BATCH, named_masks

LAYOUTS = ("zigzag", "contiguous")


def visible(sees, length):
    """Which keys each query may attend to in some row, and in how many rows."""
    cells = [
        [sum(sees(b, 0, q, k) for b in range(BATCH)) for k in range(length)] for q in range(length)
    ]
    return torch.tensor(cells)


@pytest.fixture
def small(monkeypatch):
    """Blocks of a few queries, so that short sequences have several."""
    monkeypatch.setattr(needed, "QUERIES", 8)
    monkeypatch.setattr(needed, "_TABLES", OrderedDict())


@pytest.mark.parametrize("length", [1, 7, 33])
def test_what_is_needed_is_what_is_visible(length, small):
    torch.manual_seed(length)
    for mask, sees in named_masks(length):
        counts = visible(sees, length)
        for ranks, layout in product((2, 3, 4), LAYOUTS):
            shards = Shards(length, ranks, layout)
            slots = [shards.positions(rank) for rank in range(ranks)]
            needs = needs_of(mask, shards)
            for receiver, sender in product(range(ranks), repeat=2):
                seen = counts[slots[receiver]][:, slots[sender]].any(0)
                exact = sorted(slots[sender][seen].tolist())
                sent = [k for run in needs.of(receiver, sender) for k in range(*run)]
                if "Dense" in repr(mask):  # known by strips of queries
                    assert set(exact) <= set(sent) <= set(slots[sender].tolist()), mask
                else:
                    assert sent == exact, (mask, shards)


def test_a_window_sends_its_own_width():
    window = Causal() & SlidingWindow(1024)
    contiguous = needs_of(window, Shards(8192, 4, "contiguous"))
    assert [contiguous.sent_tokens(rank) for rank in range(4)] == [1023] * 3 + [0]
    zigzag = needs_of(window, Shards(8192, 4))
    assert [zigzag.received_tokens(rank) for rank in range(4)] == [1023, 2046, 2046, 1023]


def test_sent_and_received_tokens_are_as_many():
    needs = needs_of(Causal() & Chunked(10), Shards(47, 4))
    sent, received = needs.sent_tokens, needs.received_tokens
    assert sum(map(sent, range(4))) == sum(map(received, range(4))) > 0


def test_masks_without_a_structure_need_everything():
    opaque = Where(lambda b, h, q, k: q - k == 1)
    for mask in (opaque, EVERYTHING):
        needs = needs_of(mask, Shards(10, 2, "contiguous"))
        assert needs.of(0, 1) == [(5, 10)] and needs.of(1, 0) == [(0, 5)]
    needs = needs_of(opaque & Causal(), Shards(10, 2, "contiguous"))
    assert needs.of(0, 1) == [] and needs.of(1, 0) == [(0, 5)]


class Odd(Mask):
    """A rule of a caller's own, known by its runs."""

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx + 2 >= q_idx

    def runs(self, first, last):
        return Shown([(first - 2, FAR)], [(last - 2, FAR)])


def test_rules_of_the_caller_are_known_by_their_runs():
    assert needs_of(Odd(), Shards(10, 2, "contiguous")).of(1, 0) == [(3, 5)]


def test_rows_that_differ_are_joined():
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1]])
    needs = needs_of(Documents(ids), Shards(8, 2, "contiguous"))
    assert needs.of(1, 0) == [(2, 4)] and needs.of(0, 1) == [(4, 8)]


def test_pieces_that_follow_one_another_are_one_run():
    assert slots_of(Shards(8, 2), 1) == [(2, 6)]
    assert needs_of(EVERYTHING, Shards(8, 2)).of(0, 1) == [(2, 6)]


def test_tables_are_memoised_while_the_data_is_the_same():
    ids = torch.zeros(1, 8, dtype=torch.long)
    mask = Causal() & Documents(ids)
    assert needs_of(mask, Shards(8, 2)) is needs_of(Causal() & mask.parts[1], Shards(8, 2))
    ids[0, 4:] = 1
    with pytest.raises(ValueError, match="written in place"):
        needs_of(mask, Shards(8, 2))


def test_a_dense_mask_is_of_the_whole_sequence():
    with pytest.raises(ValueError, match=r"here \[8, 8\]"):
        needs_of(Dense(torch.ones(4, 8, dtype=torch.bool)), Shards(8, 2))


def test_bytes():
    needs = needs_of(Causal(), Shards(8, 2, "contiguous"))  # rank 1 needs the four of rank 0
    options = {"token_bytes": 10, "gradient_bytes": 100}
    assert bytes_sent(needs, 0, **options) == Bytes(40, 40)
    assert bytes_sent(needs, 1, **options) == Bytes(0, 400)
    assert bytes_sent(needs, 0, **options, exchange="gather") == Bytes(40, 0)
    assert bytes_sent(needs, 1, **options, exchange="gather") == Bytes(0, 400)
