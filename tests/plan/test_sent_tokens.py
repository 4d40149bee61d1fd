"""Tokens that ranks send and receive, against tables of all queries and keys."""

from dataclasses import replace

import pytest

from regard.distributed import Shards
from regard.plan.sent_tokens import counted_ranks, layout_of, received_tokens, sent_tokens
from regard.plan.shapes import LayerShape

FULL = LayerShape(hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, v_head_dim=4)
EVERY = replace(FULL, causal=False)
LENGTHS = (8, 9, 12, 13, 16, 17, 24, 29, 31)
WINDOWS = (1, 2, 3, 4, 6, 7, 9, 13, 20, 40)


def needed(length, ranks, layout, visible):
    """Tokens by sender and receiver: those that some query of the receiver may attend to."""
    shards = Shards(length, ranks, layout)
    slots = [shards.positions(rank).tolist() for rank in range(ranks)]
    return [
        [
            0 if sender is receiver else sum(any(visible(q, k) for q in receiver) for k in sender)
            for receiver in slots
        ]
        for sender in slots
    ]


def sent_and_received(table):
    return [sum(row) for row in table], [sum(column) for column in zip(*table, strict=True)]


def by_formula(layer, layout, length, ranks):
    return [
        [count(layer, layout, length, ranks, rank) for rank in range(ranks)]
        for count in (sent_tokens, received_tokens)
    ]


def cases(layout):
    pieces = 2 if layout == "zigzag" else 1
    return [(n, ranks) for n in LENGTHS for ranks in (1, 2, 3, 4) if n >= pieces * ranks]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_what_causal_layers_send(layout):
    for length, ranks in cases(layout):
        table = needed(length, ranks, layout, lambda q, k: k <= q)
        assert by_formula(FULL, layout, length, ranks) == [*sent_and_received(table)]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_layers_that_are_not_causal_send_everything(layout):
    for length, ranks in cases(layout):
        table = needed(length, ranks, layout, lambda q, k: True)
        assert by_formula(EVERY, layout, length, ranks) == [*sent_and_received(table)]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_what_windows_send(layout):
    for length, ranks in cases(layout):
        pieces = ranks * (2 if layout == "zigzag" else 1)
        for window in WINDOWS:
            table = needed(length, ranks, layout, lambda q, k, w=window: q - w < k <= q)
            found = by_formula(replace(FULL, window=window), layout, length, ranks)
            if length % pieces == 0 or window - 1 <= length // pieces:
                assert found == [*sent_and_received(table)], (length, ranks, window)
                continue
            for mine, its in zip(found, sent_and_received(table), strict=True):
                assert max(abs(a - b) for a, b in zip(mine, its, strict=True)) <= ranks


def test_chunks_send_no_more_than_windows_of_their_size():
    for length, ranks in cases("contiguous"):
        for chunk in WINDOWS:
            table = needed(
                length, ranks, "contiguous", lambda q, k, c=chunk: k <= q and q // c == k // c
            )
            most, _ = by_formula(replace(FULL, chunk=chunk), "contiguous", length, ranks)
            exact, _ = sent_and_received(table)
            assert all(a <= b + ranks for a, b in zip(exact, most, strict=True))
    both = replace(FULL, chunk=4, window=9)
    assert by_formula(both, "contiguous", 24, 3) == by_formula(
        replace(FULL, window=4), "contiguous", 24, 3
    )


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_one_of_the_counted_ranks_sends_most(layout):
    for length, ranks in ((64, 4), (480, 5), (990, 9)):
        for window in (None, 2, 9, 50, 70, 200, 600):
            found, _ = by_formula(replace(FULL, window=window), layout, length, ranks)
            most = max(found[rank] for rank in counted_ranks(ranks))
            assert max(found) <= most + ranks, (length, ranks, window)


def test_ranks_send_what_others_receive():
    for layout in ("zigzag", "contiguous"):
        for window in (None, 5):
            sent, received = by_formula(replace(FULL, window=window), layout, 96, 4)
            assert sum(sent) == sum(received)


def test_the_layout_is_contiguous_where_no_layer_needs_balance():
    windowed, chunked = replace(FULL, window=3), replace(FULL, chunk=3)
    assert layout_of([windowed, chunked, EVERY]) == "contiguous"
    assert layout_of([windowed, FULL]) == "zigzag"


@pytest.mark.parametrize("formula", [sent_tokens, received_tokens])
def test_windows_on_both_sides_are_refused(formula):
    for layer in (replace(EVERY, window=3), replace(EVERY, chunk=3)):
        with pytest.raises(ValueError, match="known of causal layers only"):
            formula(layer, "contiguous", 96, 4, 0)
