"""Tables that are cut, chosen and forked: references, copies, and the pool when it is full."""

import gc
from collections import Counter

import pytest
import torch

from regard import PagedCache, PagePool
from regard.cache.paging.pages import Slab
from regard.cache.paging.tables import Tables, pages_of, select

X = torch.randn(3, 2, 20, 8)


def filled(num_pages=40, rows=1, tokens=10, form="plain"):
    pool = PagePool(num_pages, 4, format=form)
    cache = PagedCache(pool)
    cache.update(X[:rows, :, :tokens], X[:rows, :, :tokens])
    return pool, cache


def counted(*caches):
    return Counter(page for cache in caches for page in pages_of(cache.rows))


def check_references(*caches):
    for page, count in counted(*caches).items():
        assert page.references == count


def test_a_fork_shares_sealed_pages_and_copies_the_open_one():
    pool, cache = filled()
    fork = cache.fork()
    (mine,), (its,) = cache.rows, fork.rows
    assert mine.pages[:2] == its.pages[:2] and mine.pages[2] is not its.pages[2]
    assert pool.pages_in_use == 4
    check_references(cache, fork)


def test_cutting_a_shared_page_copies_it():
    pool, cache = filled()
    fork = cache.fork()
    fork.truncate(6)
    fork.update(-X[:1, :, :3], -X[:1, :, :3])
    assert torch.equal(cache.peek(X[:1, :, :0], X[:1, :, :0])[0].streams[0], X[:1, :, :10])
    assert pool.pages_in_use == 3 + 2
    check_references(cache, fork)


def test_cutting_a_private_page_takes_none():
    pool, cache = filled(num_pages=3)
    cache.truncate(6)
    assert pool.pages_in_use == 2 and not cache.rows[0].pages[-1].sealed
    cache.truncate(0)
    assert pool.pages_in_use == 0


def test_a_full_pool_lets_a_cut_use_the_pages_that_it_frees():
    pool, cache = filled(num_pages=4)
    fork = cache.fork()
    assert pool.pages_in_use == 4
    fork.truncate(6)
    assert pool.pages_in_use == 4
    check_references(cache, fork)


@pytest.mark.parametrize("form", ["plain", "K8V8"])
def test_what_the_pool_has_no_room_for_changes_nothing(form):
    pool, cache = filled(num_pages=3, form=form)
    tables, before = [table.copied() for table in cache.rows], pool.nbytes
    for operation in (
        cache.fork,
        lambda: cache.reorder(torch.tensor([0, 0])),
        lambda: cache.update(X[:1, :, :3], X[:1, :, :3]),
    ):
        with pytest.raises(ValueError, match="num_pages=3"):
            operation()
        assert cache.rows == tables and cache.length == 10 and pool.nbytes == before
    check_references(cache)


def test_repeated_rows_share_full_pages_and_dropped_ones_are_freed():
    pool, cache = filled(rows=3)
    cache.reorder(torch.tensor([2, 0, 2]))
    assert pool.pages_in_use == 2 * 2 + 3
    parts = cache.peek(X[:, :, :0], X[:, :, :0])
    values = torch.cat([part.streams[0] for part in parts], 2)
    assert torch.equal(values, X[[2, 0, 2], :, :10])
    check_references(cache)


CHANGES = {
    "update": lambda cache: cache.update(X[:2, :, 11:20], X[:2, :, 11:20]),
    "step": lambda cache: cache.update(X[:2, :, 11:12], X[:2, :, 11:12]),
    "fork": lambda cache: cache.fork(),
    "truncate": lambda cache: cache.truncate(7),
    "truncate rows": lambda cache: cache.truncate(torch.tensor([5, 10])),
    "reorder": lambda cache: cache.reorder(torch.tensor([1, 1, 0, 0])),
}


def read(cache):
    none = X[: len(cache.rows), :, :0]
    return torch.cat([part.streams[0] for part in cache.peek(none, none)], 2)


