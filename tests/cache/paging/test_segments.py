"""Parts of page tables: which pages are views, which are read through a table, which are copied."""

import torch

from regard.cache.codes import QuantizedStream
from regard.cache.paging.formats import format_of
from regard.cache.paging.pages import Page, PageTable
from regard.cache.paging.segments import parts_of, segments_of
from regard.cache.paging.slabs import Slab, outlines_of
from regard.cache.parts import Streams

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
