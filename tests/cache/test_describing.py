"""What `describe()` says of a cache."""

import pytest
import torch

from filled_caches import KINDS, filled
from regard import KVCache, PagedCache, PagePool, QuantizedCache, SlidingCache


@pytest.mark.parametrize("kind", KINDS)
def test_a_description_has_the_bytes_that_the_cache_counts(kind):
    cache = filled(kind, "latent and positions")
    first, second = cache.describe().splitlines()
    assert first.startswith(f"{cache!r}: 2 rows of 6 tokens")
    assert f"{cache.nbytes:,} bytes held, {cache.allocated_bytes:,} allocated" in first
    assert second == "  streams [2, 1, 6, 7] float64, [2, 1, 6, 1] int32"
    assert KINDS[kind]().describe() == f"{KINDS[kind]()!r}: no tokens"


def test_rows_and_windows_are_described():
    cache, k = KVCache(), torch.zeros(2, 3, 1000, 4)
    cache.update(k, k)
    cache.truncate(torch.tensor([7, 1000]))
    assert "2 rows of 7 to 1,000 tokens, 192,000 bytes held" in cache.describe()
    window = SlidingCache(4)
    window.update(k)
    assert "2 rows of 1,000 tokens, the last 3 held" in window.describe()


def test_codes_are_described_by_the_streams_that_were_given():
    cache, k = QuantizedCache(format="K8V4"), torch.zeros(1, 2, 1, 8).bfloat16()
    cache.update(k, k)
    text = cache.describe()
    assert "QuantizedCache(format='K8V4'" in text and "[1, 2, 1, 8] bfloat16" in text
    assert "1 row of 1 token, " in text


def test_a_paged_cache_is_described():
    cache, k = PagedCache(PagePool(8, 4)), torch.zeros(2, 1, 6, 2)
    cache.update(k, k)
    text = cache.describe()
    assert "2 rows of 6 tokens, 192 bytes held, 256 allocated" in text
    assert "streams [2, 1, 6, 2] float32" in text
