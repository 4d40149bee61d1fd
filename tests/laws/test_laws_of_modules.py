"""Layers as modules of torch: autocast, copies, pickles, dtypes, devices, names of parameters."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import regard
from kinds import LAYERS
from regard import (
    Attention,
    KVCache,
    LatentKVAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    Rotary,
)

SELF = [layer for layer in LAYERS if getattr(layer, "context_size", 32) == 32]


@pytest.mark.parametrize("layer", SELF, ids=lambda layer: type(layer).__name__)
def test_autocast_is_the_layer_in_half_precision(layer):
    layer = copy.deepcopy(layer).eval()
    x = torch.randn(2, 6, 32)
    with torch.no_grad():
        full = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = layer(x)
            cache = KVCache()
            if "Causal" in repr(layer):
                parts = [layer(chunk, cache=cache) for chunk in x.split([3, 1, 2], dim=1)]
                torch.testing.assert_close(
                    torch.cat(parts, dim=1), cast, rtol=0, atol=0.02 * full.abs().max().item()
                )
    assert cast.dtype == torch.bfloat16
    assert (cast.float() - full).abs().max() <= 0.04 * full.abs().max()


def test_autocast_and_half_weights_leave_positions_alone():
    x = torch.randn(1, 1, 2, 8)
    rope = Rotary(8)
    far = torch.tensor([70_001, 70_002])
    want = rope.rotate(x, far)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rope.rotate(x, far), want)
    layer = MultiHeadAttention(32, 4, rope=rope).to(torch.bfloat16)
    assert torch.equal(layer.rope.rotate(x, far), want)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_a_layer_is_the_code_that_builds_it(layer):
    built = eval(repr(layer), vars(regard))
    assert repr(built) == repr(layer)
    built.load_state_dict(layer.state_dict())
    x = torch.randn(1, 4, 32)
    options = {} if layer in SELF else {"context": torch.randn(1, 3, 12)}
    assert torch.equal(built.eval()(x, **options), layer.eval()(x, **options))


@pytest.mark.parametrize("layer", SELF, ids=lambda layer: type(layer).__name__)
def test_copies_and_pickles_compute_the_same(layer):
    x = torch.randn(1, 4, 32)
    want = layer.eval()(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), want)
        assert other.state_dict().keys() == layer.state_dict().keys()


@pytest.mark.parametrize("layer", SELF, ids=lambda layer: type(layer).__name__)
def test_layers_move_between_dtypes_and_devices(layer):
    double = copy.deepcopy(layer).double().eval()
    x = torch.randn(1, 4, 32)
    got = double(x.double())
    assert got.dtype == torch.float64
    torch.testing.assert_close(got.float(), layer.eval()(x), rtol=0, atol=1e-5)
    away = copy.deepcopy(layer).to("meta")
    assert away(x.to("meta")).shape == got.shape


def test_the_layers_have_one_signature():
    def names(layer):
        return [
            (p.name, p.kind, p.default)
            for p in inspect.signature(layer.forward).parameters.values()
        ]

    assert names(Attention) == names(MultiHeadLatentAttention) == names(LatentKVAttention)


def test_every_layer_is_a_module():
    assert all(isinstance(layer, nn.Module) for layer in LAYERS)
