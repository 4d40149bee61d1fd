"""A cache for every layer inside a module."""

import pytest
import torch
from torch import nn

from layers import assert_same, inputs, make
from ranks import on_ranks
from regard import StaticCache
from regard.distributed.decode.caches import sharded_caches
from regard.distributed.tensor.parallel import tensor_parallel


class Model(nn.Module):
    """Two layers, one inside another module."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = make("GQA"), nn.Sequential(nn.Identity(), make("MLA"))

    def forward(self, x, caches=None):
        given = [{}, {}] if caches is None else [{"cache": each} for each in caches.values()]
        return self.rest[1](self.first(x, **given[0]), **given[1])


def _decoded(mesh, split):
    model, x = Model(), inputs(2, 6)
    if split:
        tensor_parallel(model, mesh)
    caches = sharded_caches(model, mesh, page_size=2, storage=lambda: StaticCache(5))
    assert list(caches) == ["first", "rest.1"]
    assert "page_size=2, storage=StaticCache(5)" in repr(caches["first"])
    with torch.no_grad():
        return torch.cat([model(x[:, at : at + 2], caches) for at in (0, 2, 4)], 1)


def test_a_cache_for_every_layer():
    with torch.no_grad():
        expected = Model()(inputs(2, 6))
    for split in (False, True):
        for out in on_ranks(3, _decoded, split):
            assert_same(out, expected)


def test_modules_without_layers_are_refused():
    with pytest.raises(ValueError, match="Linear contains no attention layer of regard"):
        sharded_caches(nn.Linear(2, 2), mesh=None)
