"""Streams in pages: gathered, viewed and narrowed as their tokens, one at a time, lie in a slab."""

import random

import pytest
import torch

from paged import coded, in_pages, part_of
from regard import PagedCache, PagePool, Part
from regard.cache.codes import QuantizedStream
from regard.cache.paging.formats import format_of
from regard.cache.paging.pages import Page, PageTable, Slab, outlines_of
from regard.cache.paging.reading import PagedStream, by_slab, parts_of, segments_of
from regard.cache.parts import TENSORS, Storage, Streams, storage_of

RNG = random.Random(7)


def streams(batch=2, heads=2, length=11, width=4):
    torch.manual_seed(3)
    return torch.randn(batch, heads, length, width), torch.randn(batch, heads, length, width + 1)


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_indexing_gathers_the_tokens_in_their_order(batch, scattered, start):
    k, v = streams(batch)
    paged = in_pages((k, v), RNG, scattered=scattered, start=start)
    assert len(paged) == 2
    assert torch.equal(paged[0], k)
    assert torch.equal(paged[1], v)
    assert all(torch.equal(a, b) for a, b in zip(paged[:], (k, v), strict=True))
    assert [x.shape for x in paged] == [k.shape, v.shape]


@pytest.mark.parametrize(("first", "size"), [(0, 11), (0, 1), (1, 4), (2, 3), (5, 6), (10, 1)])
def test_narrowing_leaves_a_range_of_tokens(first, size):
    k, v = streams()
    part = part_of(in_pages((k, v), RNG, start=1)).narrow(first, first + size)
    assert torch.equal(part.streams[0], k[:, :, first : first + size])
    pages = part.stored[0].table.shape[1]
    assert pages == (1 + first + size - 1) // 3 - (1 + first) // 3 + 1
    again = part.narrow(first, first + 1)
    assert torch.equal(again.streams[1], v[:, :, first : first + 1])


def test_a_range_may_be_empty():
    k, v = streams()
    nothing = part_of(in_pages((k, v), RNG, start=2)).narrow(11, 11)
    assert nothing.streams[0].shape == (2, 2, 0, 4)
    assert nothing.stored[0].viewed() is None
    assert nothing.narrow(11, 11).streams[1].shape == (2, 2, 0, 5)


def test_consecutive_pages_are_views():
    k, v = streams()
    for each, values in zip(in_pages((k, v), RNG, scattered=False).stored, (k, v), strict=True):
        view = each.viewed()
        assert torch.equal(view, values)
        assert view.untyped_storage().data_ptr() == each.slab.untyped_storage().data_ptr()


def test_rows_with_pages_in_turn_are_views_of_single_pages():
    k, _ = streams()
    (each,) = in_pages((k,), RNG, start=0).stored
    alternating = torch.tensor([[0, 2], [1, 3]])
    slab = torch.randn(1, 2, 12, 4)
    turns = PagedStream(slab, alternating, 3, 0, 6)
    assert turns.viewed() is None  # the pages of a row are two apart
    page = turns.narrow(3, 3)
    assert torch.equal(page.viewed(), torch.cat([slab[:, :, 6:9], slab[:, :, 9:12]]))
    uneven = torch.tensor([[0], [1], [3]])
    assert turns._replace(table=uneven, length=3).viewed() is None
    assert each.narrow(0, 3)._replace(table=torch.tensor([[3], [1]])).viewed() is None


