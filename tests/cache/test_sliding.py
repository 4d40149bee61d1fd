"""`SlidingCache`: its memory is bounded, and it can be emptied."""

import pytest
import torch

from regard import SlidingCache


@pytest.mark.parametrize("size", [1, 4])
def test_a_sliding_cache_can_be_truncated_to_nothing(size):
    cache, new = SlidingCache(size), torch.randn(1, 1, 20, 2)
    cache.update(new)
    cache.truncate(0)
    assert cache.span(3).kv_start == cache.length == 0
    assert torch.equal(cache.update(new[:, :, :3])[0].streams[0], new[:, :, :3])


@pytest.mark.parametrize(("size", "rollback"), [(1, 0), (16, 0), (64, 10)])
def test_a_sliding_cache_stays_within_its_bound(size, rollback):
    cache = SlidingCache(size, rollback)
    for chunk in (500, 1, 1, 30, *[1] * 100):
        cache.update(torch.zeros(1, 1, chunk, 1, dtype=torch.uint8))
        stored = sum(held.untyped_storage().nbytes() for held in cache._held)
        assert stored <= 1.25 * size + chunk + rollback + 1
    assert cache.span(1).kv_start == cache.length - size + 1


def test_a_short_sequence_needs_no_whole_window():
    cache = SlidingCache(100_000)
    sizes = set()
    for _ in range(600):
        cache.update(torch.zeros(1, 1, 1, 1))
        sizes.add(cache.allocated_bytes // 4)
    assert sizes == {256, 514, 1030}  # each time twice the tokens held and the new one
    cache.update(torch.zeros(1, 1, 200_000, 1))
    assert cache.allocated_bytes // 4 == 125_000
