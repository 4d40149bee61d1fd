"""Pictures of pools: what is described is what tables hold, and each form shows all of it."""

from collections import Counter
from xml.etree import ElementTree

import pytest
import torch

from regard import PagedCache, PagePool
from regard.cache import Context
from regard.cache.paging.offloading import Offload
from regard.see.pool_picture import described, pool_svg, pool_text

MODEL = Context("a model")


def append(cache, tokens, rows=1):
    cache.update(torch.randn(rows, 1, tokens, 4))


@pytest.fixture
def pool():
    """Two shared pages, one owned, three open ones, and two of a stored prefix."""
    pool = PagePool(30, 4)
    earlier, prompt = PagedCache(pool), PagedCache(pool)
    append(earlier, 8)
    pool.store(range(8), [earlier], context=MODEL)
    earlier.release()
    append(prompt, 10)
    fork = prompt.fork()
    append(fork, 3)
    pool.caches = [prompt, fork]
    return pool


def test_the_states_are_those_of_the_tables(pool):
    tables = Counter(
        id(page) for cache in pool.caches for table in cache.rows for page in table.pages
    )
    assert sorted(tables.values()) == [1, 1, 1, 2, 2]
    counts = described(pool).counts
    assert counts == {"open": 2, "sealed": 1, "shared": 2, "reusable": 2, "cold": 0, "free": 9}
    assert sum(counts.values()) == sum(slab.capacity for slab in pool.memory.slabs())


def test_rows_are_shown_page_by_page(pool):
    strips = described(pool, pool.caches).strips
    signs = ["".join(cell.sign for cell in strip.cells) for strip in strips[:2]]
    assert signs == ["22o", "22so"]
    assert [strip.heading for strip in strips[:2]] == ["cache 0", "cache 1"]


def test_a_window_says_where_its_pages_begin():
    pool = PagePool(30, 4)
    cache = PagedCache(pool, window=3)
    append(cache, 14, rows=2)
    append(cache, 1, rows=2)
    headings = [strip.heading for strip in described(pool, [cache]).strips[:2]]
    assert headings == ["row 0, from slot 12", "row 1, from slot 12"]


def test_offloaded_pages_are_cold():
    pool = PagePool(30, 4, offload=Offload(hot_pages=2))
    cache = PagedCache(pool)
    append(cache, 21)
    append(cache, 1)
    picture = described(pool, [cache])
    assert picture.counts["cold"] == pool.cold_pages > 0
    assert any(strip.heading.startswith("offloaded") for strip in picture.strips)


def test_a_text_fits_and_has_every_page(pool):
    lines = pool_text(pool, width=9).splitlines()
    cells = [line.strip() for line in lines if line.startswith("  ")]
    assert max(map(len, cells)) == 7
    assert Counter("".join(cells)) == {"2": 2, "s": 1, "o": 2, "r": 2, "·": 9}
    assert "cold" not in pool_text(pool)


def test_an_svg_has_a_title_and_a_cell_for_each_page(pool):
    root = ElementTree.fromstring(pool_svg(pool, pool.caches))
    name = "{http://www.w3.org/2000/svg}"
    said = "PagePool(30, 4): 7 pages in use: 2 open, 1 sealed, 2 shared, 2 reusable, 9 free"
    assert root.find(f"{name}title").text == said
    shown = [state for state, count in described(pool).counts.items() if count]
    assert len(root.findall(f"{name}rect")) == 16 + 7 + len(shown)
    width, height = (float(root.get(each)) for each in ("width", "height"))
    for rect in root.findall(f"{name}rect"):
        assert float(rect.get("x")) + float(rect.get("width")) <= width
        assert float(rect.get("y")) + float(rect.get("height")) <= height


def test_an_empty_pool_is_drawn():
    pool = PagePool(3, 2, format="K8V4")
    assert pool_text(pool) == "PagePool(3, 2, format='K8V4'): 0 pages in use"
    assert ElementTree.fromstring(pool_svg(pool)) is not None


def test_of_many_pages_the_first_are_drawn():
    pool = PagePool(5000, 1)
    cache = PagedCache(pool)
    cache.update(torch.zeros(1, 1, 4000, 1))
    picture = described(pool, [cache])
    assert [len(strip.cells) for strip in picture.strips] == [2000, 2000]
    assert picture.strips[0].heading == "row 0, the first 2,000 of 4,000"
    assert picture.counts["sealed"] == 4000