@pytest.mark.parametrize("scattered", [True, False])
def test_shared_pages_are_read_once_and_expanded(scattered):
    k, v = (each[:1].expand(3, -1, -1, -1) for each in streams(1))
    paged = in_pages((k, v), RNG, scattered=scattered, shared=True)
    for each, values in zip(paged.stored, (k, v), strict=True):
        assert each.is_shared
        assert torch.equal(each.to_tensor(), values)
        assert each.to_tensor().stride(0) == 0
        assert (each.viewed() is None) == scattered
        assert scattered or each.viewed().stride(0) == 0
        one = each.rows(1, 1)
        assert not one.is_shared
        assert torch.equal(one.to_tensor(), values[:1])
    assert not in_pages((k, v), RNG).stored[0].is_shared
    assert not in_pages((k[:1],), RNG, shared=True).stored[0].is_shared


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("by_channel", [False, True])
def test_codes_are_copied_as_they_are_stored(scattered, shared, by_channel):
    k, v = streams(2, width=16)
    k, v = (x[:1].expand(2, -1, -1, -1) if shared else x for x in (k, v))
    plain = in_pages((k, v), RNG, scattered=scattered, shared=shared)
    paged = coded(plain, (8, 4), ((16,), (16,)), by_channel=by_channel)
    for each, values in zip(paged.stored, plain, strict=True):
        copy = each.copied()
        assert isinstance(copy, QuantizedStream)
        assert torch.equal(copy.to_tensor(), each.to_tensor())
        assert (each.to_tensor() - values).abs().max() < (0.03 if copy.bits == 8 else 0.4)
        assert (copy.codes.stride(0) == 0) == shared
        view = each.viewed()
        assert (view is None) == scattered
        assert view is None or torch.equal(view.codes, copy.codes)
        for first, size in ((0, 1), (1, 4), (3, 8), (5, 0)):
            some = each.narrow(first, size).copied().to_tensor()
            assert torch.equal(some, each.to_tensor()[:, :, first : first + size])
            assert torch.equal(copy.narrow(first, size).to_tensor(), some)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_outlines_have_the_shapes_and_dtypes_without_a_copy(dtype):
    k, v = ((100 * each).to(dtype) for each in streams())
    part = part_of(in_pages((k, v), RNG), kv_start=5)
    for outline, each in zip(part.outlines, (k, v), strict=True):
        assert (outline.shape, outline.dtype) == (each.shape, dtype)
        assert outline.untyped_storage().nbytes() == each.shape[-1] * dtype.itemsize
        assert outline.stride(-1) == 1  # its first columns are a view of its memory: `begins_with`


def test_a_part_in_pages_says_so():
    k, v = streams(width=16)
    paged = in_pages((k, v), RNG)
    part = part_of(paged, kv_start=4)
    assert part.stored == paged.stored
    assert storage_of([part]) == Storage((PagedStream,), None, several=True)
    assert storage_of([Part(0, 11, (k, v))]) == TENSORS
    narrow = part.narrow(6, 9)
    assert (narrow.kv_start, narrow.kv_stop) == (6, 9)
    assert torch.equal(narrow.streams[0], k[:, :, 2:5])
    codes = part_of(coded(paged, (8, 4), ((), ())))
    assert storage_of([codes]) == Storage((PagedStream, QuantizedStream), 4, several=True)
    assert storage_of([codes.in_one()]) == Storage((QuantizedStream,), 4)  # the fewest bits
    assert codes.outlines[0].dtype == torch.float32
    assert codes.outlines[1].shape == v.shape


def test_another_default_device_changes_nothing():
    k, v = streams()
    paged = in_pages((k, v), RNG)
    with torch.device("meta"):
        assert torch.equal(paged[0], k)
        assert torch.equal(part_of(paged).narrow(2, 6).streams[1], v[:, :, 2:6])


# ---- segments ----


SIZE = 3
X = torch.randn(1, 2, 30, 8)


def slab_of(form="plain"):
    slab = Slab(outlines_of((X,), format_of(form), SIZE, None), SIZE, sealed=form != "plain")
    slab.reserve(10)
    slab.put(0, (X[0],))
    return slab


def tables_of(slab, *rows, first=0):
    known = {}
    return [PageTable([known.setdefault(i, Page(slab, i)) for i in row], first) for row in rows]


def joined(parts):
    return torch.cat([part.streams[0] for part in parts], 2)


def test_consecutive_pages_of_one_row_are_a_view():
    slab = slab_of()
    (part,) = parts_of(segments_of(tables_of(slab, [4, 5, 6])), SIZE, 1, 8)
    assert (part.kv_start, part.kv_stop) == (1, 8)
    assert part.streams[0].data_ptr() == slab.streams[0][:, :, 13].data_ptr()
    assert torch.equal(part.streams[0], X[:, :, 13:20])


def test_scattered_pages_are_read_through_a_table():
    (part,) = parts_of(segments_of(tables_of(slab_of(), [4, 1, 7], [0, 9, 2])), SIZE, 2, 9)
    assert isinstance(part.streams, Streams)
    rows = [[14, 3, 4, 5, 21, 22, 23], [2, 27, 28, 29, 6, 7, 8]]
    assert torch.equal(part.streams[0], X[0][:, rows].transpose(0, 1))


