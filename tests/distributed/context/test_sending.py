"""What each kind of layer sends: the same keys and values that it has on one device."""

import pytest
import torch

from layers import assert_same, inputs, make
from regard.distributed.context.sending import Call, send, widths_of
from regard.distributed.shards import Shards
from regard.masks import EVERYTHING

KINDS = ["GQA", "MLA expanded", "MLA absorbed", "latent KV, normed"]


def _sent(layer, tokens=5):
    x = inputs(2, tokens)
    shards = Shards(tokens, 1)
    call = Call(EVERYTHING, shards, torch.arange(tokens), tokens - 1)
    return send(layer, x, call)


@pytest.mark.parametrize("name", KINDS)
def test_streams_are_as_wide_as_counted(name):
    layer = make(name)
    elements, others = widths_of(layer)
    nbytes = sum(each[0, :, 0].nbytes for each in _sent(layer).streams)
    assert nbytes == 8 * elements + others


@pytest.mark.parametrize("name", ["MLA expanded", "latent KV, normed"])
def test_keys_are_made_token_by_token_with_gradients_of_the_parameters(name):
    layer = make(name)
    own = _sent(layer)
    keys_of, parameters = own.options["keys_of"], own.options["parameters"]
    k, v = keys_of(own.streams, parameters)
    assert k.shape[:3] == v.shape[:3] == (2, k.shape[1], 5)
    some = keys_of(tuple(each[:, :, 1:3] for each in own.streams), parameters)
    assert_same(some[0], k[:, :, 1:3])
    copies = tuple(each.detach().clone().requires_grad_() for each in parameters)
    k, v = keys_of(own.streams, copies)
    found = torch.autograd.grad(k.square().sum() + v.sum(), copies)
    assert all(each.abs().max() > 0 for each in found)
    assert all(each.grad is None for each in layer.parameters())
