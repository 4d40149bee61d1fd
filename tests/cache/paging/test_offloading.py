"""Offloaded pages read as hot ones do, stay where they are while they are read.

The oracle: the same operations in a pool whose pages are all hot.
"""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import session
from regard import Causal, MultiHeadAttention, PagedCache, PagePool
from regard.cache.paging.contexts import Context
from regard.cache.paging.formats import format_of
from regard.cache.paging.offloading import Offload
from regard.cache.paging.pages import Page, PageTable, Slab, outlines_of
from regard.cache.paging.reading import parts_of, segments_of

CONTEXT = Context("5e1f")


def pools(form="plain", hot=3):
    """A pool of hot pages, and one that offloads."""
    return [PagePool(400, 4, format=form, offload=each) for each in (None, Offload(hot))]


def values(parts):
    """The streams of all parts, and where the keys begin."""
    streams = zip(*(part.streams[:] for part in parts), strict=True)
    return [parts[0].kv_start, *(torch.cat(each, 2) for each in streams)]


def same(mine, theirs):
    pairs = zip(mine, theirs, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def poison(pool):
    """NaN in hot and cold pages that are not in use."""
    for slab in pool.memory.slabs():
        for index in slab._is_free:
            for buffer in slab.stored(index):
                buffer.view(torch.uint8).fill_(255)


def cold_slabs(pool):
    return [*pool.memory.offloading.slabs.values()]


def tokens(n, rows=2):
    return torch.randn(rows, 2, n, 6), torch.randn(rows, 2, n, 5)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("form", ["plain", "K8V4"])
def test_cold_pages_read_as_hot_ones(form, window):
    made = pools(form)
    caches = [PagedCache(pool, window=window) for pool in made]
    for n in (1, 7, 30, 1, 1, 1, 1, 5, 1, 17, 1, 1, 1, 1, 1):
        new = tokens(n)
        want, *found = [values(cache.update(*new)) for cache in caches]
        assert all(same(want, each) for each in found)
        for pool in made:
            poison(pool)
    for pool in made[1:]:
        assert pool.cold_pages > 0
        slabs = cold_slabs(pool)
        assert all(page.sealed for page in pool.memory.in_order() if page.slab in slabs)
        assert pool.pages_in_use - pool.cold_pages <= 3 + 2 * 2 + 2  # and open or first pages
        assert pool.nbytes.held == made[0].nbytes.held
    for cache in caches:
        cache.release()
    assert all(pool.nbytes == (0, 0, 0) for pool in made)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["update", "update", "update", "fork", "truncate", "reorder", "drop", "peek"]
        ),
        st.integers(0, 3),
        st.integers(0, 20),
    ),
    min_size=5,
    max_size=25,
)


@given(operations=OPERATIONS, form=st.sampled_from(["plain", "K4V4"]))
@settings(max_examples=500 if session.LONG else 12, deadline=None)
def test_any_operations_read_as_in_a_pool_of_hot_pages(operations, form):
    made = pools(form)
    batches = [[PagedCache(pool)] for pool in made]
    first = tokens(9)
    for caches in batches:
        caches[0].update(*first)
    for step, (name, which, number) in enumerate(operations):
        torch.manual_seed(step)
        new = tokens(number)
        results = []
        for caches in batches:
            cache = caches[which % len(caches)]
            results.append(applied(caches, cache, name, number, new))
            poison(cache.pool)
        assert all(same(results[0], each) for each in results[1:])
    for caches, pool in zip(batches, made, strict=True):
        for cache in caches:
            cache.release()
        assert pool.nbytes == (0, 0, 0)


def applied(caches, cache, name, number, new):
    """What an operation returns or leaves behind; tokens are those of a seed."""
    if name == "update":
        return values(cache.update(*new))
    if name == "fork":
        caches.append(cache.fork())
    if name == "truncate":
        cache.truncate(max(1, cache.length - number))
    if name == "reorder":
        cache.reorder(torch.tensor([[0, 1], [1, 0], [0, 0], [1, 1]][number % 4]))
    if name == "drop" and len(caches) > 1:
        caches.remove(cache)
        cache.release()
        return [len(caches)]
    return values(cache.peek(*new))


def test_what_is_read_is_not_moved():
    pool = PagePool(100, 4, offload=Offload(12))
    cache, other = PagedCache(pool), PagedCache(pool)
    new = tokens(20)
    cache.update(*new)
    parts = cache.update(*tokens(1))
    other.update(*tokens(40))
    other.update(*tokens(1))  # moves all that it may
    held = [page for table in cache.rows for page in table.pages]
    assert pool.cold_pages and not any(page.slab in cold_slabs(pool) for page in held)
    poison(pool)
    assert torch.equal(values(parts)[1][:, :, :20], new[0])
    del parts
    other.update(*tokens(1))
    assert sum(page.slab in cold_slabs(pool) for page in held) > 0
    poison(pool)
    assert torch.equal(values(cache.peek(*tokens(0)))[1][:, :, :20], new[0])


def test_a_page_that_was_moved_before_its_update_is_undone_is_written_again():
    for form in ("plain", "K8V4"):
        pool = PagePool(100, 4, format=form, offload=Offload(1))
        cache, other, oracle = (
            PagedCache(pool),
            PagedCache(pool),
            PagedCache(PagePool(99, 4, format=form)),
        )
        first, last = tokens(7), tokens(3)
        for each in (cache, oracle):
            each.update(*first)
        before = cache.snapshot()
        cache.update(*tokens(1))
        other.update(*tokens(9))
        other.update(*tokens(1))
        cache.restore(before)
        poison(pool)
        for each in (cache, oracle):
            each.update(*last)
        assert same(values(cache.peek(*tokens(0))), values(oracle.peek(*tokens(0))))


