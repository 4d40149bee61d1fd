"""`PagedCache` as a cache: what `update` returns, windows, snapshots, refusals."""

import copy
import itertools

import pytest
import torch

from regard import Causal, KVCache, PagedCache, PagePool, SlidingCache, attend
from regard.masks import SlidingWindow

X = torch.randn(2, 3, 40, 8)


def values(parts):
    return torch.cat([part.streams[0] for part in parts], 2)


def grown(cache, chunks, x=X):
    at = 0
    for chunk in chunks:
        new = x[:, :, at : at + chunk]
        parts = cache.update(new, -new)
        at += chunk
    return parts


def test_a_chunk_is_returned_as_it_was_given_after_the_past():
    cache = PagedCache(PagePool(60, 4, format="K4V4"))
    grown(cache, [10])
    new = X[:, :, 10:15]
    *_, last = cache.update(new, -new)
    assert (last.kv_start, last.kv_stop) == (10, 15) and torch.equal(last.streams[0], new)


@pytest.mark.parametrize("call", ["peek", "update"])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize(("size", "form"), [(1, "K8V4"), (4, "K4V4"), (32, "K6V4")])
def test_new_tokens_of_rows_of_any_lengths_are_returned_as_they_were_given(
    size, form, window, call
):
    lengths, chunks = torch.tensor([5, 19]), (1, 2, 11, 1, 6)
    cache = PagedCache(PagePool(400, size, format=form), window=window, rollback=20)
    grown(cache, [19])
    cache.truncate(lengths)
    rows = [X[row, :, :length] for row, length in enumerate(lengths.tolist())]
    for chunk in chunks:
        new = torch.randn(2, 3, chunk, 8)
        parts = getattr(cache, call)(new, -new)
        assert all(a.kv_stop == b.kv_start for a, b in itertools.pairwise(parts))
        for row, held in enumerate(rows):
            at = held.shape[1] - parts[0].kv_start
            assert torch.equal(values(parts)[row, :, at : at + chunk], new[row])
            few = at if window is None else min(at, window - 1)
            gap = values(parts)[row, :, at - few : at] - held[:, held.shape[1] - few :]
            assert gap.numel() == 0 or gap.abs().max() < 1  # codes of 4 bits, in part
        if call == "peek":
            cache.update(new, -new)
        rows = [torch.cat(each, 1) for each in zip(rows, new, strict=True)]


@pytest.mark.parametrize("call", ["peek", "update"])
def test_slots_before_the_windows_of_all_rows_need_no_pages(call):
    cache = PagedCache(PagePool(60, 4), window=1)
    grown(cache, [20])
    cache.truncate(torch.tensor([8, 14]))  # a window of 1 needs none of the pages released
    new = X[:, :, 20:23]
    parts = getattr(cache, call)(new, new)
    for row, length in enumerate((8, 14)):
        at = length - parts[0].kv_start
        assert torch.equal(values(parts)[row, :, at : at + 3], new[row])


def test_the_parts_of_a_step_stay_right_until_the_next_one():
    cache = PagedCache(PagePool(60, 4, format="K4V4"))
    grown(cache, [11])
    parts = cache.update(X[:, :, 11:12], -X[:, :, 11:12])  # fills a page, which is sealed then
    assert torch.equal(values(parts)[:, :, 8:], X[:, :, 8:12])
    other = PagedCache(cache.pool)
    grown(other, [40])
    assert torch.equal(values(parts)[:, :, 8:], X[:, :, 8:12])


@pytest.mark.parametrize("window", [1, 3, 4, 9])
def test_a_window_releases_the_pages_before_it(window):
    cache, oracle = PagedCache(PagePool(60, 4), window=window), SlidingCache(window)
    for size in (7, 1, 1, 1, 12, 1, 3):
        start = cache.length
        new = X[:, :, start : start + size]
        assert cache.span(size) == oracle.span(size)
        (want,), found = oracle.update(new, new), cache.update(new, new)
        assert found[0].kv_start == want.kv_start
        assert torch.equal(values(found), want.streams[0])
        held = cache.length - cache.rows[0].first * 4
        assert held < window + 2 * 4


def test_a_window_without_rollback_cannot_be_truncated_past_its_pages():
    cache = PagedCache(PagePool(60, 4), window=6)
    grown(cache, [30])
    assert not cache.can_truncate(20) and cache.can_truncate(29)
    with pytest.raises(ValueError, match="rollback=10"):
        cache.truncate(20)
    assert cache.length == 30
    later = PagedCache(PagePool(60, 4), window=6, rollback=10)
    grown(later, [30])
    later.truncate(20)
    assert torch.equal(values(later.update(X[:, :, 20:21], X[:, :, 20:21])), X[:, :, 15:21])


