"""The tensors that a kernel takes for a mask: those of the rule, memoised while they are small."""

import gc

import pytest
import torch

from regard import Causal, Dense, Padding, Span, Tree, Where, attend, prepare
from regard.ops import mask_tensors as module
from regard.ops.mask_tensors import mask_key, mask_tensors
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
    expected = mask.within(call.whole)(b, h, slots[:, None], slots).expand(2, 3, 5, 5)
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


def test_they_live_as_long_as_the_rule():
    padding = Padding(VALID)
    mask_tensors(call_of(padding))
    before = len(module._LATEST)
    del padding
    gc.collect()
    assert len(module._LATEST) < before


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