def test_the_pages_used_longest_ago_go_first():
    pool = PagePool(100, 4, offload=Offload(12))
    first, second = PagedCache(pool), PagedCache(pool)
    for cache in (first, second, first):  # the second cache is the one used longest ago
        cache.update(*tokens(8, rows=1))
    third = PagedCache(pool)
    third.update(*tokens(24, rows=1))
    third.update(*tokens(1, rows=1))
    cold = [
        sum(page.slab in cold_slabs(pool) for page in cache.rows[0].pages)
        for cache in (first, second, third)
    ]
    assert cold == [0, 2, 0]


def test_rows_of_a_batch_are_moved_column_by_column():
    """Columns whose rows lie in different slabs are copied to be read: there is one at most."""
    pool = PagePool(400, 4, offload=Offload(30))
    cache = PagedCache(pool)
    for n in (59, 1, 1, 1, 1, 1, 1, 1, 1, 1):
        cache.update(*tokens(n, rows=3))
        cold = [[page.slab in cold_slabs(pool) for page in t.pages] for t in cache.rows]
        assert sum(len(set(column)) > 1 for column in zip(*cold, strict=True)) <= 1
    assert 10 < sum(map(sum, cold)) < 30


def test_on_another_device_cold_pages_are_copied_a_piece_at_a_time():
    """ "meta" stands for it: it has shapes, and refuses to be mixed with the CPU."""
    meta = torch.device("meta")
    for form in ("plain", "K4V4"):
        outlines = outlines_of([x.to(meta) for x in tokens(1)], format_of(form), 4, None)
        sealed = form != "plain"
        hot = Slab(outlines, 4, sealed=sealed)
        cold = Slab(outlines, 4, sealed=sealed, host_of=hot, most=9)
        cold.reserve(9)
        assert all(buffer.device.type == "cpu" for buffer in cold.stored(0))
        tables = [PageTable([Page(cold, cold.take()) for _ in range(4)]) for _ in range(2)]
        (part,) = parts_of(segments_of(tables), 4, 1, 15)
        for piece, size in ((part, 14), (part.narrow(3, 9), 6)):
            for stream, outline, width in zip(
                piece.streams[:], piece.outlines, (6, 5), strict=True
            ):
                assert stream.device == outline.device == meta
                assert stream.shape == outline.shape == (2, 2, size, width)
        assert all(x.device == meta for x in cold.read(torch.arange(3)))


def test_stored_prefixes_are_offloaded_and_found(tmp_path):
    for pool in pools()[1:]:
        cache, text, new = PagedCache(pool), list(range(40)), tokens(40, rows=1)
        cache.update(*new)
        pool.store(text, [cache], context=CONTEXT)
        cache.release()
        other = PagedCache(pool)
        other.update(*tokens(30, rows=1))
        other.update(*tokens(1, rows=1))
        assert pool.cold_pages > 7
        poison(pool)
        (found,) = pool.prefix(text, context=CONTEXT).caches()
        assert torch.equal(values(found.peek(*tokens(0, rows=1)))[1], new[0][:, :, :36])
        saved, again = tmp_path / "pool.safetensors", PagePool(400, 4)
        assert pool.save(saved) == again.load(saved, weights="5e1f") == 10
        small = PagePool(400, 4, offload=pool.memory.offloading.offload)
        small.load(saved, weights="5e1f")
        assert small.cold_pages == small.pages_in_use == 10  # the hot set stays bounded
        (loaded,) = small.prefix(text, context=CONTEXT).caches()
        assert torch.equal(values(loaded.peek(*tokens(0, rows=1)))[1], new[0][:, :, :36])
        found.release()
        pool.evict()
        other.release()
        assert pool.nbytes == (0, 0, 0)


def test_a_paged_cache_with_cold_pages_is_saved(tmp_path):
    for form in ("plain", "K8V4"):
        for pool in pools(form)[1:]:
            cache, again = PagedCache(pool), PagedCache(PagePool(400, 4, format=form))
            for n in (30, 1, 1):
                cache.update(*tokens(n))
            assert pool.cold_pages
            cache.save(tmp_path / "cache", weights="mine")
            again.load(tmp_path / "cache", weights="mine")
            new = tokens(1)
            assert same(values(cache.peek(*new)), values(again.peek(*new)))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="hot_pages is at least 1, got 0"):
        Offload(0)


def test_other_surroundings():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            pool = PagePool(400, 4, offload=Offload(2), format="K8V4")
            cache = PagedCache(pool)
            for n in (30, 1, 1):
                new = [torch.zeros(1, 2, n, 6, device="cpu", dtype=torch.bfloat16)] * 2
                parts = cache.update(*new)
    finally:
        torch.set_default_dtype(torch.float32)
    assert pool.cold_pages and all(part.streams[0].device.type == "cpu" for part in parts)
    cache.update(*new)  # outside of inference mode


def test_threads_that_append_and_attend_lose_nothing():
    """Moves of one thread while another reads; few hot pages, so that every step moves some."""
    layer = MultiHeadAttention(8, 2, mask=Causal()).eval()
    x = torch.randn(3, 1, 40, 8)
    with torch.no_grad():
        want = [layer(each) for each in x]
    for pool in pools(hot=1)[1:]:
        errors = []

        def decode(index, pool=pool, errors=errors):
            cache = PagedCache(pool)
            with torch.no_grad():
                out = [layer(x[index][:, at : at + 1], cache=cache) for at in range(40)]
            errors.append((torch.cat(out, 1) - want[index]).abs().max().item())

        threads = [threading.Thread(target=decode, args=(index,)) for index in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(errors) == 3 and max(errors) < 1e-5
