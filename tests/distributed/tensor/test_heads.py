"""Which heads each rank has, and the masks and biases of those heads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import Alibi, Causal, Padding, RelativeBias, SlidingWindow, Span
from regard.distributed import HeadLayout, HeadSplit
from regard.distributed.ranks import Ranks
from regard.distributed.tensor.heads import mask_of_heads, of_heads
from regard.masks import Dense, Where
from split_layers import Twice, bias, keep, mine

sizes = st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(2, 9))


@given(sizes)
def test_every_head_is_on_one_rank_with_its_key_head(drawn):
    kv_heads, served, ranks = drawn
    layout = HeadLayout(kv_heads * served, kv_heads, ranks)
    found = [head for rank in range(ranks) for head in layout.heads(rank)]
    assert sorted(found) == list(range(kv_heads * served))
    held = [head for rank in range(ranks) for head in layout.kv_heads(rank)]
    assert {*held} == {*range(kv_heads)}
    assert len(held) == kv_heads * layout.replicas
    assert layout.local_heads % layout.local_kv_heads == 0
    for rank in range(ranks):
        heads, keys = layout.heads(rank), layout.kv_heads(rank)
        assert len(heads) <= layout.local_heads
        assert len(keys) <= layout.local_kv_heads
        for place, head in enumerate(heads):  # the place of its key head, of those of this rank
            local = place // (layout.local_heads // layout.local_kv_heads)
            assert keys[local] == head // served


@given(sizes)
def test_key_heads_are_replicated_only_where_there_are_fewer_than_ranks(drawn):
    kv_heads, served, ranks = drawn
    layout = HeadLayout(kv_heads * served, kv_heads, ranks)
    assert ranks % layout.replicas == 0
    assert layout.replicas == 1 or (layout.replicas * kv_heads <= ranks)
    assert kv_heads == 1 or layout.replicas < ranks
    if kv_heads == 1:
        assert layout.replicas == ranks


class Alone(Ranks):
    """One of several ranks, in a test of one process."""

    rank, size = 0, 0

    def __init__(self, rank, size):
        vars(self).update(rank=rank, size=size)


def split_of(rank, size=2):
    return HeadSplit(6, 3, size, Alone(rank, size))


MASKS = {
    "heads": lambda: Dense(keep(6, 2)),
    "placed": lambda: Dense(keep(6, 2)).within(Span(0, 5, 0, 5)),
    "where": lambda: Where(mine) & SlidingWindow(3),
    "any": lambda: Causal() | (Padding(torch.tensor([[0, 1, 1], [1, 1, 0]])) & Dense(keep(6))),
    "not": lambda: ~Where(mine),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (2, 4)])
def test_masks_of_heads(name, rank, size):
    mask, span, split = MASKS[name](), Span(0, 5, 0, 5), split_of(rank, size=size)
    own = split.mask(mask).dense(span, batch=2, heads=split.local_heads)
    whole = mask.dense(span, batch=2, heads=6).expand(2, 6, 5, 5)
    heads = split.heads(rank)
    got = own.expand(2, split.local_heads, 5, 5)[:, : len(heads)]
    assert torch.equal(got, whole[:, heads.start : heads.stop])


def test_masks_alike_for_all_heads_stay_the_same_object():
    for mask in (
        Causal(),
        Causal() & SlidingWindow(2),
        Dense(keep(1)),
        ~Padding(torch.ones(1, 2).bool()),
    ):
        assert mask_of_heads(mask, (2, 3)) is mask


def test_masks_of_another_number_of_heads_are_refused():
    with pytest.raises(ValueError, match=r"heads=4, the layer has num_heads=6 on all ranks"):
        split_of(0).mask(Dense(keep(4)))


RULES = {
    "alibi": lambda: Alibi.for_heads(6),
    "one slope": lambda: Alibi([0.5]),
    "relative": lambda: RelativeBias(6),
    "own": Twice,
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("rank", [0, 1])
def test_biases_of_heads(name, rank):
    torch.manual_seed(0)
    rule, span, split = RULES[name](), Span(2, 5, 0, 5), split_of(rank)
    whole = rule.bias(span, dtype=torch.float64).expand(1, 6, 3, 5)
    own = split.score_bias(rule).bias(span, dtype=torch.float64).expand(1, 4, 3, 5)
    heads = split.heads(rank)
    assert torch.equal(own[:, : len(heads)], whole[:, heads.start : heads.stop])


def test_tensors_of_biases():
    split = split_of(1)
    assert torch.equal(split.score_bias(bias(6, 5, 5))[:2], bias(6, 5, 5)[4:])
    assert torch.equal(split.score_bias(bias(2, 1, 5, 5)), bias(2, 1, 5, 5))
    assert split.score_bias(None) is None
    for other in (bias(4, 5, 5), Alibi.for_heads(4), RelativeBias(4)):
        with pytest.raises(
            ValueError, match="score_bias is for 4 heads, the layer has num_heads=6"
        ):
            split.score_bias(other)


def test_heads_of_an_axis_are_a_view_without_padding():
    x = torch.arange(6).view(1, 6)
    assert of_heads(x, 1, (2, 3)).data_ptr() == x[:, 2:].data_ptr()
    assert of_heads(x, 1, (4, 5, 5)).tolist() == [[4, 5, 5]]