def test_pages_that_all_rows_share_are_one_part_expanded():
    parts = parts_of(segments_of(tables_of(slab_of(), [4, 5, 0], [4, 5, 9])), SIZE, 0, 9)
    assert [(part.kv_start, part.kv_stop) for part in parts] == [(0, 6), (6, 9)]
    shared = parts[0].streams[0]
    assert shared.shape[0] == 2 and shared.stride(0) == 0


def test_pages_before_the_window_of_a_row_have_other_content_of_the_same_slab():
    slab = slab_of()
    tables = [PageTable([Page(slab, 1), Page(slab, 2)], 0), PageTable([Page(slab, 7)], 1)]
    whole = joined(parts_of(segments_of(tables), SIZE, 0, 6))
    assert torch.equal(whole[0], X[0, :, 3:9]) and torch.equal(whole[1, :, 3:], X[0, :, 21:24])
    assert whole.isfinite().all()


def test_a_gap_that_no_row_holds_is_finite():
    slab = slab_of()
    tables = [PageTable([Page(slab, 1)], 0), PageTable([Page(slab, 7)], 3)]
    whole = joined(parts_of(segments_of(tables), SIZE, 0, 12))
    assert whole.shape[2] == 12 and whole.isfinite().all()


def test_the_first_pages_may_be_of_no_row():
    """One row is past its window, another was cut to nothing."""
    tables = [PageTable([], 0), *tables_of(slab_of(), [4, 5], first=3)]
    found = joined(parts_of(segments_of(tables), SIZE, 0, 15))
    assert found.shape[:3] == (2, 2, 15) and found.isfinite().all()
    assert torch.equal(found[1, :, 9:], X[0, :, 12:18])
    assert segments_of([PageTable([], 0), PageTable([], 0)]) == []


def test_codes_beside_values_are_gathered():
    plain, codes = slab_of(), slab_of("K8V8")
    tables = [
        PageTable([Page(plain, 0), Page(codes, 4)]),
        PageTable([Page(plain, 2), Page(plain, 1)]),
    ]
    first, mixed = parts_of(segments_of(tables), SIZE, 0, 6)
    assert torch.equal(first.streams[0][1], X[0, :, 6:9])
    assert torch.equal(mixed.streams[0][1], X[0, :, 3:6])
    assert (mixed.streams[0][0] - X[0, :, 12:15]).abs().max() < 0.05


def test_consecutive_codes_are_codes_of_one_part():
    (part,) = parts_of(segments_of(tables_of(slab_of("K8V8"), [2, 3])), SIZE, 0, 6)
    assert all(isinstance(each, QuantizedStream) for each in part.stored)
    assert (part.streams[0] - X[:, :, 6:12]).abs().max() < 0.05


def test_no_table_has_no_segment():
    assert segments_of([]) == []


@pytest.mark.parametrize("start", [0, 3])
def test_pages_of_one_slab_are_joined_and_other_streams_stay(start):
    """First and last pages of a row lie beside codes in a slab of their own; the last is last."""
    cache, size = PagedCache(PagePool(40, 4, format="K8V8")), 4
    new = torch.randn(2, 1, 2, 17, 8)
    for keys, values in zip(*(each.split(1, 2) for each in new), strict=True):
        parts = cache.update(keys, values)
    parts = [parts[0].narrow(start, size), *parts[1:]]
    codes, (keys, values) = by_slab(part.stored for part in parts)
    assert [x.kinds[-1] for x in codes] == [QuantizedStream] * 2  # three pages: a view
    assert codes[0].outline.shape[2] == 12
    assert (keys.start, keys.length) == (start, size - start + 1)
    assert keys.table is values.table
    held = torch.cat([new[0][:, :, start:size], new[0][:, :, -1:]], 2)
    assert torch.equal(keys.to_tensor(), held)
    other = (torch.randn(1, 2, 3, 8),) * 2
    assert by_slab([other, codes]) == [other, codes]


def test_streams_that_end_within_a_page_are_not_joined_with_others_of_their_slab():
    """As those of two sequences of one pool, whose parts a caller puts one after the other."""
    pool, new = PagePool(40, 4), torch.randn(2, 1, 2, 7, 8)
    caches = [PagedCache(pool) for _ in range(2)]
    for cache in caches:
        cache.update(*new)
    stored = [segments_of(cache.rows)[0].paged(4, 0, 7) for cache in caches]
    assert by_slab(stored) == stored
