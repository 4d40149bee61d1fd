"""`PagePool`: what it says of itself."""

import torch

from regard import PagedCache, PagePool

X = torch.randn(1, 2, 10, 8)


def test_describe_counts_pages():
    pool = PagePool(40, 4)
    cache = PagedCache(pool)
    cache.update(X, X)
    fork = cache.fork()
    text = pool.describe()
    assert "4 pages in use of 40" in text
    assert "2 sealed pages, of which 2 shared; 2 open" in text
    assert fork.length == 10


def test_its_code_makes_a_pool_alike():
    for pool in (PagePool(8), PagePool(8, 16), PagePool(8, format="K8V4")):
        again = eval(repr(pool))
        assert (again.num_pages, again.page_size, again.format) == (
            pool.num_pages,
            pool.page_size,
            pool.format,
        )
