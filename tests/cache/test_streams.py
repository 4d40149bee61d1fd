"""Streams, parts, lengths of rows, copies and snapshots."""

import copy

import pytest
import torch

from regard import KVCache
from regard.cache.parts import Part
from regard.cache.streams import (
    Lengths,
    check_streams,
    check_whole,
    concatenated,
    empty_like,
    write_tokens,
)


def test_a_part_is_cut_by_slots():
    keys = torch.arange(10).view(1, 1, 5, 2)
    part = Part(7, 12, (keys, keys + 100)).narrow(8, 10)
    assert (part.kv_start, part.kv_stop, part.stored) == (8, 10, part.streams)
    assert part.streams[0].flatten().tolist() == [2, 3, 4, 5]
    assert part.streams[1].flatten().tolist() == [102, 103, 104, 105]


def test_lengths_of_rows_are_cut_and_grow():
    lengths = Lengths().grown(6).truncated(torch.tensor([2, 5]))
    assert (lengths.longest, lengths.shortest) == (5, 2)
    longer = lengths.grown(3)
    assert longer.rows.tolist() == [5, 8]
    assert longer.reordered(torch.tensor([1, 1])) == Lengths(8, 8)
    assert longer.truncated(6).rows.tolist() == [5, 6]
    assert longer.truncated(5) == Lengths(5, 5)  # equal lengths need no tensor
    assert lengths.span(1).positions().tolist() == [[2], [5]]


@pytest.mark.parametrize("length", [-1, 7, torch.tensor([7, 0]), torch.tensor([-1, 0])])
def test_lengths_beyond_the_tokens_held_are_refused(length):
    with pytest.raises(ValueError, match=r"in 0..6, the tokens held"):
        Lengths(6, 6).truncated(length)


@pytest.mark.parametrize(("value", "message"), [(True, "whole"), (1.0, "whole"), (0, "at least 1")])
def test_sizes_that_are_not_whole_numbers_are_refused(value, message):
    with pytest.raises(ValueError, match=f"size is .*{message}"):
        check_whole("size", value, least=1)


def test_streams_that_do_not_fit_each_other_or_the_cache_are_refused():
    held = (torch.zeros(2, 3, 8, 4), torch.zeros(2, 1, 8, 2))
    new = (torch.zeros(2, 3, 5, 4), torch.zeros(2, 1, 5, 2))
    assert check_streams(new, ()) == check_streams(new, held) == 5
    with pytest.raises(ValueError, match="stream 1 has \\(heads, width\\)"):
        check_streams((new[0], new[0]), held)
    with pytest.raises(ValueError, match="one batch size and one length"):
        check_streams((new[0], new[1][:, :, :4]), held)
    with pytest.raises(ValueError, match="holds 2 streams, got 1"):
        check_streams(new[:1], held)


@pytest.mark.parametrize("rows", [None, torch.tensor([1, 3])])
def test_writing_in_place_and_concatenating_agree(rows):
    lengths = Lengths(3, 3) if rows is None else Lengths(3, 1, rows)
    new = torch.randn(2, 1, 2, 4)
    buffer = empty_like(new, 6)
    buffer[:, :, :3] = torch.randn(2, 1, 3, 4)
    before = buffer.clone()
    (whole,) = concatenated((before,), (new,), lengths)
    write_tokens((buffer,), (new,), lengths)
    assert torch.equal(buffer[:, :, :5], whole)
    for row, start in enumerate([3, 3] if rows is None else rows.tolist()):
        assert torch.equal(buffer[row, :, start : start + 2], new[row])
        assert torch.equal(buffer[row, :, :start], before[row, :, :start])


def test_a_copy_shares_no_buffer():
    one = KVCache()
    one.update(torch.zeros(1, 1, 2, 3))
    other = copy.deepcopy(one)
    other.update(torch.ones(1, 1, 2, 3))
    assert one.length == 2
    one.update(torch.full((1, 1, 2, 3), 7.0))
    assert other.peek(torch.zeros(1, 1, 0, 3))[0].streams[0][0, 0, 2:].eq(1).all()


def test_a_snapshot_can_be_restored():
    cache = KVCache()
    cache.update(torch.zeros(1, 1, 2, 3))
    before = cache.snapshot()
    cache.update(torch.ones(1, 1, 500, 3))  # allocates new buffers
    cache.restore(before)
    assert cache.length == 2
    assert cache.peek(torch.zeros(1, 1, 0, 3))[0].streams[0].eq(0).all()


def test_nbytes_counts_the_tokens_of_all_rows_and_heads():
    cache = KVCache()
    cache.update(torch.zeros(2, 3, 100, 4, dtype=torch.bfloat16))
    cache.truncate(7)
    assert cache.nbytes == 7 * (2 * 3 * 4 * 2)


def test_another_dtype_is_refused_with_a_word_on_autocast():
    cache = KVCache()
    cache.update(torch.zeros(1, 1, 2, 3).bfloat16())
    with pytest.raises(ValueError, match="one autocast for all"):
        cache.update(torch.zeros(1, 1, 2, 3))