def interrupted_at(call, patch, method):
    """`Slab.method`, which the user interrupts when it is called so many times."""
    right, calls = getattr(Slab, method), []

    def called(self, *args):
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return right(self, *args)

    patch.setattr(Slab, method, called)


@pytest.mark.parametrize("form", ["plain", "K8V4"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_is_interrupted_is_none(change, form, monkeypatch):
    found = 0
    for method in ("reserve", "take", "put", "write", "read", "clear"):
        for call in (1, 2, 3):
            pool, cache = filled(rows=2, tokens=11, form=form)
            fork, before, held = cache.fork(), read(cache), pool.pages_in_use
            with monkeypatch.context() as patch:
                interrupted_at(call, patch, method)
                try:
                    CHANGES[change](cache)
                    continue  # there are fewer calls
                except KeyboardInterrupt:
                    found += 1
            assert cache.length == 11 and pool.pages_in_use == held
            assert torch.equal(read(cache), before) and torch.equal(read(fork), before)
            check_references(cache, fork)
            CHANGES[change](cache)
            cache.release()
            fork.release()
            assert pool.pages_in_use == 0
    assert found


def test_a_cut_that_is_interrupted_in_a_full_pool_ends_with_a_page(monkeypatch):
    _, cache = filled(num_pages=4)
    fork, before = cache.fork(), read(cache)
    with monkeypatch.context() as patch:
        interrupted_at(1, patch, "put")
        with pytest.raises(KeyboardInterrupt):
            fork.truncate(6)
    assert fork.length == 8 and torch.equal(read(fork), before[:, :, :8])
    fork.truncate(6)
    assert torch.equal(read(fork), before[:, :, :6]) and torch.equal(read(cache), before)
    check_references(cache, fork)


# ---- references ----


def test_retired_pages_are_released_at_the_next_call():
    pool, cache = filled()
    tables = Tables(cache, pool.memory)
    with pool.memory.lock:
        tables.replace([table.copied() for table in cache.rows])
        tables.replace([table.since(2) for table in tables.tables], retires=True)
    assert tables.tables[0].first == 2 and [page.references for page in tables.retired] == [2, 2]
    tables.settle()
    assert [page.references for page in cache.rows[0].pages] == [1, 1, 2]
    tables.release()
    assert [page.references for page in cache.rows[0].pages] == [1, 1, 1] and tables.are_released


def test_tables_that_come_back_take_their_retired_pages_with_them():
    pool, cache = filled()
    before = [table.copied() for table in cache.rows]
    tables = cache._rows
    tables.replace([table.since(2) for table in tables.tables], retires=True)
    tables.replace(before)
    assert tables.retired == [] and tables.tables == before and pool.pages_in_use == 3
    check_references(cache)


def test_the_pages_of_an_owner_are_dropped_with_it():
    pool, cache = filled()
    assert pool.pages_in_use == 3
    del cache
    gc.collect()
    assert pool.pages_in_use == 0


def test_parts_are_empty_where_there_are_no_tokens():
    tables = Tables(torch.nn.Identity(), PagePool(2).memory)
    (part,) = tables.parts(3, 3, (X[:, :, :0],))
    assert (part.kv_start, part.kv_stop) == (3, 3) and part.streams[0].shape[2] == 0


def test_the_cost_of_a_change_is_what_it_takes_and_frees():
    pool, cache = filled(rows=2)
    fork, before = cache.fork(), pool.pages_in_use
    cost = fork.cost_of_cut(6)
    assert (cost.copies, cost.freed) == (2, 2)  # of each row a sealed page, and the open one
    fork.truncate(6)
    assert pool.pages_in_use == before
    cost = select(fork.rows, [1, 1, 1])
    assert (cost.copies, cost.freed) == (2, 1)
    fork.reorder(torch.tensor([1, 1, 1]))
    assert pool.pages_in_use == before + 1
