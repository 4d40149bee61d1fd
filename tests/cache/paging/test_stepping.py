"""The pages that a step reads: all tokens of each row, with room for one more."""

import pytest
import torch

from regard import PagedCache, PagePool
from regard.cache.codes import QuantizedStream

SIZE = 4


def filled(tokens, rows=2, format="plain", **options):
    torch.manual_seed(0)
    cache = PagedCache(PagePool(60, SIZE, format=format), **options)
    cache.update(torch.zeros(rows, 3, 1, 8), torch.zeros(rows, 3, 1, 8))
    for _ in range(tokens - 1):
        cache.update(*torch.randn(2, rows, 3, 1, 8))
    return cache


def tokens_of(ranges, stream, row, tokens):
    """The values of a row's tokens, those of each slab after another, as a set of rows."""
    found = []
    for streams in ranges:
        memory, table, count = streams[stream].slab, streams[stream].table, streams[stream].length
        memory = memory.to_tensor() if isinstance(memory, QuantizedStream) else memory
        slots = [int(table[row, at // SIZE]) * SIZE + at % SIZE for at in range(count)]
        found.append(memory[0, :, slots])
    return torch.cat(found, 1)[:, :tokens]


@pytest.mark.parametrize("format", ["plain", "K8V8"])
@pytest.mark.parametrize("tokens", [1, 2, 6, 17])
def test_the_pages_have_all_tokens_and_room_for_one(format, tokens):
    cache = filled(tokens, format=format)
    ranges = cache.pages_of_step()
    assert sum(streams[0].length for streams in ranges) == tokens + 1
    assert len(ranges) == (1 if format == "plain" or tokens < 9 else 2)
    assert all(a.slab is b for a, b in zip(ranges[-1], cache.buffers, strict=True))
    held = [part.streams for part in cache.peek(*torch.zeros(2, 2, 3, 0, 8))]
    for stream in (0, 1):
        every = torch.cat([streams[stream] for streams in held], 2)
        for row in (0, 1):
            found = tokens_of(ranges, stream, row, tokens)
            assert sorted(map(tuple, found.transpose(0, 1).flatten(1).tolist())) == sorted(
                map(tuple, every[row].transpose(0, 1).flatten(1).tolist())
            )


@pytest.mark.parametrize("tokens", [4, 8])
def test_nothing_where_a_page_is_opened(tokens):
    assert not filled(tokens).pages_of_step()


@pytest.mark.parametrize("tokens", [3, 7])
def test_nothing_where_codes_may_replace_a_page(tokens):
    assert not filled(tokens, format="K8V8").pages_of_step()


def test_a_page_that_a_step_fills_is_sealed():
    cache = filled(7)
    assert sum(streams[0].length for streams in cache.pages_of_step()) == 8
    assert [page.sealed for page in cache.rows[0].pages] == [True, False]
    cache.count(1)
    assert all(page.sealed for table in cache.rows for page in table.pages)
    before = cache.pool.pages_in_use
    twin = cache.fork()
    assert cache.pool.pages_in_use == before  # sealed pages are shared
    twin.update(*torch.randn(2, 2, 3, 1, 8))
    assert twin.length == 9


def test_nothing_of_rows_that_differ_or_share_pages_or_of_windows():
    cache = filled(6)
    cache.truncate(torch.tensor([5, 6]))
    assert not cache.pages_of_step()
    cache = filled(6, rows=1)
    assert cache.pages_of_step()
    cache.reorder(torch.tensor([0, 0]))
    assert not cache.pages_of_step()  # not read since
    cache.update(*torch.randn(2, 2, 3, 0, 8))
    assert not cache.pages_of_step()  # the first page is shared
    assert not filled(6, window=3).pages_of_step()
    assert PagedCache(PagePool(4, SIZE)).pages_of_step() == []
    assert PagedCache(PagePool(4, SIZE)).buffers == ()


def test_a_token_that_was_written_is_counted_and_read():
    cache, twin = filled(5, rows=1), filled(5, rows=1)
    new = torch.randn(2, 1, 3, 1, 8)
    ((keys, _),) = cache.pages_of_step()
    slot = int(keys.table[0, -1]) * SIZE + 1
    for memory, each in zip(cache.buffers, new, strict=True):
        memory[0, :, slot] = each[0, :, 0]
    cache.count(1)
    twin.update(*new)
    assert cache.length == twin.length == 6
    found, wanted = (x.update(*(torch.ones(2, 1, 3, 1, 8))) for x in (cache, twin))
    for mine, others in zip(found, wanted, strict=True):
        assert torch.equal(mine.streams[0], others.streams[0])
        assert torch.equal(mine.streams[1], others.streams[1])
