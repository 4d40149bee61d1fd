"""Page tables: pages by their number."""

import copy

import pytest
import torch

from regard import PagedCache, PagePool
from regard.cache.paging.formats import PLAIN, format_of
from regard.cache.paging.pages import Page, PageTable, Slab, outlines_of
from regard.huge_pages import LARGE

SLAB = Slab(outlines_of((torch.zeros(1, 1, 1, 2),), PLAIN, 4, None), 4, sealed=False)


def test_a_page_is_found_by_its_number():
    pages = [Page(SLAB, index) for index in (5, 2)]
    table = PageTable(pages, first=3)
    assert [table.at(number) for number in range(2, 6)] == [None, *pages, None]
    assert table.stop == 5


def test_a_copied_table_has_a_list_of_its_own():
    table = PageTable([Page(SLAB, 0)])
    table.copied().pages.clear()
    assert len(table.pages) == 1


def test_a_page_knows_its_tokens_and_whether_it_is_private():
    page = Page(SLAB, 3)
    page.references = 1
    assert page.start == 12 and page.is_private
    page.node = object()
    assert not page.is_private


# ---- slabs ----


def slab_for(*streams, form=PLAIN, pieces=None, page_size=4):
    return Slab(outlines_of(streams, form, page_size, pieces), page_size, sealed=form is not PLAIN)


def test_values_are_read_as_they_were_written():
    k, v = torch.randn(3, 6, 5), torch.randn(2, 6, 7)
    slab = slab_for(k[None], v[None])
    slab.reserve(3)
    at = torch.tensor([9, 2, 4, 11, 0, 5])
    slab.write(at, (k, v))
    for found, given in zip(slab.read(at.flip(0)), (k.flip(1), v.flip(1)), strict=True):
        assert torch.equal(found, given)
    slab.put(4, (k[:, :3], v[:, :3]))
    assert torch.equal(slab.read(torch.arange(4, 7))[0], k[:, :3])


def test_growing_preserves_pages_and_views_of_the_old_buffers():
    x = torch.randn(1, 4, 2)
    slab = slab_for(x[None])
    slab.reserve(1)
    page = slab.take()
    slab.put(page * 4, (x,))
    (before,) = slab.streams
    slab.reserve(100)
    assert slab.capacity >= 101
    assert torch.equal(slab.read(torch.arange(4) + page * 4)[0], x)
    assert torch.equal(before[0, :, page * 4 : page * 4 + 4], x)


def test_the_page_beside_another_is_taken_if_it_is_free():
    slab = slab_for(torch.zeros(1, 1, 1, 2))
    slab.reserve(16)
    assert [slab.take(), slab.take(after=7), slab.take(after=7), slab.take()] == [0, 8, 1, 2]


def test_buffers_are_freed_with_the_last_page():
    slab = slab_for(torch.zeros(1, 1, 1, 2))
    slab.reserve(2)
    pages = [slab.take(), slab.take()]
    assert slab.in_use == 2 and slab.allocated_bytes == slab.capacity * 4 * 2 * 4
    for page in pages:
        slab.give(page)
    assert slab.in_use == slab.allocated_bytes == 0
    slab.reserve(1)
    assert slab.take() == 0


@pytest.mark.parametrize(("name", "bound"), [("K8V8", 0.02), ("K6V4", 0.2), ("K4V4", 0.3)])
def test_codes_are_read_as_values_near_those_written(name, bound):
    k, v = torch.randn(2, 8, 64), torch.randn(2, 8, 32)
    slab = slab_for(k[None], v[None], form=format_of(name))
    slab.reserve(2)
    slab.put(0, (k, v))
    for found, given in zip(slab.read(torch.arange(8)), (k, v), strict=True):
        assert (found - given).abs().max() < bound * given.abs().max()


def test_tokens_of_a_page_that_share_scales():
    """Channels of very different sizes keep their precision; pages are moved and read alone."""
    k, v = torch.randn(2, 12, 33) * torch.logspace(-3, 3, 33), torch.randn(2, 12, 5)
    slab = slab_for(k[None], v[None], form=format_of("K4V4")._replace(by_channel_from=4))
    assert slab.shares_scales and slab.outlines[0].rotation == ()
    slab.reserve(5)
    slab.put(8, (k[:, :4], v[:, :4]))
    slab.write(torch.tensor([16, 17, 18, 19, 4, 5, 6, 7]), (k[:, 4:], v[:, 4:]))
    at = torch.tensor([19, 8, 5])
    given = k[:, [7, 0, 9]]
    pages = k.view(2, 3, 4, 33)
    step = ((pages.amax(2) - pages.amin(2)) / 15 + pages.abs().amax(2) * 2**-7)[:, [1, 0, 2]]
    assert ((slab.read(at)[0] - given).abs() <= step).all()
    slab.reserve(100)
    assert ((slab.read(at)[0] - given).abs() <= step).all()
    codes, scales, *_ = slab.stored(4)
    assert codes.shape == (2, 4, 17) and scales.shape == (2, 1, 66)
    for target, source in zip(slab.stored(1), slab.stored(2), strict=True):
        target.copy_(source)
    assert torch.equal(slab.read(torch.arange(4, 8))[0], slab.read(torch.arange(8, 12))[0])
    assert slab.page_bytes == 2 * (4 * 17 + 2 * 66 + 4 * (3 + 4))


def test_page_bytes_count_codes_scales_and_integers():
    k, positions = torch.zeros(1, 3, 1, 64), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    assert slab_for(k, positions, form=format_of("K4V8")).page_bytes == 4 * (3 * (32 + 4) + 4)
    assert slab_for(k, positions).page_bytes == 4 * (3 * 64 * 4 + 4)


def test_only_the_first_piece_of_a_joined_stream_is_rotated():
    form, joined = format_of("K4V4"), torch.zeros(1, 1, 1, 24)
    assert outlines_of((joined,), form, 4, (16, 8))[0].rotation == (16,)
    assert outlines_of((joined,), form, 4, None)[0].rotation == ()
    assert outlines_of((joined, joined), form, 4, None)[1].rotation == (16, 8)
    assert outlines_of((joined, joined), format_of("K8V8"), 4, None)[0].rotation == ()


def test_the_list_of_free_pages_is_bounded_by_the_capacity():
    slab = slab_for(torch.zeros(1, 1, 1, 2))
    slab.reserve(3)
    first = slab.take()
    for _ in range(1000):
        slab.give(slab.take(first))
    assert len(slab._free) <= 2 * slab.capacity + 1
    assert {slab.take() for _ in range(slab.capacity - 1)} == {*range(slab.capacity)} - {first}


def test_large_buffers_can_be_copied_and_written_outside_of_inference_mode():
    stream = torch.randn(1, 2, 40, 64)
    with torch.inference_mode():
        cache = PagedCache(PagePool(1 << 12))
        cache.update(*2 * [torch.randn(1, 2, 1 << 14, 64)])
    for each in cache.rows[0].pages[0].slab.streams:
        assert each.nbytes >= LARGE
    cache.update(stream, stream)
    (*_, last) = copy.deepcopy(cache.update(stream, stream))
    assert torch.equal(last.streams[0][:, :, -40:], stream)
