"""The protocol of caches, and the neutral cache."""

import copy
import pickle

import pytest
import torch

from regard import NO_CACHE, KVCache, Part, QuantizedCache, SlidingCache, StaticCache
from regard.cache import Cache


def test_no_cache_holds_no_tokens():
    k = torch.zeros(1, 1, 2, 3)
    assert NO_CACHE.update(k) == (Part(0, 2, (k,)),)
    assert NO_CACHE.length == 0
    assert copy.deepcopy(NO_CACHE) is NO_CACHE
    assert pickle.loads(pickle.dumps(NO_CACHE)) is NO_CACHE
    with pytest.raises(ValueError, match="length"):
        NO_CACHE.truncate(1)
    NO_CACHE.truncate(0)
    with pytest.raises(ValueError, match="holds nothing"):
        NO_CACHE.reorder(torch.tensor([0]))


@pytest.mark.parametrize(
    "cache", [NO_CACHE, KVCache(), StaticCache(8), SlidingCache(3), QuantizedCache()], ids=repr
)
def test_every_cache_has_the_protocol(cache):
    assert isinstance(cache, Cache)
    new = torch.randn(1, 2, 3, 4)
    (peeked,) = cache.peek(new)
    span = cache.span(3)
    (part,) = cache.update(new)
    assert (part.kv_start, part.kv_stop) == (span.kv_start, span.kv_stop) == (0, 3)
    assert torch.equal(peeked.streams[0], part.streams[0])


def test_a_class_without_all_methods_is_not_a_cache():
    class Incomplete:
        length = nbytes = 0

        def update(self, *new):
            return ()

    assert not isinstance(Incomplete(), Cache)
