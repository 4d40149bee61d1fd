"""Parts of keys and values: shapes, rows, ranges, and how they are stored."""

import torch

from regard import PagedCache, PagePool, Part, QuantizedCache
from regard.cache.codes import QuantizedStream
from regard.cache.parts import TENSORS, Storage, Streams, storage_of, streams_of, to_tensor


def parts_of(cache, *lengths):
    """The parts of a cache after appending random tokens, and these tokens."""
    x = torch.randn(2, 3, sum(lengths), 32)
    for piece in x.split(lengths, 2):
        parts = cache.update(piece, piece)
    return parts, x


def test_tensors_are_streams_as_they_are():
    k = torch.randn(1, 2, 5, 8)
    assert streams_of([k, k]) == (k, k)
    assert to_tensor(k) is k
    part = Part(3, 8, (k, k))
    assert part.outlines == part.stored == part.streams
    assert not part.is_scattered and storage_of([part]) == TENSORS
    assert part.as_tensors() is part.in_one() is part


def test_a_part_is_cut_to_slots_and_to_rows():
    k, v = torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 4)
    start, stop, (some_k, some_v) = Part(3, 8, (k, v)).narrow(4, 6)
    assert (start, stop) == (4, 6)
    assert some_k.equal(k[:, :, 1:3]) and some_v.equal(v[:, :, 1:3])
    (of_k, of_v) = Part(3, 8, (k, v)).rows(1, 2).streams
    assert of_k.equal(k[1:]) and of_v.equal(v[1:])


def test_rows_that_read_the_same_memory_are_shared():
    one = torch.randn(1, 2, 5, 8)
    assert Part(0, 5, (one.expand(3, -1, -1, -1),) * 2).is_shared
    assert not Part(0, 5, (one.expand(3, -1, -1, -1), one.repeat(3, 1, 1, 1))).is_shared
    assert not Part(0, 5, (one, one)).is_shared


def test_codes_have_a_class_bits_and_outlines():
    (part,), x = parts_of(QuantizedCache(bits=8, group=32), 7)
    assert isinstance(part.streams, Streams) and len(part.streams) == 2
    assert storage_of([part]) == Storage((QuantizedStream,), 8)
    for outline in part.outlines:
        assert (outline.shape, outline.dtype) == (x.shape, x.dtype)
        assert not outline.any()
    copied = part.as_tensors()
    assert type(copied.streams) is tuple
    assert (copied.streams[0] - x).abs().max() < 0.05
    assert copied.narrow(2, 4).streams[0].equal(part.narrow(2, 4).streams[0])


def test_pages_that_lie_apart_are_scattered():
    pool = PagePool(num_pages=20, page_size=2)
    cache, other = PagedCache(pool), PagedCache(pool)
    x = torch.randn(1, 2, 8, 4)
    for start in range(0, 8, 2):
        parts = cache.update(x[:, :, start : start + 2], x[:, :, start : start + 2])
        other.update(x[:, :, :2], x[:, :, :2])  # its page lies between
    assert storage_of(parts).several
    scattered = [part for part in parts if part.is_scattered]
    assert scattered
    assert not any(part.in_one().is_scattered for part in parts)
    for cut in (lambda part: [part.in_one()], lambda part: part.pieces(3)):
        pieces = [piece for part in parts for piece in cut(part)]
        assert (pieces[0].kv_start, pieces[-1].kv_stop) == (0, 8)
        assert torch.cat([each.streams[0] for each in pieces], 2).equal(x)


def test_the_fewest_bits_count():
    (eight,), _ = parts_of(QuantizedCache(bits=8, group=32), 4)
    (four,), _ = parts_of(QuantizedCache(bits=4, group=32), 4)
    found = storage_of([eight, four._replace(kv_start=4, kv_stop=8)])
    assert found == Storage((QuantizedStream,), 4, several=True)


def test_the_storage_of_several_parts_is_found_in_a_graph():
    def count(x):
        parts = Part(0, 2, (x[:, :, :2],) * 2), Part(2, 5, (x[:, :, 2:],) * 2)
        return x + len(storage_of(parts).kinds)

    x = torch.randn(1, 2, 5, 8)
    assert torch.compile(count, backend="eager", fullgraph=True)(x).equal(x)
