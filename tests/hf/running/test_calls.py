"""The parts that every cache returns."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from regard import QuantizedCache, SlidingCache
from regard.hf.generating.caches import CacheLayer
from regard.hf.generating.generation_cache import GenerationCache
from regard.hf.running.calls import appended


def heads(rows=1, keys=6, dtype=torch.float32):
    q = torch.randn(1, 4, rows, 16, dtype=dtype)
    return q, *(torch.randn(1, 2, keys, 16, dtype=dtype) for _ in range(2))


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "held"), [(QuantizedCache, 8), (lambda: SlidingCache(3), 4), (None, 8)]
)
def test_parts_are_numbered_from_the_first_key_that_is_held(make, held):
    cache = DynamicCache() if make is None else GenerationCache([CacheLayer(make)])
    for _ in range(4):
        _, k, v = heads(keys=2)
        parts = appended(cache, SimpleNamespace(layer_idx=0), k, v).parts
    assert parts[0].kv_start == 0
    assert all(a.kv_stop == b.kv_start for a, b in pairwise(parts))
    assert parts[-1].kv_stop == held
    torch.testing.assert_close(parts[-1].streams[1][:, :, -2:], v, atol=0.1, rtol=0)
