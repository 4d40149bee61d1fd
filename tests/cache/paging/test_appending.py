"""Which pages an append needs, in a plain pool and in one of codes."""

import pytest
import torch

from regard.cache.paging import appending
from regard.cache.paging.formats import format_of
from regard.cache.paging.pages import PageTable, outlines_of
from regard.cache.paging.pool import PagePool

X = torch.randn(1, 2, 40, 8)


def kind_of(pool):
    memory = pool.memory
    return memory.kind_of(outlines_of((X,), memory.format, memory.page_size, None))


def appended(pool, table, length, new):
    memory = pool.memory
    append = appending.plan(kind_of(pool), [table], [length], (new,))
    with memory.change:
        memory.reserve(append.needed)
        grown = appending.with_new_pages(memory, [table], append)
        appending.write(grown, append, [new])
        (last,) = appending.with_codes(memory, grown, append)
        appending.seal([last], append)
        for page in last.pages:
            page.references = 1
    return last


@pytest.mark.parametrize("form", ["plain", "K8V8"])
@pytest.mark.parametrize("chunks", [[40], [1] * 40, [3, 9, 1, 27], [8, 8, 8, 16], [0, 40, 0]])
def test_tokens_are_where_the_table_says(form, chunks):
    pool, table, length = PagePool(20, 4, format=form), PageTable(), 0
    for chunk in chunks:
        table = appended(pool, table, length, X[:, :, length : length + chunk])
        length += chunk
    assert len(table.pages) == 10
    found = [p.slab.read(torch.arange(p.start, p.start + 4))[0] for p in table.pages]
    bound = 0 if form == "plain" else 0.05
    assert (torch.cat(found, 1) - X[0]).abs().max() <= bound


def test_in_a_pool_of_codes_the_first_and_the_last_page_are_in_full_precision():
    pool = PagePool(20, 4, format="K4V4")
    table = appended(pool, PageTable(), 0, X[:, :, :14])
    assert [page.slab.sealed for page in table.pages] == [False, True, True, False]
    table = appended(pool, table, 14, X[:, :, 14:17])
    assert [page.slab.sealed for page in table.pages] == [False, True, True, True, False]


@pytest.mark.parametrize("chunks", [[20], [1] * 20, [7, 13]])
def test_a_page_of_numbers_whose_range_is_infinite_stays_in_full_precision(chunks):
    pool = PagePool(20, 4, format=format_of("K6V4")._replace(by_channel_from=4))
    x, table, length = X[:, :, :20].clone(), PageTable(), 0
    x[0, 0, 9, 3], x[0, 0, 10, 3], x[0, 1, 13, 5] = -3e38, 3e38, 9e37
    for chunk in chunks:
        table = appended(pool, table, length, x[:, :, length : length + chunk])
        length += chunk
    assert [page.slab.sealed for page in table.pages] == [False, True, False, True, True]
    found = [p.slab.read(torch.arange(p.start, p.start + 4))[0] for p in table.pages]
    assert torch.equal(found[2], x[0, :, 8:12]) and found[3].isfinite().all()


@pytest.mark.parametrize("chunks", [[20], [1] * 20, [7, 13]])
def test_a_page_that_is_not_finite_stays_in_full_precision(chunks):
    """Where tokens share scales, which one such number would spoil for all of them."""
    pool = PagePool(20, 4, format=format_of("K4V4")._replace(by_channel_from=4))
    x, table, length = X[:, :, :20].clone(), PageTable(), 0
    x[0, 1, 9, 3], x[0, 0, 14, 1] = torch.nan, torch.inf
    for chunk in chunks:
        table = appended(pool, table, length, x[:, :, length : length + chunk])
        length += chunk
    assert [page.slab.sealed for page in table.pages] == [False, True, False, False, True]
    found = [p.slab.read(torch.arange(p.start, p.start + 4))[0] for p in table.pages]
    assert torch.equal(torch.cat(found[2:4], 1).isfinite(), x[0, :, 8:16].isfinite())
    assert torch.cat([found[1], found[4]]).isfinite().all()


def test_the_free_slots_of_an_open_page_are_zero():
    pool = PagePool(20, 4)
    other = appended(pool, PageTable(), 0, X[:, :, :16])
    place = other.pages[0].index
    for page in other.pages[:2]:
        page.slab.put(page.start, [torch.full((2, 4, 8), torch.nan)])
        pool.memory.release(page)
    for length in (1, 2):
        table = appended(pool, PageTable(), 0, X[:, :, :length])
        (page,) = table.pages
        assert page.index in (place, place + 1)
        rest = torch.arange(page.start + length, page.start + 4)
        assert (page.slab.read(rest)[0] == 0).all()
