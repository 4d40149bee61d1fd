"""Masks mean what transformers means by them: none, bool, additive; with windows and without."""

import pytest
import torch
from torch import nn

from regard.hf.running.masks import visible
from regard.masks import Causal, Dense, SlidingWindow, Span
from zoo import ZOO

LOW = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("given", "causal", "visible_cells"),
    [
        (None, True, [[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
        (None, False, [[1, 1, 1]] * 3),
        (torch.eye(3).bool()[None, None], True, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        ((1 - torch.eye(3))[None, None] * LOW, True, torch.eye(3)),
    ],
)
def test_masks_mean_what_transformers_means(given, causal, visible_cells):
    module = nn.Module()
    module.is_causal = causal
    mask, bias, span = visible(module, given, 3, 3)
    assert bias is None
    assert mask.dense(span).expand(1, 1, 3, 3)[0, 0].equal(torch.as_tensor(visible_cells).bool())


def test_without_a_mask_the_window_still_holds():
    module = nn.Module()
    several, one = visible(module, None, 3, 3, window=2), visible(module, None, 1, 4, window=2)
    assert several[0].dense(several[2]).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert one[0].dense(one[2]).int().tolist() == [[0, 0, 1, 1]]


def test_without_a_mask_eager_hides_nothing():
    module = ZOO["llama"].build("eager").base_model.layers[0].self_attn
    mask, _, span = visible(module, None, 3, 3, window=2)
    assert mask.dense(span).all()


def test_a_mask_is_read_once_and_again_when_it_changes():
    layers, given = [nn.Module(), nn.Module()], torch.zeros(1, 1, 2, 2)
    for index, layer in enumerate(layers):
        layer.layer_idx = index
    first = visible(layers[0], given, 2, 2)[0]
    assert visible(layers[1], given, 2, 2)[0] is first
    given[..., 0, 1] = LOW
    mask, _, span = visible(layers[1], given, 2, 2)
    assert mask.dense(span).squeeze().int().tolist() == [[1, 0], [1, 1]]


def test_a_mask_is_read_anew_in_the_next_pass():
    """A write through `.data` leaves no trace."""
    layer, given = nn.Module(), torch.zeros(1, 1, 2, 2)
    layer.layer_idx = 0
    visible(layer, given, 2, 2)
    given.data[..., 0, 1] = LOW
    mask, _, span = visible(layer, given, 2, 2)
    assert mask.dense(span).squeeze().int().tolist() == [[1, 0], [1, 1]]


def test_a_bias_in_the_mask_stays_and_has_its_gradient():
    module = nn.Module()
    given = torch.tensor([[[[0.5, LOW], [0.0, -2.0]]]], requires_grad=True)
    mask, bias, span = visible(module, given, 2, 2)
    assert mask.dense(span).squeeze().int().tolist() == [[1, 0], [1, 1]]
    assert bias.squeeze().tolist() == [[0.5, 0.0], [0.0, -2.0]]
    bias.sum().backward()
    assert given.grad.squeeze().tolist() == [[1.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(("past", "queries", "slots"), [(4, 1, 9), (8, 1, 9), (2, 3, 9), (0, 4, 4)])
def test_the_mask_of_a_static_cache_is_a_rule_and_later_slots_are_not_read(
    past, queries, slots, additive
):
    keep = torch.ones(queries, slots).tril(past).bool().expand(2, 1, queries, slots)
    given = torch.where(keep, 0.0, LOW) if additive else keep
    mask, bias, span = visible(nn.Module(), given, queries, slots)
    assert (mask, bias, span) == (Causal(), None, Span(past, past + queries, 0, slots))
    assert mask.dense(span).equal(keep[0, 0])


def test_a_window_is_part_of_the_rule():
    keep = torch.ones(3, 7).tril(2).triu(1).bool()[None, None]
    mask, _, span = visible(nn.Module(), keep, 3, 7, window=2)
    assert mask == Causal() & SlidingWindow(2)
    assert mask.dense(span).equal(keep[0, 0])
    other, _, span = visible(nn.Module(), keep, 3, 7, window=3)
    assert isinstance(other, Dense)
    assert other.within(span).dense(span).equal(keep)


@pytest.mark.parametrize(
    "keep",
    [
        [[[0, 1, 1, 0]], [[1, 1, 1, 0]]],  # the first row is padded
        [[[1, 1, 1, 0]], [[1, 1, 0, 0]]],  # one row is shorter
        [[[1, 0, 1, 0]]],  # a hole
        [[[0, 0, 0, 0]]],  # fully masked
        [[[1, 1, 1, 1], [1, 1, 1, 1]]],  # two queries that see each other
    ],
)
def test_other_masks_stay_as_they_are(keep):
    given = torch.tensor(keep).bool()[:, None]
    mask, bias, span = visible(nn.Module(), given, given.shape[2], 4)
    assert isinstance(mask, Dense)
    assert bias is None
    assert mask.within(span).dense(span, batch=len(keep)).equal(given)


def test_a_mask_for_all_queries_broadcasts():
    given = torch.tensor([1, 1, 1, 0]).bool()[None, None, None]  # of padding, in an encoder
    mask, _, span = visible(nn.Module(), given, 4, 4)
    assert mask.within(span).dense(span).expand(1, 1, 4, 4).equal(given.expand(1, 1, 4, 4))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_is_read_in_every_pass(mode, dtype):
    """Writes through `.data`, and writes to tensors of inference mode, leave no trace in them."""
    first, second = nn.Module(), nn.Module()
    first.layer_idx, second.layer_idx = 0, 1
    with mode():
        given = torch.eye(3).bool()[None, None] if dtype is torch.bool else LOW * (1 - torch.eye(3))
        given = given.expand(1, 1, 3, 3).clone()
        for key in (2, 0):  # the one that the last query may attend to
            for module in (first, second):
                mask, _, span = visible(module, given, 3, 3)
                row = mask.dense(span).expand(1, 1, 3, 3)[0, 0, 2]
                assert row.tolist() == [each == key for each in range(3)]
            given.data[0, 0, 2] = given.data[0, 0, 0]
