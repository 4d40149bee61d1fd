"""Spans: their sizes and positions, which tensors they read, and errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import Span

SLOTS = st.integers(0, 20)


@given(SLOTS, SLOTS, SLOTS, SLOTS)
def test_a_span_counts_its_slots(q_start, queries, kv_start, keys):
    span = Span(q_start, q_start + queries, kv_start, kv_start + keys)
    assert (span.num_queries, span.num_keys) == (queries, keys)
    assert span.positions().tolist() == list(range(q_start, q_start + queries))
    if queries:
        assert [span.first_query, span.last_query] == [q_start, q_start + queries - 1]


@given(st.lists(SLOTS, min_size=1, max_size=4), SLOTS)
def test_a_ragged_span_counts_its_slots_in_each_row(starts, queries):
    q_start = torch.tensor(starts)
    known = Span.ragged(
        q_start, queries=queries, kv_start=0, kv_stop=9, bounds=(min(starts), max(starts))
    )
    for span in (known, Span(q_start, q_start + queries, 0, 9)):
        assert (span.num_queries, span.num_keys) == (queries, 9)
        assert span.first_query == min(starts)
        assert span.last_query == max(starts) + queries - 1
        assert span.positions().tolist() == [list(range(s, s + queries)) for s in starts]
        assert span.positions().dtype == torch.int64


def test_a_span_with_given_bounds_reads_no_tensor():
    span = Span.ragged(
        torch.empty(2, dtype=torch.int64, device="meta"),
        queries=3,
        kv_start=0,
        kv_stop=9,
        bounds=(2, 4),
    )
    assert (span.first_query, span.last_query) == (2, 6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Span(3, 2, 0, 4), "queries end before they start: q_start=3, q_stop=2"),
        (lambda: Span(0, 1, 4, 3), "keys end before they start: kv_start=4, kv_stop=3"),
        (lambda: Span(torch.tensor([1]), 2, 0, 4), "both integers or both"),
        (lambda: Span(1, torch.tensor([2]), 0, 4), "both integers or both"),
        (lambda: Span(torch.tensor([2, 3]), torch.tensor([1, 2]), 0, 4), "end before they start"),
        (lambda: Span(torch.tensor([1, 2]), torch.tensor([2, 4]), 0, 4), "same number of queries"),
        (lambda: Span(torch.tensor(1), torch.tensor(2), 0, 4), r"both \[B\]"),
        (
            lambda: Span(*torch.empty(2, 3, dtype=torch.int64, device="meta"), 0, 4),
            r"Span\.ragged",
        ),
    ],
)
def test_errors_of_the_constructor(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


def test_a_ragged_span_copies_its_starts():
    starts = torch.tensor([3, 5])
    span = Span(starts, starts + 2, 0, 7)
    starts.zero_()
    assert span.positions().tolist() == [[3, 4], [5, 6]]
    assert (span.first_query, span.last_query) == (3, 6)
