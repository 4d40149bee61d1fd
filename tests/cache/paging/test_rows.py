"""The tables of a cache: pages that retire, tables that go back, the end of the cache."""

import gc

import torch

from regard import PagedCache, PagePool
from regard.cache.paging.rows import Rows

X = torch.randn(1, 1, 10, 4)


def filled():
    pool = PagePool(10, 4)
    cache = PagedCache(pool)
    cache.update(X, X)
    return pool, cache


def test_retired_pages_are_released_at_the_next_call():
    pool, cache = filled()
    rows = Rows(cache, pool)
    with pool.lock:
        rows.set([table.copied() for table in cache.rows])
        for page in rows.tables[0].pages:
            pool.retain(page)
    rows.retire_before([2])
    assert rows.tables[0].first == 2 and [page.references for page in rows.retired] == [2, 2]
    rows.settle()
    assert [page.references for page in cache.rows[0].pages] == [1, 1, 2]
    rows.release()
    assert [page.references for page in cache.rows[0].pages] == [1, 1, 1] and rows.are_released


def test_the_pages_of_an_owner_are_dropped_with_it():
    pool, cache = filled()
    assert pool.pages_in_use == 3
    del cache
    gc.collect()
    assert pool.pages_in_use == 0


def test_parts_are_empty_where_there_are_no_tokens():
    rows = Rows(torch.nn.Identity(), PagePool(2))
    (part,) = rows.parts(3, 3, (X[:, :, :0],))
    assert (part.kv_start, part.kv_stop) == (3, 3) and part.streams[0].shape[2] == 0