@pytest.mark.parametrize("form", ["plain", "K8V8"])
def test_restore_undoes_an_update(form):
    pool = PagePool(60, 4, format=form)
    cache = PagedCache(pool)
    for at, size in ((0, 6), (6, 1), (7, 1), (8, 9), (17, 1)):
        before, pages = cache.snapshot(), pool.pages_in_use - len(cache._rows.retired)
        cache.update(-X[:, :, at : at + size], X[:, :, at : at + size])
        cache.restore(before)
        assert cache.length == at and pool.pages_in_use == pages
        cache.update(X[:, :, at : at + size], X[:, :, at : at + size])
        assert (
            values(cache.peek(X[:, :, :0], X[:, :, :0])) - X[:, :, : at + size]
        ).abs().max() < 0.05


def test_a_deep_copy_is_a_fork():
    pool = PagePool(60, 4)
    cache = PagedCache(pool)
    grown(cache, [9])
    other = copy.deepcopy(cache)
    assert other.pool is pool and pool.pages_in_use == 2 * 2 + 2 * 2
    other.update(X[:, :, 9:10], X[:, :, 9:10])
    assert (cache.length, other.length) == (9, 10)


def test_rows_that_share_their_pages_are_one_part():
    cache = PagedCache(PagePool(60, 4))
    grown(cache, [10], X[:1])
    cache.reorder(torch.tensor([0, 0, 0]))
    parts = cache.update(
        X[:1, :, 10:11].expand(3, -1, -1, -1), X[:1, :, 10:11].expand(3, -1, -1, -1)
    )
    assert parts[0].kv_stop == 8 and parts[0].streams[0].stride(0) == 0
    assert cache.nbytes == (8 + 3 * 3) * 2 * 3 * 8 * 4


def test_attention_over_ragged_rows_is_that_of_a_growing_cache():
    cache, oracle = PagedCache(PagePool(60, 4)), KVCache()
    for each in (cache, oracle):
        grown(each, [10])
        each.truncate(torch.tensor([3, 9]))
    q = torch.randn(2, 3, 2, 8)
    outs = []
    for each in (cache, oracle):
        span, new = each.span(2), X[:, :, 20:22]
        whole = [
            torch.cat(s, 2)
            for s in zip(*(p.streams[:] for p in each.update(new, new)), strict=True)
        ]
        outs.append(attend(q, *whole, mask=Causal() & SlidingWindow(5), span=span))
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    "arguments", [{"window": 0}, {"window": -1}, {"rollback": -1}, {"window": 2.5}]
)
def test_wrong_windows_are_refused(arguments):
    with pytest.raises((ValueError, TypeError)):
        PagedCache(PagePool(4), **arguments)


def test_streams_that_do_not_fit_are_refused():
    cache = PagedCache(PagePool(60, 4))
    with pytest.raises(ValueError, match="gradients do not flow"):
        cache.update(X.clone().requires_grad_())
    grown(cache, [10])
    for new, message in (
        ((X[:, :, :1],), "holds 2 streams, got 1"),
        ((X[:1, :, :1], X[:1, :, :1]), "batch of 1"),
        ((X[:, :, :1, :4], X[:, :, :1]), r"\(heads, width\)"),
        ((X[:, :, :1].double(), X[:, :, :1]), "torch.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.update(*new)
        assert cache.length == 10


def test_parts_of_unequal_rows_are_read_although_another_cache_took_pages_since():
    pool = PagePool(16, 4)
    cache, other = PagedCache(pool, window=3), PagedCache(pool)
    first, new = torch.randn(2, 1, 2, 2), torch.randn(2, 1, 9, 2)
    cache.update(first)
    cache.truncate(torch.tensor([1, 0]))
    parts = cache.update(new)  # the window after it has left the first page of the second row
    other.update(torch.full((9, 1, 4, 2), torch.nan))  # nine pages
    read = torch.cat([part.streams[0] for part in parts], 2)
    assert read[0, :, :10].equal(torch.cat([first[0, :, :1], new[0]], 1))
    assert read[1, :, :9].equal(new[1])
    for _ in range(2):
        cache.update(new[:, :, :1])
    assert pool.nbytes.held == (2 + 9) * 4 * 2 * 4  # bytes of float32
