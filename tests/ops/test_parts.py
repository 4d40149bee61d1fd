"""Parts read one at a time: what a call sees of them, and parts in pages in pieces."""

import random

import pytest
import torch

from paged import coded, in_pages, part_of
from regard import Causal, Part, SlidingWindow, Span, prepare
from regard.cache.codes import QuantizedStream
from regard.cache.paging.reading import PagedStream
from regard.cache.parts import Streams
from regard.ops import parts as reading
from regard.ops.backends import BACKENDS
from regard.ops.parts import (
    GATHERED,
    concatenated,
    readable,
    rebuilt,
    visible_parts,
)

RNG = random.Random(11)


def drawn(batch=2, length=23, width=4):
    return torch.randn(batch, 2, length, width), torch.randn(batch, 2, length, width)


def tabled(*tables, page_size=2, start=0, length=None):
    """A part of one stream with these pages, whose values are their tokens in the slab."""
    table = torch.tensor(tables)
    slab = torch.arange((int(table.max()) + 1) * page_size).double()[None, None, :, None]
    length = table.shape[1] * page_size - start if length is None else length
    return part_of(Streams([PagedStream(slab, table, page_size, start, length)]))


def tokens(part, row=0):
    return part.streams[0][row, 0, :, 0].long().tolist()


def test_other_parts_are_not_cut():
    part = Part(3, 26, drawn())
    assert list(part.pieces(4)) == [part]
    assert part.in_one() is part


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_pieces_are_the_part(scattered, shared):
    k, v = (x[:1].expand(2, -1, -1, -1) if shared else x for x in drawn())
    part = part_of(in_pages((k, v), RNG, scattered=scattered, shared=shared), kv_start=5)
    found = list(part.pieces(4))
    assert all(not each.is_scattered for each in found)
    assert [each.kv_start for each in found] == [5, *(each.kv_stop for each in found[:-1])]
    whole = concatenated(found)
    assert (whole.kv_start, whole.kv_stop) == (5, 28)
    assert all(torch.equal(*pair) for pair in zip(whole.streams, (k, v), strict=True))
    sizes = [each.kv_stop - each.kv_start for each in found]
    assert sizes == ([4, 4, 4, 4, 4, 3] if scattered else [23])


def test_long_runs_of_pages_are_views_and_others_copies_of_bounded_length():
    part = tabled([9, 3, 4, 5, 6, 0, 8, 7], start=1)
    found = [(each.kv_start, tokens(each)) for each in part.pieces(5)]
    assert found == [
        (0, [19]),  # before a run: a copy
        (1, [6, 7, 8, 9, 10, 11, 12, 13]),  # four pages, one after another
        (9, [0, 1, 16, 17, 14]),  # as many as may be copied
        (14, [15]),
    ]
    memory = part.stored[0].slab.untyped_storage().data_ptr()
    assert [each.streams[0].untyped_storage().data_ptr() == memory for each in part.pieces(5)] == [
        True,
        True,
        False,
        True,
    ]  # inside of one page is a view, too


def test_a_run_ends_where_that_of_any_row_does():
    part = tabled([0, 1, 2, 3], [7, 8, 10, 11])
    assert [tokens(each, row=1) for each in part.pieces(4)] == [
        [14, 15, 16, 17],
        [20, 21, 22, 23],
    ]
    memory = part.stored[0].slab.untyped_storage().data_ptr()
    assert {each.streams[0].untyped_storage().data_ptr() for each in part.pieces(4)} == {memory}
    shorter = tabled([0, 1, 2, 3], [7, 8, 10, 11], start=1, length=4)
    assert [tokens(each, row=1) for each in shorter.pieces(4)] == [[15, 16, 17, 20]]


def test_rows_that_are_not_equally_far_apart_are_copied_piece_by_piece():
    for tables in (([0, 1, 2], [4, 5, 6], [9, 10, 11]), ([3, 4, 5], [0, 1, 2])):
        part = tabled(*tables)
        found = list(part.pieces(4))
        assert [each.kv_stop - each.kv_start for each in found] == [4, 2]
        for row, pages in enumerate(tables):
            whole = [token for each in found for token in tokens(each, row)]
            assert whole == list(range(2 * pages[0], 2 * pages[0] + 6))


def test_a_batch_of_no_rows():
    k, v = drawn(2)
    stored = in_pages((k, v), RNG).stored
    part = part_of(Streams([each.rows(0, 0) for each in stored]))
    assert concatenated(part.pieces(4)).streams[0].shape == (0, 2, 23, 4)
    assert part.streams[1].shape == (0, 2, 23, 4)


def test_an_empty_part_is_one_piece():
    part = part_of(in_pages(drawn(), RNG)).narrow(0, 0)
    (found,) = part.pieces(GATHERED)
    assert found.streams[0].shape == (2, 2, 0, 4)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("scattered", [True, False])
def test_codes_stay_codes(scattered, by_channel):
    paged = in_pages(drawn(width=16), RNG, scattered=scattered)
    paged = coded(paged, (8, 4), ((), ()), by_channel=by_channel)
    positions = in_pages((torch.arange(23).view(1, 1, 23, 1).expand(2, 1, 23, 1),), RNG)
    part = part_of(Streams([*paged.stored[:1], *positions.stored]))
    found = list(part_of(paged).pieces(5))
    assert all(isinstance(each.stored[1], QuantizedStream) for each in found)
    assert torch.equal(concatenated(found).streams[1], paged[1])
    (mixed,) = part.pieces(23)
    assert mixed.streams[1][1, 0, :, 0].tolist() == list(range(23))
    assert isinstance(mixed.stored[0], QuantizedStream)


