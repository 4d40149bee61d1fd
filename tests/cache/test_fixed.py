"""`StaticCache`: its buffers are never reallocated, and too many tokens are refused."""

import json

import pytest
import torch

from regard import StaticCache
from regard.cache.files import write_tensors
from regard.cache.saving import FORMAT, VERSION


def test_the_buffers_of_a_static_cache_are_never_reallocated():
    cache = StaticCache(8)
    new = torch.randn(2, 1, 3, 4)
    pointer = cache.update(new)[0].streams[0].data_ptr()
    cache.reorder(torch.tensor([1, 0]))
    cache.truncate(0)
    assert cache.update(new)[0].streams[0].data_ptr() == pointer
    assert cache.allocated_bytes == 2 * 8 * 4 * 4


def test_more_tokens_than_the_maximum_are_refused_and_change_nothing():
    cache, new = StaticCache(5), torch.randn(1, 1, 3, 2)
    cache.update(new)
    for call in (lambda: cache.update(new), lambda: cache.peek(new), lambda: cache.span(3)):
        with pytest.raises(ValueError, match="3 tokens held and 3 new ones are more than max_leng"):
            call()
    assert cache.length == 3
    assert cache.update(new[:, :, :2])[0].kv_stop == 5


def test_a_file_without_tokens_allocates_nothing_whatever_its_sizes(tmp_path):
    sizes = [1 << 30, 1, 0, 1 << 10]  # 4 TiB for each token
    state = {"length": 0, "first": 0, "rows": None}
    streams = [{"shape": sizes, "dtype": "float32"}]
    entry = {"kind": "StaticCache", "arguments": {"max_length": 8}, "state": state}
    metadata = {"format": FORMAT, "version": VERSION, "weights": "mine"}
    caches = json.dumps([{**entry, "streams": streams}])
    empty = {"layers.0.streams.0": torch.empty(sizes)}
    write_tensors(tmp_path / "cache", {**metadata, "caches": caches}, empty)
    cache = StaticCache(8)
    cache.load(tmp_path / "cache", weights="mine")
    with pytest.raises(ValueError, match="the cache one of 1073741824"):
        cache.update(torch.zeros(1, 1, 3, 1 << 10))
    assert cache.allocated_bytes == 0


def test_fewer_rows_have_smaller_buffers():
    cache = StaticCache(4)
    cache.update(torch.arange(6.0).view(3, 1, 2, 1))
    cache.reorder(torch.tensor([2]))
    assert cache.allocated_bytes == 4 * 4
    assert cache.peek(torch.zeros(1, 1, 0, 1))[0].streams[0].flatten().tolist() == [4.0, 5.0]
