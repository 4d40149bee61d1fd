"""The arguments of a call of a layer: refused before anything is computed or cached."""

import pytest
import torch
from torch import nn
from torch.nested import nested_tensor

from layers import LAYERS, make
from regard import NO_CACHE, Attention, Causal, KVCache, Padding, SlidingWindow
from regard.layers.inputs import arrive, check_cache, check_positions, check_width
from regard.masks import EVERYTHING

X = torch.randn(2, 3, 8)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([1.0], TypeError, r"x is a tensor \[B, L, 8\], got list"),
        (X[0], ValueError, r"x is \[B, L, 8\], got shape \(3, 8\); add or flatten axes"),
        (X.to_sparse(), ValueError, r"give x.to_dense\(\)"),
        (nested_tensor([*X], layout=torch.jagged), ValueError, r"Padding.from_lengths\(lengths\)"),
        (X[..., :7], ValueError, r"x is 8 wide, got 7 .*is it the output of another layer"),
        (X.double(), ValueError, r"x is torch.float64, the layer's weights are torch.float32"),
        (X.to("meta"), ValueError, "x is on meta, the layer on cpu; move one of them"),
    ],
)
def test_what_does_not_fit_the_weights_is_refused(x, error, message):
    with pytest.raises(error, match=message):
        check_width("x", x, 8, nn.Linear(8, 8))


def test_a_projection_that_does_more_may_convert_by_itself():
    hooked = nn.Linear(8, 8)
    hooked.register_forward_pre_hook(lambda module, given: (given[0].float(),))
    check_width("x", X.double(), 8, hooked)


def test_autocast_converts():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_width("x", X.bfloat16(), 8, nn.Linear(8, 8))


def test_what_is_no_cache_is_refused():
    check_cache(NO_CACHE)
    check_cache(KVCache())
    with pytest.raises(TypeError, match=r"got the class KVCache; make one for each layer"):
        check_cache(KVCache)
    with pytest.raises(TypeError, match="one for each layer, got dict"):
        check_cache({})


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 3)])
def test_positions_are_of_the_new_tokens(shape):
    check_positions(torch.zeros(shape, dtype=torch.long), X)


@pytest.mark.parametrize("shape", [(4,), (3, 3), (2, 4), (), (2, 3, 1)])
def test_positions_of_other_tokens_are_refused(shape):
    with pytest.raises(ValueError, match=r"positions is \[L\] = \[3\] or \[B, L\] = \[2, 3\], got"):
        check_positions(torch.zeros(shape, dtype=torch.long), X)


def test_a_call_arrives_with_both_masks_and_the_span_of_its_cache():
    layer, cache = Attention(8, 2, mask=Causal()), KVCache()
    layer(torch.randn(2, 5, 8), cache=cache)
    arrival = arrive(layer, X, None, SlidingWindow(3), cache, None)
    assert arrival.mask == Causal() & SlidingWindow(3)
    assert (arrival.span.q_start, arrival.span.kv_stop) == (5, 8)
    assert arrival.positions.tolist() == [5, 6, 7]
    assert cache.length == 5


def test_positions_that_are_given_are_taken():
    positions = torch.tensor([9, 4, 7])
    layer = Attention(8, 2, mask=Causal())
    assert arrive(layer, X, None, Causal(), NO_CACHE, positions).positions is positions


def test_a_mask_of_the_future_is_refused_before_the_cache_is_filled():
    layer, cache = Attention(8, 2), KVCache()
    with pytest.raises(ValueError, match="Causal"):
        layer(X, cache=cache, mask=Padding(torch.ones(2, 3).bool()))
    assert cache.length == 0


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_none_is_no_mask_and_no_cache(name):
    layer = make(name)
    x = torch.randn(2, 3, layer.hidden_size, dtype=torch.float64)
    assert torch.equal(layer(x, mask=None, cache=None), layer(x))
    assert torch.equal(layer.weights(x, mask=None, cache=None), layer.weights(x))
    assert layer.explain(x, mask=None, cache=None) == layer.explain(x)


def test_a_layer_without_a_pattern():
    assert Attention(8, 2, mask=None).mask is EVERYTHING
