"""Sizes read from layers: a layer built from them is the same, its cache takes those bytes."""

from dataclasses import replace

import torch

from regard import KVCache, PagedCache, PagePool, QuantizedCache, SlidingCache, StaticCache
from regard.compare import CANDIDATES, Runner
from regard.compare.shapes import bytes_of_caches, shape_of, storage_of
from regard.convert import as_latent
from regard.hf import attention_modules, attention_of
from regard.plan.cost import cost_of
from regard.plan.shapes import STORAGES
from tiny import tiny, tokens


def test_storages_of_caches():
    assert storage_of([KVCache()]) == STORAGES["plain"]
    assert storage_of([QuantizedCache()]) == STORAGES["int8"]
    assert storage_of([QuantizedCache(bits=4, group=32)]) == STORAGES["int4"]
    for name in ("K8V8", "K8V4", "K6V4", "K4V4"):
        assert storage_of([QuantizedCache(format=name)]) == STORAGES[name]
    paged = storage_of([PagedCache(PagePool(9, 32, format="K6V4"))], [5])
    assert paged == replace(STORAGES["K6V4"], page_size=32)
    assert storage_of([SlidingCache(4)]) is storage_of([StaticCache(4)]) is None


@torch.no_grad()
def test_bytes_are_those_of_the_caches_that_ran():
    model, window = tiny("llama"), tokens(1, 30)
    own = [attention_of(module) for module in attention_modules(model).values()]
    for layers in (own, [as_latent(each) for each in own]):
        for cache in {each.cache for each in CANDIDATES}:
            runner = Runner(model, layers, cache=cache)
            runner.hidden(window)
            shapes, storage = tuple(map(shape_of, layers)), storage_of(runner.caches)
            found = bytes_of_caches(shapes, storage, context=30, dtype="float32")
            assert found == runner.cache_bytes


def test_every_row_of_a_comparison_has_the_cost_of_its_real_caches(result):
    ran = [row for row in result.rows if row.perplexity is not None]
    assert len(ran) >= 12
    for row in ran:
        costs = [cost_of(each, row.storage, context=result.context) for each in row.layers]
        assert sum(each.cache_bytes for each in costs) == row.cache_bytes_per_token * result.context
