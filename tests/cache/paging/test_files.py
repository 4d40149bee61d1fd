"""Paged caches in files: tables, shared pages and codes come back; impossible ones are refused.

The oracle: what the cache returned before it was saved.
"""

import json
import math

import pytest
import torch

from regard import PagedCache, PagePool
from regard.cache.files import open_tensors, write_tensors
from regard.cache.paging.files import Group, Numbered, groups_from, take_pages
from regard.cache.paging.formats import format_of
from regard.cache.paging.pages import Outline

FILE = "cache.safetensors"
STREAMS = {
    "keys and values": lambda n: (torch.randn(2, 3, n, 6), torch.randn(2, 3, n, 5)),
    "latent": lambda n: (torch.randn(2, 1, n, 8, dtype=torch.bfloat16),),
    "latent and positions": lambda n: (
        torch.randn(2, 1, n, 7, dtype=torch.float64),
        torch.arange(n, dtype=torch.int32).expand(2, 1, n).unsqueeze(-1),
    ),
}


def content(cache):
    """All that can be read of a cache, in slots: keys before and one new token."""
    new = [torch.ones(*e.shape[:2], 1, e.shape[3], dtype=e.dtype) for e in cache.empty_streams]
    found = [cache.length, cache.nbytes, cache.lengths.rows]
    for part in cache.peek(*new):
        found += [part.kv_start, part.kv_stop, *(each.clone() for each in part.streams[:])]
    return found


