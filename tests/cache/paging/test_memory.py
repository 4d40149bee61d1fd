"""What a pool counts: pages, bytes, room, and what it refuses."""

import gc

import pytest
import torch

from regard import PagedCache, PagePool

X = torch.randn(2, 2, 20, 8)
PAGE = 2 * 2 * 4 * 8 * 4  # bytes: streams, heads, tokens, channels of float32


def filled(pool, tokens, rows=1):
    cache = PagedCache(pool)
    cache.update(X[:rows, :, :tokens], X[:rows, :, :tokens])
    return cache


def test_bytes_are_held_or_free():
    pool = PagePool(40, 4)
    cache = filled(pool, 10)
    held, reusable, free = pool.nbytes
    assert (held, reusable) == (3 * PAGE, 0) and free == pool.memory.slabs()[
        0
    ].allocated_bytes - held
    assert cache.nbytes == 10 * PAGE // 4 and cache.allocated_bytes == held


def test_garbage_collected_caches_release_their_pages():
    pool = PagePool(40, 4)
    caches = [filled(pool, 10, rows=2) for _ in range(3)]
    assert pool.pages_in_use == 18
    del caches[:2]
    gc.collect()
    assert pool.pages_in_use == 6
    caches.clear()
    gc.collect()
    assert pool.pages_in_use == 0 and pool.nbytes == (0, 0, 0)


def test_pages_dropped_by_garbage_collection_make_room():
    pool = PagePool(3, 4)
    filled(pool, 10)
    gc.collect()
    assert filled(pool, 12).length == 12


def test_a_cache_is_released_once():
    pool = PagePool(8, 4)
    cache = filled(pool, 10)
    cache.release()
    assert pool.pages_in_use == 0
    for use in (cache.release, lambda: cache.update(X, X), cache.fork, lambda: cache.truncate(0)):
        with pytest.raises(ValueError, match="was released"):
            use()
    del cache
    gc.collect()
    assert pool.pages_in_use == 0


def test_layers_of_several_widths_share_the_number_of_pages():
    pool = PagePool(5, 4)
    first, second = PagedCache(pool), PagedCache(pool)
    first.update(X[:1, :, :8], X[:1, :, :8])
    second.update(X[:1, :1, :8, :3])
    assert len(pool.memory.slabs()) == 2 and pool.pages_in_use == 4
    with pytest.raises(ValueError, match="needs 2 pages more, and of num_pages=5 1 are free"):
        second.update(X[:1, :1, :8, :3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_pages": 0}, "num_pages is at least 1"),
        ({"num_pages": 2, "page_size": 0}, "page_size is at least 1"),
        ({"num_pages": 2, "format": "K3V3"}, "neither 'plain' nor"),
    ],
)
def test_wrong_sizes_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PagePool(**arguments)
