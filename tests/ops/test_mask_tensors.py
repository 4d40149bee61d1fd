"""The tensors that a kernel takes for a mask, booleans or intervals: those of the rule."""

from operator import and_, or_

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import Tree, Where, attend, prepare
from regard.masks import (
    EVERYTHING,
    NOTHING,
    Causal,
    Chunked,
    Dense,
    Documents,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
)
from regard.ops import mask_tensors as module
from regard.ops.call import Call
from regard.ops.mask_tensors import intervals_of, make_once, mask_key, mask_tensors
from regard.versions import ChangedInPlace

VALID = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def call_of(mask, queries=5, keys=5):
    q, k = torch.zeros(2, 3, queries, 8), torch.zeros(2, 3, keys, 8)
    return prepare(q, k, k, mask=mask, span=Span(keys - queries, keys, 0, keys)).call


@pytest.mark.parametrize(
    "mask", [Causal() & Padding(VALID), Padding(VALID), Dense(torch.eye(5).bool()), Causal()]
)
def test_they_are_the_rule_cell_by_cell(mask):
    call = call_of(mask)
    keep, visible, masked = mask_tensors(call)
    b, h = torch.arange(2)[:, None, None, None], torch.arange(3)[:, None, None]
    slots = torch.arange(5)
    expected = mask.within(call.given_span)(b, h, slots[:, None], slots).expand(2, 3, 5, 5)
    assert keep.expand(2, 3, 5, 5).equal(expected)
    hidden = ~expected.any(-1, keepdim=True)
    assert visible.expand(2, 3, 5, 5).equal(expected | hidden)
    if masked is None:
        assert not hidden.any()
    else:
        assert masked.expand(2, 3, 5, 1).equal(hidden)


def test_calls_under_one_rule_share_them():
    padding = Padding(VALID)
    first = mask_tensors(call_of(Causal() & padding))
    assert mask_tensors(call_of(Causal() & padding)).keep is first.keep
    assert mask_tensors(call_of(Causal() & padding, queries=2)).keep is not first.keep
    assert mask_tensors(call_of(Causal() & Padding(VALID))).keep is not first.keep


def test_the_memo_is_bounded():
    for size in range(2, 3 * module._MOST):
        mask_tensors(call_of(Causal() & SlidingWindow(size)))
        assert len(module._MADE) <= module._MOST


def test_another_use_of_a_mask_is_another_entry():
    module._MADE.clear()
    mask, span = Causal() & Padding(VALID), Span(0, 5, 0, 5)
    assert make_once(mask, span, lambda: "one", 1) == "one"
    assert make_once(mask, span, lambda: "two", 2) == "two"
    assert make_once(mask, span, lambda: pytest.fail("made again"), 1) == "one"
    assert make_once(mask, span, lambda: None, 3) is None
    assert make_once(mask, span, lambda: pytest.fail("made again"), 3) is None


def test_a_rule_that_was_written_is_refused():
    keep = torch.eye(5).bool()
    mask = Dense(keep)
    mask_tensors(call_of(mask))
    keep[0, 0] = False
    assert mask_key(mask) is None
    with pytest.raises(ChangedInPlace):
        call_of(mask)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "grouped", "fused", "eager"])
@torch.no_grad()
def test_one_rule_at_two_places_is_two_rules(backend):
    """Placed by the caller, and then given for calls with the same span."""
    tree, span = Tree(torch.tensor([-1, 0, 0, 1])), Span(6, 12, 0, 12)
    q, k, v = torch.randn(1, 2, 6, 16), torch.randn(1, 2, 12, 16), torch.randn(1, 2, 12, 16)
    b, h = torch.tensor(0), torch.tensor(0)
    for place in (Span(6, 12, 0, 12), Span(4, 10, 0, 10)):
        mask = tree.within(place)
        visible = mask(b, h, torch.arange(6, 12)[:, None], torch.arange(12)).reshape(6, 12)
        scores = (q @ k.mT / 4).masked_fill(~visible, -torch.inf)
        expected = scores.softmax(-1).nan_to_num() @ v
        torch.testing.assert_close(attend(q, k, v, mask=mask, span=span, backend=backend), expected)


def test_rules_of_a_user_have_no_key():
    assert mask_key(Where(lambda b, h, q, k: q >= k)) is None
    assert mask_key(Causal() & Where(lambda b, h, q, k: q >= k)) is None


IDS = torch.tensor([[4, 4, 1, 1, 1, 7], [0, 0, 0, 0, 2, 2]])
INTERVALS = {
    "everything": EVERYTHING,
    "nothing": NOTHING,
    "causal": Causal(),
    "window": SlidingWindow(3),
    "chunks": Chunked(4),
    "chunks from rows' starts": Chunked(4, start=torch.tensor([1, 3])),
    "left padding": Padding(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()),
    "documents": Documents(IDS),
    "a prefix": Prefix(3),
    "prefixes of rows": Prefix([2, 5]),
    "prefixes from rows' starts": Prefix([2, 0], start=torch.tensor([1, 4])),
    "a prefix model": Causal() | Prefix(3),
    "a prefix model with left padding": Padding(torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).bool())
    & (Causal() | Prefix([2, 4], start=torch.tensor([1, 0]))),
    "parts that touch": (Causal() & SlidingWindow(1)) | (Causal() & SlidingWindow(3)) | NOTHING,
    "all of them": Causal() & SlidingWindow(4) & Documents(IDS) & Padding.from_lengths([12, 9]),
}
OTHERS = {
    "two runs": Padding(torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()),
    "a document in pieces": Documents(torch.tensor([[1, 2, 1]])),
    "a document in pieces in one row": Documents(torch.tensor([[1, 1, 2], [1, 2, 1]])),
    "a prefix outside of a window": SlidingWindow(1) & Causal() | Prefix(1),
    "a prefix and a tensor": Prefix(3) | Dense(torch.ones(4, 9).bool()),
    "a tensor": Dense(torch.ones(4, 9).bool()),
}
RAGGED = Span.ragged(torch.tensor([2, 5]), queries=4, kv_start=0, kv_stop=9, bounds=(2, 5))
SPANS = [Span(0, 9, 0, 9), Span(5, 9, 2, 9), Span(3, 4, 0, 12), RAGGED]