def test_a_backend_gets_the_pages_that_it_can_read():
    part = part_of(in_pages(drawn(), RNG))
    backend = BACKENDS["eager"]
    (copied,) = readable(part, backend)
    assert not copied.is_scattered
    asked = []
    some = {PagedStream: lambda stored: asked.append(stored) or len(asked) == 1}
    backend = backend._replace(reads=some)
    assert list(readable(part, backend)) == [part]
    (copied,) = readable(part, backend)
    assert not copied.is_scattered
    assert asked == [part.stored, part.stored]
    other = Part(0, 23, drawn())
    assert list(readable(other, backend)) == [other]


def test_rows_share_what_was_expanded():
    k, v = (x[:1].expand(3, -1, -1, -1) for x in drawn(1, width=16))
    plain, paged = Part(0, 23, (k, v)), part_of(in_pages((k, v), RNG, shared=True))
    codes = part_of(coded(paged.streams, (8, 8), ((), ())))
    (copied,) = codes.pieces(50)
    for part in (plain, paged, codes, copied):
        assert part.is_shared
        one = part.rows(0, 1)
        assert not one.is_shared
        assert one.streams[0].shape == (1, 2, 23, 16)
        assert torch.equal(one.streams[1], part.streams[1][:1])
    assert not Part(0, 23, (k, v.clone())).is_shared
    assert not part_of(in_pages((k, v), RNG)).is_shared
    assert not Part(0, 23, Streams([k, v.contiguous()])).is_shared
    assert not Part(0, 23, (k[:1], v[:1])).is_shared


def test_visible_parts_are_narrowed_one_at_a_time():
    k, v = drawn(1, 8)
    q = torch.zeros(1, 2, 1, 4)
    call = prepare(q, k, v, mask=Causal() & SlidingWindow(3), span=Span(7, 8, 0, 8)).call
    asked = []

    def given():
        for start in (0, 3, 6):
            asked.append(start)
            yield Part(start, min(start + 3, 8), tuple(x[:, :, start : start + 3] for x in (k, v)))

    found = visible_parts(call.span, given())
    first = next(found)
    assert (first.kv_start, first.kv_stop, asked) == (5, 6, [0, 3])
    assert [(each.kv_start, each.kv_stop) for each in found] == [(6, 8)]
    (nothing,) = visible_parts(call.span, (part_of(in_pages((k, v), RNG)).narrow(0, 4),))
    assert (nothing.kv_start, nothing.kv_stop) == (5, 5)
    assert nothing.streams[0].shape[2] == 0


class Making:
    """Keys that are the latents times two, and how much of them was made at a time."""

    def __init__(self):
        self.shapes = []

    def __call__(self, parts):
        (part,) = parts
        (latent,) = part.streams
        self.shapes.append(tuple(latent.shape))
        return (Part(part.kv_start, part.kv_stop, (2 * latent, latent @ latent.new_ones(4, 4))),)


def described(k, mask=None, past=0):
    q = torch.zeros(k.shape[0], 2, 1, 4)
    given = {} if mask is None else {"mask": mask}
    return prepare(q, k, k, span=Span(past, past + 1, 0, k.shape[2]), **given).call


def test_keys_are_made_of_one_piece_after_another(monkeypatch):
    k, _ = drawn()
    making = Making()
    monkeypatch.setattr(reading, "GATHERED", 10)
    found = iter(rebuilt(described(k).span, (part_of(in_pages((k,), RNG)),), making))
    assert len(making.shapes) == 1
    whole = concatenated(found)
    assert torch.equal(whole.streams[0], 2 * k)
    assert making.shapes == [(2, 2, 10, 4), (2, 2, 10, 4), (2, 2, 3, 4)]


def test_keys_are_made_of_what_is_visible():
    k, _ = drawn()
    making = Making()
    call = described(k, Causal() & SlidingWindow(5), past=22)
    whole = concatenated(rebuilt(call.span, (part_of(in_pages((k,), RNG)),), making))
    assert (whole.kv_start, whole.kv_stop) == (18, 23)
    assert making.shapes == [(2, 2, 5, 4)]


def test_keys_of_shared_rows_are_made_once():
    k = drawn(1)[0].expand(3, -1, -1, -1)
    for streams in ((k,), in_pages((k,), RNG, shared=True)):
        making = Making()
        (found,) = rebuilt(described(k).span, (Part(0, 23, streams),), making)
        assert making.shapes == [(1, 2, 23, 4)]
        assert found.is_shared
        assert torch.equal(found.streams[0], 2 * k)


def test_keys_that_are_made_later_are_made_under_the_same_autocast(monkeypatch):
    k, _ = drawn()
    monkeypatch.setattr(reading, "GATHERED", 10)
    parts = (part_of(in_pages((k,), RNG)),)
    with torch.autocast("cpu", torch.bfloat16):
        found = rebuilt(described(k).span, parts, Making())
    assert [each.streams[1].dtype for each in found] == [torch.bfloat16] * 3
    found = rebuilt(described(k).span, parts, Making())
    with torch.autocast("cpu", torch.bfloat16):
        assert [each.streams[1].dtype for each in found] == [torch.float32] * 3
