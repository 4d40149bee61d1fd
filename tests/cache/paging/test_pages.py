"""Page tables: pages by their number."""

import torch

from regard.cache.paging.formats import PLAIN
from regard.cache.paging.pages import Page, PageTable
from regard.cache.paging.slabs import Slab, outlines_of

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
