"""Rules with data for each row: simplification without reading it again, and errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from regard import (
    EVERYTHING,
    NOTHING,
    Causal,
    Chunked,
    Documents,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
)

ROWS = st.lists(st.integers(0, 7), min_size=1, max_size=4)


def visible_keys(mask, span, batch, keys=40):
    """The key slots that are visible to some query of the span in some row."""
    wide = Span(span.q_start, span.q_stop, 0, keys)
    dense = mask.dense(wide, batch=batch).expand(batch, 1, wide.num_queries, keys)
    return dense.flatten(0, 2).any(0).nonzero().flatten().tolist()


@given(ROWS, st.integers(1, 5), st.integers(0, 9), st.integers(1, 4))
def test_the_reach_of_chunks_is_exact_for_every_start(starts, size, first, queries):
    mask, span = Chunked(size, start=torch.tensor(starts)), Span(first, first + queries, 0, 40)
    visible = visible_keys(mask, span, len(starts))
    assert mask.reach(span) == (visible[0], visible[-1])


@given(ROWS, st.integers(0, 5), st.integers(1, 4))
def test_the_reach_of_prefixes_is_exact(starts, length, queries):
    for mask in (
        Prefix(length + 1, start=torch.tensor(starts)),
        Prefix([start + 1 for start in starts]),
    ):
        visible = visible_keys(mask, Span(0, queries, 0, 40), len(starts))
        assert mask.reach(Span(0, queries, 0, 40)) == (visible[0], visible[-1])


@pytest.mark.parametrize(
    ("mask", "span", "becomes"),
    [
        (Padding(torch.tensor([[0, 0, 1], [0, 1, 1]])), Span(0, 3, 0, 1), NOTHING),
        (Padding(torch.tensor([[0, 0, 1], [0, 1, 1]])), Span(0, 3, 2, 9), EVERYTHING),
        (Padding(torch.zeros(1, 3).bool()), Span(0, 3, 0, 3), NOTHING),
        (Padding(torch.zeros(2, 0).bool()), Span(0, 3, 0, 3), EVERYTHING),
        (Chunked(4, start=torch.tensor([1, 2])), Span(3, 5, 2, 5), EVERYTHING),
        (Chunked(4, start=torch.tensor([0, 1])), Span(5, 6, 0, 4), NOTHING),
        (Prefix([2, 4], start=torch.tensor([0, 1])), Span(0, 9, 1, 2), EVERYTHING),
        (Prefix([2, 4], start=torch.tensor([3, 1])), Span(0, 9, 5, 9), NOTHING),
        (Prefix([2, 4], start=torch.tensor([3, 1])), Span(0, 9, 0, 1), NOTHING),
        (Prefix(0), Span(0, 9, 0, 9), NOTHING),
        (Documents(torch.tensor([[0, 1, 1], [5, 5, 2]])), Span(2, 9, 2, 9), EVERYTHING),
    ],
)
def test_rules_simplify_where_all_rows_agree(mask, span, becomes):
    assert mask.within(span) == becomes


def test_rules_stay_where_rows_disagree():
    for mask, span in (
        (Padding(torch.tensor([[0, 0, 1], [0, 1, 1]])), Span(0, 3, 1, 3)),
        (Chunked(4, start=torch.tensor([0, 1])), Span(4, 5, 0, 4)),
        (Prefix([2, 4]), Span(0, 9, 0, 3)),
        (Documents(torch.tensor([[0, 1, 1], [5, 5, 2]])), Span(1, 9, 2, 9)),
    ):
        assert mask.within(span) is mask


def test_a_prefix_has_one_length_or_one_for_each_row():
    kv = torch.arange(5)
    zero = torch.tensor(0)
    for lengths in ([2], (2,), torch.tensor([2]), 2):
        assert Prefix(lengths)(zero, zero, kv, kv).tolist() == [True, True, False, False, False]
    assert Prefix([1, 2]) == Prefix((1, 2)) != Prefix([2, 1])
    assert eval(repr(Prefix([1, 2]))) == Prefix([1, 2])


def test_explanations_contain_the_numbers():
    assert Chunked(2, start=torch.tensor([1])).explain(0, 0, 5, 1) == (
        "query 5 may not attend to key 1: Chunked(size=2, start=<[1] int64>) hides keys of other "
        "chunks (key in chunk 0, query in 2)"
    )
    assert Prefix([2, 1], start=torch.tensor([0, 3])).explain(1, 0, 5, 4) == (
        "query 5 may not attend to key 4: Prefix(lengths=(2, 1), start=<[2] int64>) hides keys "
        "outside the prefix (3 <= key < 4)"
    )
    assert Prefix(2).explain(0, 0, 5, 2).endswith("(0 <= key < 2)")
    assert Documents(torch.tensor([[4, 4, 7]])).explain(0, 0, 9, 1) == (
        "query 9 may not attend to key 1: Documents(ids=<[1, 3] int64>) hides other documents "
        "(key in 4, query in 7)"
    )
    assert Padding(torch.tensor([[1, 0]])).explain(0, 0, 5, 1) == (
        "query 5 may not attend to key 1: Padding(valid=<[1, 2] bool>) hides padding "
        "(key 1 of row 0)"
    )


def test_a_mask_whose_data_cannot_be_read_stays_and_can_be_dense():
    with FakeTensorMode():
        span = Span(0, 4, 0, 4)
        padding = Padding(torch.ones(2, 4, dtype=torch.int64))
        chunked = Chunked(3, start=padding.start)
        prefix = Prefix(padding.start, start=padding.start)
        documents = Documents(torch.zeros(2, 4, dtype=torch.int64))
        for mask in (padding, chunked, prefix, documents):
            assert mask.within(span) is mask
            assert mask.reach(span) == (0, None)
            assert mask.dense(span, batch=2).shape == (2, 1, 4, 4)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: Padding(torch.ones(2, 3)), TypeError, "key_padding_mask is the opposite"),
        (lambda: Padding([[1, 1]]), TypeError, "as a tensor|Type-check"),
        (lambda: Padding(torch.tensor([3, -1])), ValueError, "from -1 to 3"),
        (lambda: Padding.from_lengths([1, 4], total=3), ValueError, "from 0 to total=3"),
        (lambda: Padding.from_lengths([-1, 4]), ValueError, "from 0 to"),
        (lambda: Documents(torch.ones(2, 3).bool()), TypeError, "Padding"),
        (lambda: Documents(torch.ones(2, 0).long()), ValueError, "one id at least"),
        (lambda: Documents.from_cu_seqlens(torch.tensor([0, 3, 2])), ValueError, "never decreases"),
        (lambda: Documents.from_cu_seqlens(torch.tensor([0])), ValueError, "n1"),
        (lambda: Prefix([1, 2], start=torch.tensor([0, 0, 0])), ValueError, "2 lengths and 3"),
        (lambda: Prefix([1, -2]), ValueError, "0 or more"),
        (lambda: Prefix(2.5), TypeError, "whole numbers, got 2.5|Type-check"),
        (lambda: Prefix(torch.tensor([2.5])), ValueError, r"lengths is \[B\]"),
        (lambda: Chunked(2, start=torch.tensor(3)), ValueError, r"start is \[B\]"),
        (lambda: Chunked(False), ValueError, "whole size .* at least 1, got False"),
        (
            lambda: SlidingWindow(2**63),
            ValueError,
            r"whole size < 2\*\*63, .* got 9223372036854775808",
        ),
        (lambda: Prefix(2**63), ValueError, r"< 2\*\*63, got 9223372036854775808"),
        (lambda: Prefix([1, None]), TypeError, "whole numbers, got .*None|Type-check"),
    ],
)
def test_errors_of_data_say_what_to_give_instead(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


def test_a_single_row_broadcasts_and_several_rows_need_their_batch():
    span = Span(0, 3, 0, 3)
    for mask in (Padding(torch.tensor([1, 0, 1])), Documents(torch.tensor([0, 0, 1]))):
        assert mask.dense(span, batch=5).shape == (3, 3)
        assert (mask & Causal()).dense(span, batch=5).shape == (3, 3)
    two = Padding(torch.ones(2, 3).bool())
    assert two.dense(span, batch=2).shape == (2, 1, 3, 3)
    with pytest.raises(ValueError, match=r"batch=2, the call has batch=3"):
        two.dense(span, batch=3)
