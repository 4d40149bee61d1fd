"""The parts of a pass: how streams become keys, and how gradients come back."""

import pytest
import torch

from regard.distributed.context.passes import Expansion, Recorded, autocast_of


def streams(*widths):
    torch.manual_seed(0)
    return tuple(torch.randn(1, 1, 3, width, dtype=torch.float64) for width in widths)


def gradients(expansion, tensors, needed, number):
    recorded = Recorded.of(expansion, tensors, needed, number)
    of_keys = tuple(torch.ones_like(x) for x in recorded.made)
    return recorded.gradients(of_keys)


def test_two_streams_are_keys_and_values():
    x = streams(4, 2)
    expansion = Expansion(None, None, None)
    assert all(a is b for a, b in zip(expansion.keys(x, ()), x, strict=True))
    of_k, of_v = gradients(expansion, x, (True, True), 2)
    assert of_k.shape == x[0].shape and of_v.shape == x[1].shape


def test_values_are_the_first_columns_of_a_joined_stream():
    (x,) = streams(4)
    k, v = Expansion(None, 3, None).keys((x,), ())
    assert torch.equal(k, x) and torch.equal(v, x[..., :3])
    (grad,) = gradients(Expansion(None, 3, None), (x,), (True,), 1)
    assert grad[0, 0, 0].tolist() == [2, 2, 2, 1]


def scaled(streams, parameters):
    return streams[0] * parameters[0], streams[0].exp()


def test_keys_that_are_made_have_the_gradients_of_autograd():
    (x,), weight = streams(4), torch.tensor([3.0], dtype=torch.float64)
    of_x, of_weight = gradients(Expansion(scaled, None, None), (x, weight), (True, True), 1)
    torch.testing.assert_close(of_x, 3.0 + x.exp())
    torch.testing.assert_close(of_weight, x.sum().view(1))


@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)])
def test_gradients_that_are_not_needed_are_none(needed):
    (x,), weight = streams(4), torch.tensor([3.0], dtype=torch.float64)
    found = gradients(Expansion(scaled, None, None), (x, weight), needed, 1)
    assert [grad is not None for grad in found] == list(needed)


def test_keys_are_made_under_the_autocast_of_the_call():
    def product(streams, parameters):
        k = streams[0].float() @ torch.ones(4, 4)
        return k, k

    with torch.autocast("cpu", torch.bfloat16):
        inside = Expansion(product, None, autocast_of(torch.device("cpu")))
    outside = Expansion(product, None, autocast_of(torch.device("cpu")))
    assert inside.keys(streams(4), ())[0].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert outside.keys(streams(4), ())[0].dtype == torch.float32
