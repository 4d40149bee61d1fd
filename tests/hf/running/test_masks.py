"""Masks mean what transformers means by them: none, bool, additive; with windows and without."""

import pytest
import torch
from torch import nn

from regard.hf.running.masks import visible
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
    module, given = nn.Module(), torch.zeros(1, 1, 2, 2)
    first = visible(module, given, 2, 2)[0]
    assert visible(module, given, 2, 2)[0] is first
    given[..., 0, 1] = LOW
    mask, _, span = visible(module, given, 2, 2)
    assert mask.dense(span).squeeze().int().tolist() == [[1, 0], [1, 1]]


def test_a_bias_in_the_mask_stays_and_has_its_gradient():
    module = nn.Module()
    given = torch.tensor([[[[0.5, LOW], [0.0, -2.0]]]], requires_grad=True)
    mask, bias, span = visible(module, given, 2, 2)
    assert mask.dense(span).squeeze().int().tolist() == [[1, 0], [1, 1]]
    assert bias.squeeze().tolist() == [[0.5, 0.0], [0.0, -2.0]]
    bias.sum().backward()
    assert given.grad.squeeze().tolist() == [[1.0, 0.0], [1.0, 1.0]]
