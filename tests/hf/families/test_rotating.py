"""Results that the layers of one pass share."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from regard.hf.families.rotating import memoised


def asked(tensors, *layers):
    """How often the result is computed when these layers ask for it."""
    calls = []
    for layer in layers:
        memoised("_of_test", layer, lambda: calls.append(1) or 0, *tensors)
    return len(calls)


def layers(count, first=0):
    return [SimpleNamespace(layer_idx=first + i) for i in range(count)]


def test_the_layers_of_a_pass_share_a_result():
    tensors, some = [torch.zeros(2), torch.zeros(2)], layers(4)
    assert asked(tensors, *some) == 1
    assert asked(tensors, *some) == 1  # the next pass
    assert asked(tensors, *layers(4)) == 1  # of another model
    assert asked(tensors, some[2]) == 0


def test_modules_without_numbers_share_what_cannot_change_unnoticed():
    one, other = SimpleNamespace(), SimpleNamespace()
    assert asked([torch.zeros(2)], one, other, one) == 1
    with torch.inference_mode():
        assert asked([torch.zeros(2)], one, other, one) == 3


@pytest.mark.parametrize("which", [0, 1])
def test_a_write_within_a_pass_is_noticed_in_every_tensor(which):
    tensors, some = [torch.zeros(2), torch.zeros(2)], layers(3)
    assert asked(tensors, some[0]) == 1
    tensors[which].add_(1)
    assert asked(tensors, *some[1:]) == 1


def test_results_with_gradients_are_not_shared():
    assert asked([torch.zeros(2), torch.zeros(2, requires_grad=True)], *layers(3)) == 3