def same(mine, theirs):
    pairs = zip(mine, theirs, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def pool_of(form="plain", pages=64):
    return PagePool(pages, 4, format=form)


def filled(pool, streams, window=None, tokens=(9, 1, 3)):
    cache = PagedCache(pool, window=window)
    for n in tokens:
        cache.update(*STREAMS[streams](n))
    return cache


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("form", ["plain", "K8V4", "K4V4"])
def test_a_loaded_cache_is_the_one_that_was_saved(tmp_path, form, streams, window):
    cache, pool = filled(pool_of(form), streams, window), pool_of(form)
    again = PagedCache(pool, window=window)
    cache.save(tmp_path / FILE, weights="mine")
    again.load(tmp_path / FILE, weights="mine")
    assert same(content(cache), content(again))
    for each in (cache, again):
        torch.manual_seed(5)
        each.update(*STREAMS[streams](6))
    assert same(content(cache), content(again))
    again.release()
    assert pool.pages_in_use == 0


@pytest.mark.parametrize("form", ["plain", "K8V4"])
def test_shared_pages_are_written_once_and_shared_again(tmp_path, form):
    cache, pool = filled(pool_of(form), "keys and values"), pool_of(form)
    cache.reorder(torch.tensor([1, 1, 1]))
    cache.truncate(torch.tensor([13, 12, 6]))
    cache.save(tmp_path / FILE, weights="mine")
    again = PagedCache(pool)
    again.load(tmp_path / FILE, weights="mine")
    assert pool.pages_in_use == cache.pool.pages_in_use
    references = sorted(page.references for page in pool.memory.in_order())
    assert references == sorted(page.references for page in cache.pool.memory.in_order())
    assert same(content(cache), content(again))
    fork = again.fork()
    for each in (cache, again):
        torch.manual_seed(5)
        each.update(torch.randn(3, 3, 5, 6), torch.randn(3, 3, 5, 5))
    assert same(content(cache), content(again))
    assert fork.length == 13
    fork.release()
    again.release()
    assert pool.pages_in_use == 0


def test_pieces_of_a_latent_are_loaded(tmp_path):
    cache = PagedCache(pool_of("K4V4"))
    cache.pieces = (8, 4)
    cache.update(torch.randn(1, 1, 9, 12))
    cache.save(tmp_path / FILE, weights="mine")
    again = PagedCache(pool_of("K4V4"))
    again.load(tmp_path / FILE, weights="mine")
    assert again.pieces == (8, 4)
    assert same(content(cache), content(again))


def test_a_cache_without_tokens_or_rows_is_loaded(tmp_path):
    for rows in (None, 0):
        cache, again = PagedCache(pool_of()), PagedCache(pool_of())
        if rows is not None:
            cache.update(torch.randn(0, 2, 5, 3))
        cache.save(tmp_path / FILE, weights="mine")
        again.load(tmp_path / FILE, weights="mine")
        assert again.length == cache.length


def test_rows_of_a_kind_that_the_file_does_not_name_are_refused(tmp_path):
    cache = filled(pool_of(), "latent")
    cache.truncate(0)
    cache.save(tmp_path / FILE, weights="mine")
    with open_tensors(tmp_path / FILE) as file:
        caches, metadata = json.loads(file.metadata["caches"]), dict(file.metadata)
    caches[0]["state"]["groups"], caches[0]["streams"] = [], []
    write_tensors(tmp_path / FILE, {**metadata, "caches": json.dumps(caches)}, {})
    with pytest.raises(ValueError, match="have pages of one kind, got 0 kinds"):
        PagedCache(pool_of()).load(tmp_path / FILE, weights="mine")


def test_a_pool_that_is_too_small_refuses_and_is_as_before(tmp_path):
    filled(pool_of(), "latent").save(tmp_path / FILE, weights="mine")
    pool = pool_of(pages=8)
    other = filled(pool, "latent", tokens=(4,))
    before, cache = content(other), PagedCache(pool)
    with pytest.raises(ValueError, match="needs 8 pages more"):
        cache.load(tmp_path / FILE, weights="mine")
    assert pool.pages_in_use == 2 and cache.length == 0 and same(before, content(other))


def test_other_pools_and_weights_are_refused(tmp_path):
    filled(pool_of("K8V4"), "latent").save(tmp_path / FILE, weights="mine")
    for pool in (pool_of(), pool_of("K8V8"), PagePool(64, 8, format="K8V4")):
        with pytest.raises(ValueError, match=r"layer 0 is PagedCache\(page_size="):
            PagedCache(pool).load(tmp_path / FILE, weights="mine")
    with pytest.raises(ValueError, match="layer 0 is PagedCache"):
        PagedCache(pool_of("K8V4"), window=6).load(tmp_path / FILE, weights="mine")
    with pytest.raises(ValueError, match="give wrong results"):
        PagedCache(pool_of("K8V4")).load(tmp_path / FILE, weights="theirs")


def state(**values):
    return lambda state: state.update(values)


def first_table(**values):
    return lambda state: state["tables"][0].update(values)


def first_group(**values):
    return lambda state: state["groups"][0].update(values)


WRONG = {
    "a page that is not there": (first_table(pages=[0, 1, 2, 99]), "is not there"),
    "an open page of two rows": (first_table(pages=[4, 1, 2, 7]), "in several places"),
    "a page in two places": (first_table(pages=[0, 1, 1, 3]), "1 of 8 |in use"),
    "a page that is not used": (first_table(pages=[4, 1, 2, 3]), "8 pages are stored and 7"),
    "too few pages": (first_table(pages=[0, 1, 2]), "a row of 13 tokens has pages from 0"),
    "a window": (first_table(pages=[1, 2, 3], first=1), "a row of 13 tokens has pages from 0"),
    "a negative number": (first_table(pages=[0, 1, 2, -1]), "tables have a first page"),
    "a length": (state(length=17), "a row of 17 tokens"),
    "lengths": (state(rows=[13, 14]), "the longest of 13"),
    "lengths that are none": (state(rows=[13, True]), "whole numbers"),
    "pieces": (state(pieces=[3, 4]), "8 channels wide together"),
    "no groups": (state(groups=None), "groups of pages are a list"),
    "a group that is none": (state(groups=[3]), "a group of pages has"),
    "a number of pages": (first_group(count=9), "pages are stored as"),
    "no pages": (first_group(count=0), "pages are stored as"),
    "codes": (first_group(codes=True), "have no codes|pages are stored as"),
    "a rotation": (first_group(rotated=8), "are not rotated"),
    "more rotated channels": (first_group(rotated=99), "channels of keys are rotated"),
    "other streams": (
        first_group(outlines=[{"shape": [1, 2, 0, 8], "dtype": "bfloat16"}]),
        "pages are stored as",
    ),
    "large streams": (
        first_group(outlines=[{"shape": [1, 1 << 40, 0, 8], "dtype": "bfloat16"}]),
        "pages are stored as",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_tables_that_are_wrong_are_refused(tmp_path, wrong):
    filled(pool_of(), "latent").save(tmp_path / FILE, weights="mine")
    change, says = WRONG[wrong]
    with open_tensors(tmp_path / FILE) as file:
        caches = json.loads(file.metadata["caches"])
        change(caches[0]["state"])
        tensors = {name: file.read(name) for name in file.entries}
        metadata = {**file.metadata, "caches": json.dumps(caches)}
    write_tensors(tmp_path / FILE, metadata, tensors)
    pool = pool_of()
    with pytest.raises(ValueError, match=says):
        PagedCache(pool).load(tmp_path / FILE, weights="mine")
    assert pool.pages_in_use == 0 and pool.nbytes == (0, 0, 0)


def test_codes_of_an_open_page_are_refused(tmp_path):
    filled(pool_of("K8V4"), "latent").save(tmp_path / FILE, weights="mine")
    with open_tensors(tmp_path / FILE) as file:
        caches = json.loads(file.metadata["caches"])
        tensors = {name: file.read(name) for name in file.entries}
        metadata = dict(file.metadata)
    first = caches[0]["state"]["tables"][0]["pages"]
    first[1], first[3] = first[3], first[1]
    write_tensors(tmp_path / FILE, {**metadata, "caches": json.dumps(caches)}, tensors)
    with pytest.raises(ValueError, match="has codes, and only 1 tokens"):
        PagedCache(pool_of("K8V4")).load(tmp_path / FILE, weights="mine")


# ---- pages ----

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
    numbered = Numbered(pool.memory, [*pages, *pages])
    assert [group.size for group in numbered.groups] == sizes  # first and open ones, and codes
    assert sorted(numbered.numbers.values()) == list(range(6))
    assert cache.length == 11


@pytest.mark.parametrize("form", ["plain", "K8V4", "K6V4", BY_CHANNEL])
def test_what_is_written_has_the_shapes_of_its_groups(form):
    pool = PagePool(20, 4, format=form)
    cache, pages = pages_in(pool)
    numbered = Numbered(pool.memory, pages)
    want = [each for group in numbered.groups for each in group.shapes(4)]
    assert [(each.shape, each.dtype) for each in numbered.streams()] == want
    sizes = (math.prod(each.shape) * each.dtype.itemsize for each in numbered.streams())
    assert sum(sizes) == pool.nbytes.held
    assert groups_from(numbered.text(), pool.memory, CPU) == numbered.groups
    assert cache.length == 11


@pytest.mark.parametrize("form", ["K8V4", BY_CHANNEL])
def test_pages_are_taken_with_their_content(form):
    pool, other = PagePool(20, 4, format=form), PagePool(6, 4, format=form)
    cache, pages = pages_in(pool)
    numbered = Numbered(pool.memory, pages)
    streams = iter([each.pieces for each in numbered.streams()])
    with other.memory.change:
        new = take_pages(other.memory, numbered.groups, streams)
        for page in new:
            other.memory.retain(page)
    for page, number in numbered.numbers.items():
        mine, theirs = (each.slab.stored(each.index) for each in (page, new[number]))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert other.pages_in_use == 6
    with pytest.raises(ValueError, match="needs 6 pages more"), other.memory.change:
        take_pages(other.memory, numbered.groups, iter(()))
    assert other.pages_in_use == 6 and cache.length == 11


def test_pages_that_cannot_be_read_are_free_again():
    pool = PagePool(20, 4)
    group = Group((Outline(1, 2, torch.float32, CPU),), False, 3)

    def broken():
        yield torch.zeros(1, 4, 2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"), pool.memory.change:
        take_pages(pool.memory, [group], iter([broken()]))
    assert pool.pages_in_use == 0


def group(shape=(1, 2, 0, 96), dtype="float32", rotated=96, **changes):
    outlines = [{"shape": list(shape), "dtype": dtype}]
    made = {"outlines": outlines, "rotated": rotated, "codes": True, "count": 2}
    return {**made, **changes}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (group(rotated=95), "are not rotated in blocks"),
        (group(rotated=128), "channels of keys are rotated"),
        (group(rotated=-64), "channels of keys are rotated"),
        (group(rotated=True), "channels of keys are rotated"),
        (group(outlines=[]), "a group has streams"),
        (group(dtype="bool"), "outlines have a shape"),
        (group(shape=(1, 2, 3, 96)), "outlines have a shape"),
        (group(count=0), "a group has streams"),
        (group(count=True), "a group has streams"),
        (group(codes=2), "a group has streams"),
        (group(dtype="int32", rotated=0), "have no codes"),
        ({"count": 3}, "a group of pages has"),
        (group(shape=(1, 0, 0, 96), count=1 << 20), "so that a file bounds their count"),
        (
            group(shape=(1, 2, 0, 0), rotated=0, count=1 << 20),
            "so that a file bounds their count",
        ),
        ([group(), group(count=1)], "pages of one kind are one group"),
        ([group(), group(count=0, codes=False)], "a group of 0 pages is the only one"),
    ],
)
def test_groups_that_no_pool_writes_are_refused(wrong, says):
    given = wrong if isinstance(wrong, list) else [wrong]
    with pytest.raises(ValueError, match=says):
        groups_from(given, PagePool(9, 4, format="K4V4").memory, CPU)


def test_keys_with_scales_by_channel_are_not_rotated():
    with pytest.raises(ValueError, match="are not rotated in blocks"):
        groups_from([group(rotated=64)], PagePool(9, 4, format=BY_CHANNEL).memory, CPU)


def test_rotations_of_a_first_piece_are_known():
    (found,) = groups_from([group(rotated=64)], PagePool(9, 4, format="K4V4").memory, CPU)
    assert found.outlines[0].rotation == (64,)