@pytest.mark.parametrize("span", SPANS, ids=str)
@pytest.mark.parametrize("name", INTERVALS)
def test_an_interval_contains_the_visible_keys(name, span):
    mask = INTERVALS[name]
    keep = mask.dense(span, batch=2, heads=1).expand(2, 1, span.num_queries, span.num_keys)[:, 0]
    if name == "all of them" and span.kv_stop > 9:
        return  # the second row's padding ends inside this span: two runs
    found = intervals_of(mask, span)
    assert found is not None
    assert found[0].shape == found[1].shape
    starts, stops = (each[..., None] for each in found)
    keys = torch.arange(span.num_keys)
    assert ((keys >= starts) & (keys < stops)).expand_as(keep).equal(keep)
    assert intervals_of(mask, span) is found or span is RAGGED  # memoised


def test_documents_whose_pieces_are_outside_of_the_span_are_intervals():
    mask = Documents(torch.tensor([[3, 1, 1, 3, 2, 2, 3]]))
    starts, stops = intervals_of(mask, Span(1, 6, 1, 6))
    assert (starts.tolist(), stops.tolist()) == ([[0, 0, 2, 3, 3]], [[2, 2, 3, 5, 5]])
    assert intervals_of(mask, Span(1, 6, 0, 6)) is None


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_have_none(name):
    assert intervals_of(OTHERS[name], Span(0, 4, 0, 9)) is None


# A rule, and its arguments; made into a mask inside the test.
TWO = st.lists(st.integers(0, 5), min_size=2, max_size=2)
BASIC = st.one_of(
    st.just((Causal,)),
    st.tuples(st.just(SlidingWindow), st.integers(1, 6)),
    st.tuples(st.just(Chunked), st.integers(1, 5)),
    st.tuples(st.just(Prefix), st.integers(0, 9)),
    st.tuples(st.just(Prefix), TWO, TWO),
)
RULES = st.recursive(
    BASIC, lambda rules: st.tuples(st.sampled_from([and_, or_]), rules, rules), max_leaves=4
)


def made(rule, *of):
    if rule in (and_, or_):
        return rule(*(made(*each) for each in of))
    return rule(*(torch.tensor(each) if isinstance(each, list) else each for each in of))


@settings(max_examples=300, deadline=None)
@given(RULES, st.integers(0, 6), st.integers(1, 6), st.integers(0, 5), st.integers(1, 12))
def test_intervals_of_random_rules_are_the_visible_keys(rule, q_start, queries, kv_start, keys):
    mask, span = made(*rule), Span(q_start, q_start + queries, kv_start, kv_start + keys)
    keep = mask.dense(span, batch=2, heads=1).expand(2, 1, queries, keys)[:, 0]
    found = intervals_of(mask, span)
    if found is None:
        assert "|" in repr(mask)  # only a union has gaps here
        return
    assert found[0].shape == found[1].shape
    starts, stops = (each[..., None] for each in found)
    slots = torch.arange(keys)
    assert ((slots >= starts) & (slots < stops)).expand_as(keep).equal(keep)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 9))
def test_a_prefix_model_is_one_interval(length, queries, keys):
    """Its prefix and the keys before a query begin at the same key."""
    span = Span(max(0, keys - queries), max(keys, queries), 0, keys)
    assert intervals_of(Causal() | Prefix(length), span) is not None


def test_keys_outside_of_the_span_leave_no_gap():
    mask = Causal() & SlidingWindow(1) | Prefix(2, start=torch.tensor([0]))
    starts, stops = intervals_of(mask, Span(5, 7, 3, 7))
    assert (starts.tolist(), stops.tolist()) == ([[2, 3]], [[3, 4]])
    assert intervals_of(mask, Span(5, 7, 1, 7)) is None


@pytest.mark.parametrize("backend", ["sdpa", "grouped", "fused"])
def test_layers_of_a_pass_share_the_tensor_of_a_mask(backend, monkeypatch):
    """It is made once for equal masks, spans and heads, anew for other heads; same bits."""
    monkeypatch.setattr(module, "_MADE", {})
    made, keep, span, mask = [], Call.keep, Span(2, 5, 0, 5), Causal() & Padding(VALID)
    monkeypatch.setattr(Call, "keep", lambda call: made.append(call) or keep(call))
    for heads, total in ((4, 1), (4, 0), (2, 0 if backend == "sdpa" else 1)):
        q, k = torch.randn(2, heads, 3, 16).bfloat16(), torch.randn(2, 2, 5, 16).bfloat16()
        made.clear()
        out = attend(q, k, k, mask=mask, span=span, backend=backend)
        assert len(made) == total
        shared = dict(module._MADE)
        module._MADE.clear()
        assert torch.equal(out, attend(q, k, k, mask=mask, span=span, backend=backend))
        module._MADE.update(shared)
