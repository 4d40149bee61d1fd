"""Pages with numbers: each once, kind by kind; groups of a file that no pool would write."""

import math

import pytest
import torch

from regard import PagedCache, PagePool
from regard.cache.paging.formats import format_of
from regard.cache.paging.page_files import Group, Numbered, groups_from, taken
from regard.cache.paging.slabs import Outline

CPU = torch.device("cpu")
BY_CHANNEL = format_of("K4V4")._replace(by_channel_from=4)


def pages_in(pool, rows=2):
    cache = PagedCache(pool)
    cache.update(torch.randn(rows, 2, 11, 6), torch.randn(rows, 2, 11, 5))
    return cache, [page for table in cache.rows for page in table.pages]


@pytest.mark.parametrize(("form", "sizes"), [("plain", [6]), ("K8V4", [4, 2])])
def test_each_page_has_one_number(form, sizes):
    pool = PagePool(20, 4, format=form)
    cache, pages = pages_in(pool)
    numbered = Numbered(pool, [*pages, *pages])
    assert [group.size for group in numbered.groups] == sizes  # first and open ones, and codes
    assert sorted(numbered.numbers.values()) == list(range(6))
    assert cache.length == 11


@pytest.mark.parametrize("form", ["plain", "K8V4", "K6V4", BY_CHANNEL])
def test_what_is_written_has_the_shapes_of_its_groups(form):
    pool = PagePool(20, 4, format=form)
    cache, pages = pages_in(pool)
    numbered = Numbered(pool, pages)
    want = [each for group in numbered.groups for each in group.shapes(4)]
    assert [(each.shape, each.dtype) for each in numbered.streams()] == want
    sizes = (math.prod(each.shape) * each.dtype.itemsize for each in numbered.streams())
    assert sum(sizes) == pool.nbytes.held
    assert groups_from(numbered.text(), pool.format, pool.page_size, CPU) == numbered.groups
    assert cache.length == 11


@pytest.mark.parametrize("form", ["K8V4", BY_CHANNEL])
def test_pages_are_taken_with_their_content(form):
    pool, other = PagePool(20, 4, format=form), PagePool(6, 4, format=form)
    cache, pages = pages_in(pool)
    numbered = Numbered(pool, pages)
    new = taken(other, numbered.groups, iter([each.pieces for each in numbered.streams()]))
    for page, number in numbered.numbers.items():
        mine, theirs = (each.slab.stored(each.index) for each in (page, new[number]))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert other.pages_in_use == 6 and all(page.references == 1 for page in new)
    with pytest.raises(ValueError, match="needs 6 pages more"):
        taken(other, numbered.groups, iter(()))
    assert other.pages_in_use == 6 and cache.length == 11


def test_pages_that_cannot_be_read_are_released():
    pool = PagePool(20, 4)
    group = Group((Outline(1, 2, torch.float32, CPU),), False, 3)

    def broken():
        yield torch.zeros(1, 4, 2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        taken(pool, [group], iter([broken()]))
    assert pool.pages_in_use == 0


def group(shape=(1, 2, 0, 96), dtype="float32", rotation=(64, 32), **changes):
    outlines = [{"shape": list(shape), "dtype": dtype}]
    made = {"outlines": outlines, "rotations": [list(rotation)], "codes": True, "count": 2}
    return {**made, **changes}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (group(rotation=(32, 64)), "are not rotated in blocks"),
        (group(rotation=(128,)), "are not rotated in blocks"),
        (group(rotation=(-64, 160)), "are not rotated in blocks"),
        (group(dtype="int32"), "are not rotated in blocks"),
        (group(rotations=[[64, 32], []]), "a rotation for each stream"),
        (group(rotations=None), "a rotation for each stream"),
        (group(outlines=[], rotations=[]), "a rotation for each stream"),
        (group(dtype="bool"), "outlines have a shape"),
        (group(shape=(1, 2, 3, 96)), "outlines have a shape"),
        (group(count=0), "a count of pages"),
        (group(count=True), "a count of pages"),
        (group(codes=2), "a count of pages"),
        (group(dtype="int32", rotation=()), "have no codes"),
        ({"count": 3}, "a group of pages has"),
        (group(shape=(1, 0, 0, 96), count=1 << 20), "so that a file bounds their count"),
        (
            group(shape=(1, 2, 0, 0), rotation=(), count=1 << 20),
            "so that a file bounds their count",
        ),
        ([group(), group(count=1)], "pages of one kind are one group"),
        ([group(), group(count=0, codes=False)], "a group of 0 pages is the only one"),
    ],
)
def test_groups_that_no_pool_writes_are_refused(wrong, says):
    given = wrong if isinstance(wrong, list) else [wrong]
    with pytest.raises(ValueError, match=says):
        groups_from(given, format_of("K4V4"), 4, CPU)


def test_keys_with_scales_by_channel_are_not_rotated():
    with pytest.raises(ValueError, match="are not rotated in blocks"):
        groups_from([group(rotation=(64,))], BY_CHANNEL, 4, CPU)


def test_rotations_of_a_first_piece_are_known():
    (found,) = groups_from([group(rotation=(64,))], format_of("K4V4"), 4, CPU)
    assert found.outlines[0].rotation == (64,) and found.stored == found.outlines
