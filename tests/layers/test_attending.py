"""Calls are described from what a cache returned, and an objection to that undoes the update."""

import copy

import pytest
import torch
from torch import nn

from layers import CACHES, PAIRS, assert_same, inputs, make, run_in_pieces
from regard import Causal, KVCache, PagedCache, PagePool, Part, SlidingWindow
from regard.layers.attending import Keys


@pytest.mark.parametrize(("kind", "name"), PAIRS)
@pytest.mark.parametrize("held", [0, 4])
@torch.no_grad()
def test_an_objection_after_the_update_undoes_it(kind, name, held):
    """`tiled` has no float64; a name of no backend is refused as late."""
    layer, x, cache = make(kind).double(), inputs(3, 9), CACHES[name]()
    if held:
        layer(x[:, :held], cache=cache)
    untouched, seen = copy.deepcopy(cache), []
    update = cache.update
    for backend in ("tiled", "nothing"):
        layer.backend = backend
        cache.update = lambda *new: seen.append(len(new)) or update(*new)
        with pytest.raises(ValueError, match=r"cannot run this call|is not one of"):
            layer(x[:, held : held + 3], cache=cache)
        cache.__dict__.pop("update", None)
        assert (cache.length, cache.nbytes) == (held, untouched.nbytes)
    assert len(seen) == 2, "it objected before the update"
    layer.backend = "auto"
    assert_same(
        run_in_pieces(layer, x[:, held:], cache, [1]),
        run_in_pieces(layer, x[:, held:], untouched, [1]),
    )


class Model(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.layers = nn.ModuleList([make(kind) for kind in kinds])

    def forward(self, x, caches):
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer(x, cache=cache)
        return x


@pytest.mark.parametrize("wrong", [0, 1, 2])
@torch.no_grad()
def test_the_layer_that_objects_has_the_cache_of_before(wrong):
    """Layers before it have updated theirs: the caller truncates all caches to one length."""
    model, x = Model(["MHA", "MLA", "latent KV"]), inputs(1, 6)
    caches = [KVCache() for _ in model.layers]
    model(x[:, :4], caches)
    model.layers[wrong].backend = "nothing"
    with pytest.raises(ValueError, match="is not one of"):
        model(x[:, 4:], caches)
    assert [cache.length for cache in caches] == [6] * wrong + [4] * (3 - wrong)
    model.layers[wrong].backend = "auto"
    for cache in caches:
        cache.truncate(4)
    expected = model(x, [KVCache() for _ in model.layers])
    assert_same(model(x[:, 4:], caches), expected[:, 4:])


def test_outlines_have_the_widths_of_keys_and_values():
    k, v = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 6)
    assert Keys.of((Part(0, 5, (k, v)),)).outlines == (k, v)
    joined = Keys.of((Part(0, 5, (k,)),), v_head_dim=3)
    assert [each.shape[-1] for each in joined.outlines] == [8, 3]


def test_only_visible_keys_are_made():
    pool, made = PagePool(num_pages=9, page_size=4), []
    cache, other = PagedCache(pool), PagedCache(pool)
    tokens = torch.arange(20.0).view(1, 1, 20, 1)
    for start, stop in ((0, 8), (8, 16), (16, 19)):
        cache.update(tokens[:, :, start:stop])
        other.update(tokens[:, :, :4])  # its pages lie between
    span = cache.span(1)
    parts = cache.update(tokens[:, :, 19:])

    def make_both(parts):
        made.extend((part.kv_start, part.kv_stop) for part in parts)
        return tuple(Part(start, stop, (each[0], each[0])) for start, stop, each in parts)

    keys = Keys.made(parts, make_both, Causal() & SlidingWindow(3), span)
    read = torch.cat([part.streams[0] for part in keys.parts], 2)
    assert read.flatten().tolist() == [17, 18, 19]
    assert min(start for start, _ in made) == 17
