"""Parts: what a call sees of them, parts in pages in pieces, and attention to what is stored:
tensors, codes, codes of rotated values, pages, and keys that rows share, which are read once."""

import random

import pytest
import torch

from paged import coded, in_pages, part_of
from regard import Alibi, Causal, Padding, Part, SlidingWindow, Span, attend, prepare
from regard.cache.codes import QuantizedStream, quantize
from regard.cache.paging.reading import PagedStream
from regard.cache.parts import Streams, storage_of
from regard.cache.rotation import blocks_of, hadamard
from regard.ops import parts as reading
from regard.ops.backends import BACKENDS
from regard.ops.observed import backends_run
from regard.ops.partial import Partial
from regard.ops.parts import (
    GATHERED,
    attend_part,
    attend_rows,
    concatenated,
    readable,
    rebuilt,
    rows_at_once,
    visible_parts,
)
from session import LONG

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


KEYS = 21


def of_widths(width, v_width, dtype, *, joined=False, queries=2):
    torch.manual_seed(4)
    q = torch.randn(2, 4, queries, width).to(dtype)
    k, v = torch.randn(2, 2, KEYS, width).to(dtype), torch.randn(2, 2, KEYS, v_width).to(dtype)
    return (q, k, k[..., :v_width]) if joined else (q, k, v)


def as_codes(x, bits, blocks):
    codes, scales = quantize(hadamard(x.float(), blocks), bits, 16)
    return QuantizedStream(codes, scales, bits, 16, x.shape[-1], x.dtype, blocks)


def expected(call, q, part):
    """The definition, on the values that the codes stand for, in float64."""
    k, v = (x.double() for x in call.keys_and_values(part.as_tensors()))
    return prepare(q.double(), k, v, scale=call.scale, backend="eager").partial(
        q.double(), (Part(0, KEYS, (k, v)),)
    )


CASES = {  # widths, bits and rotations of keys and of values
    "both rotated": (32, 32, (4, 4), ((32,), (32,))),
    "keys rotated": (32, 48, (4, 8), ((32,), ())),
    "values rotated": (32, 48, (8, 4), ((), (32, 16))),
    "blocks": (48, 48, (6, 4), (blocks_of(48), blocks_of(48))),
    "not rotated": (32, 32, (8, 8), ((), ())),
}


COMPILED = CASES if LONG else ("both rotated", "blocks")  # a second each: the kernel is compiled
EACH = [*((name, backend) for backend in ("grouped", "eager") for name in CASES)]


@pytest.mark.parametrize(("case", "backend"), [*EACH, *((name, "fused") for name in COMPILED)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_are_rotated_as_the_keys_and_outputs_back(case, backend, dtype):
    width, v_width, bits, blocks = CASES[case]
    q, k, v = of_widths(width, v_width, dtype)
    streams = [as_codes(x, *each) for x, *each in zip((k, v), bits, blocks, strict=True)]
    part = Part(0, KEYS, Streams(streams))
    agrees(backend, q, k, v, part, min(bits))


@pytest.mark.parametrize("backend", ["grouped", "fused", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_one_stream_the_first_columns_are_rotated_in_keys_and_values(backend, dtype):
    q, k, v = of_widths(48, 32, dtype, joined=True)
    part = Part(0, KEYS, Streams([as_codes(k, 4, (32,))]))
    agrees(backend, q, k, v, part, 4)


@pytest.mark.parametrize("backend", ["grouped", "fused", "eager"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_pages_of_rotated_codes(backend, by_channel):
    q, k, v = of_widths(32, 32, torch.float32)
    paged = in_pages((k, v), random.Random(8), page_size=16)
    rotations = () if by_channel else (32,), (32,)
    agrees(backend, q, k, v, part_of(coded(paged, (4, 4), rotations, by_channel=by_channel)), 4)


@pytest.mark.parametrize("backend", ["grouped", "fused", "eager"])
def test_pages_of_joined_codes_with_scales_by_channel(backend):
    q, k, v = of_widths(48, 32, torch.float32, joined=True)
    paged = coded(in_pages((k,), random.Random(8), page_size=16), (6,), ((),), by_channel=True)
    agrees(backend, q, k, v, part_of(paged), 6)


def agrees(backend, q, k, v, part, bits):
    with torch.no_grad():
        try:
            call = prepare(q, k, v, backend=backend).stored_as(storage_of([part])).call
        except ValueError as error:
            pytest.skip(str(error))
        wanted, work = expected(call, q, part), BACKENDS[backend]
        (out,) = attend_part(work, call, q, part)
        assert out.dtype == q.dtype
        # codes are not rounded to bfloat16, as the values they stand for are: one rounding of each
        # key, 2 ** -9 of scores up to 4, and of each value
        atol, rtol = (2e-6, 1e-5) if q.dtype == torch.float32 else (0.04, 0.02)
        torch.testing.assert_close(out.double(), wanted.out, atol=atol, rtol=rtol)
        found = Partial(*attend_part(work, call, q, part, partial=True))
        torch.testing.assert_close(found.out.double(), wanted.out, atol=atol, rtol=rtol)
        torch.testing.assert_close(found.lse.double(), wanted.lse, atol=atol, rtol=rtol)


def test_a_backend_gets_what_it_reads():
    """Its classes of streams, where its function says so; queries in float32 where these are
    rotated. Others are tensors."""
    q, k, v = of_widths(32, 32, torch.bfloat16)
    call, got = prepare(q, k, v).call, []

    def run(call, q, k, v):
        got.append((type(k), type(v), q.dtype, call.dtype))
        return q.new_zeros(2, 4, 2, 32)

    every = dict.fromkeys((PagedStream, QuantizedStream), lambda streams: True)
    backend = BACKENDS["eager"]._replace(run=run, reads=every)
    half, wide = torch.bfloat16, torch.float32
    paged = in_pages((k, v), random.Random(8), page_size=16)
    attend_part(backend, call, q, part_of(paged))
    attend_part(backend, call, q, part_of(coded(paged, (4, 4), ((32,), (32,)))))
    plain = Streams([as_codes(x, 8, ()) for x in (k, v)])
    attend_part(backend, call, q, Part(0, KEYS, plain))
    rotated = Part(0, KEYS, Streams([as_codes(k, 4, (32,))] * 2))
    (out,) = attend_part(backend, call, q, rotated)
    assert got == [
        (PagedStream, PagedStream, half, half),
        (PagedStream, PagedStream, wide, wide),
        (QuantizedStream, QuantizedStream, half, half),
        (QuantizedStream, QuantizedStream, wide, wide),
    ]
    assert out.dtype == half
    got.clear()
    attend_part(backend, call, q, Part(0, KEYS, (k, v)))
    never = dict.fromkeys(every, lambda streams: False)
    attend_part(backend._replace(reads=never), call, q, part_of(paged))
    attend_part(backend._replace(reads={}), call, q, Part(0, KEYS, plain))
    assert got == 3 * [(torch.Tensor, torch.Tensor, half, half)]


BATCH, SHARED = 5, 13


def of_rows(queries=1, heads=4, kv_heads=2, dtype=torch.float32):
    torch.manual_seed(1)
    q = torch.randn(BATCH, heads, queries, 8, dtype=dtype)
    k, v = (
        torch.randn(1, kv_heads, SHARED, 8, dtype=dtype).expand(BATCH, -1, -1, -1) for _ in "kv"
    )
    return q, k, v


class Watched:
    """A backend whose calls are recorded: the rows, the queries, and the keys read, of each."""

    def __init__(self, name):
        self.plain, self.calls = BACKENDS[name], []
        seen = self.calls

        def watching(work):
            def run(call, q, k, v):
                assert (call.batch, call.num_queries) == (q.shape[0], q.shape[2])
                seen.append((*q.shape[::2], k.shape[0] * k.shape[2]))
                return work(call, q, k, v)

            return run

        partial = self.plain.partial and watching(self.plain.partial)
        self.backend = self.plain._replace(run=watching(self.plain.run), partial=partial)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "grouped"])
@pytest.mark.parametrize("queries", [1, 3])
def test_shared_keys_are_read_once_for_all_rows(backend, queries, monkeypatch):
    q, k, v = of_rows(queries)
    expected = attend(q, k.contiguous(), v.contiguous(), backend="eager")
    watched = Watched(backend)
    monkeypatch.setitem(BACKENDS, backend, watched.backend)
    for streams in ((k, v), in_pages((k, v), random.Random(3), shared=True)):
        watched.calls.clear()
        call = prepare(q, k, v, backend=backend)
        out = call.run(q, (Part(0, SHARED, streams),))
        assert watched.calls == [(1, BATCH * queries, SHARED)]
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
        assert out.shape == q.shape


@pytest.mark.parametrize("backend", ["eager", "grouped"])
def test_a_shared_prefix_and_own_tokens_are_merged(backend, monkeypatch):
    q, k, v = of_rows(2)
    own_k, own_v = torch.randn(2, BATCH, 2, 4, 8)
    whole = [torch.cat(pair, 2) for pair in ((k, own_k), (v, own_v))]
    given = {"mask": Causal(), "span": Span(SHARED + 2, SHARED + 4, 0, SHARED + 4)}
    sinks = torch.randn(4)
    expected = attend(q, *whole, **given, sinks=sinks, backend="eager")
    watched = Watched(backend)
    monkeypatch.setitem(BACKENDS, backend, watched.backend)
    call = prepare(q, own_k, own_v, **given, sinks=sinks, backend=backend)
    out = call.run(q, (Part(0, SHARED, (k, v)), Part(SHARED, SHARED + 4, (own_k, own_v))))
    assert watched.calls == [(1, BATCH * 2, SHARED), (BATCH, 2, BATCH * 4)]
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)


def test_fewer_rows_are_attended_together_where_a_backend_takes_few_queries(monkeypatch):
    q, k, v = of_rows(queries=40, heads=2, kv_heads=1)  # 80 rows a key head each: 3 are too many
    watched = Watched("grouped")
    monkeypatch.setitem(BACKENDS, "grouped", watched.backend)
    out = prepare(q, k, v, backend="grouped").run(q, (Part(0, SHARED, (k, v)),))
    assert watched.calls == [(1, 120, SHARED), (1, 80, SHARED)] or watched.calls == [
        (1, 80, SHARED),
        (1, 80, SHARED),
        (1, 40, SHARED),
    ]
    expected = attend(q, k.contiguous(), v.contiguous(), backend="eager")
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    watched.calls.clear()
    found = prepare(q, k, v, backend="grouped").partial(q, (Part(0, SHARED, (k, v)),))
    assert len(watched.calls) > 1
    assert found.lse.shape == q.shape[:3]
    torch.testing.assert_close(found.out, expected, atol=1e-6, rtol=1e-6)


def test_one_row_at_a_time_is_not_folded():
    q, k, v = of_rows(queries=200, heads=1, kv_heads=1)
    call, part = prepare(q, k, v, backend="grouped").call, Part(0, SHARED, (k, v))
    assert rows_at_once(call, part, BACKENDS["grouped"]) == 1
    assert rows_at_once(call, part, BACKENDS["eager"]) == BATCH


def test_rows_that_differ_are_read_each():
    """By their keys, what is hidden from them, or what is added to their scores."""
    eager = BACKENDS["eager"]

    def together(q, k, v, **given):
        prepared = prepare(q, k, v, **given)
        return rows_at_once(prepared.call, Part(0, SHARED, (k, v)), eager)

    q, k, v = of_rows()
    assert together(q, k, v) == BATCH
    assert together(q, k, v.contiguous()) == 1
    assert together(q[:1], k[:1], v[:1]) == 1
    valid = torch.ones(BATCH, SHARED, dtype=torch.bool)
    valid[2, 3] = False
    assert together(q, k, v, mask=Padding(valid)) == 1
    assert together(q, k, v, mask=Padding(valid), span=Span(20, 21, 0, SHARED)) == 1
    assert together(q, k, v, mask=Causal(), span=Span(SHARED - 1, SHARED, 0, SHARED)) == BATCH
    assert together(q, k, v, mask=Causal(), span=Span(SHARED - 2, SHARED - 1, 0, SHARED)) == BATCH
    ragged = Span.ragged(
        torch.tensor([15, 20, 13, 14, 30]), queries=1, kv_start=0, kv_stop=SHARED, bounds=(13, 30)
    )
    assert together(q, k, v, mask=Causal(), span=ragged) == BATCH
    assert together(q, k, v, score_bias=torch.randn(BATCH, 1, 1, 1)) == 1
    assert together(q, k, v, score_bias=Alibi(torch.ones(4)), span=ragged) == 1
    assert together(q, k, v, dropout=0.5) == 1
    assert together(q.clone().requires_grad_(), k, v) == 1


def test_gradients_of_shared_keys_are_those_of_a_sum():
    q, k, v = (x.double() for x in of_rows())
    one = k[:1].clone().requires_grad_()
    attend(q, one.expand_as(k), v).sum().backward()
    each = k.clone().requires_grad_()
    attend(q, each, v.contiguous()).sum().backward()
    torch.testing.assert_close(one.grad, each.grad.sum(0, keepdim=True))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_of_a_call_are_the_queries_of_one_row_and_rows_again(rows, monkeypatch):
    q, k, v = of_rows(3)
    monkeypatch.setattr(reading, "rows_at_once", lambda *given: rows)
    call, part = prepare(q, k, v).call, Part(0, SHARED, (k, v))
    watched = Watched("eager")
    expected = attend(q, k.contiguous(), v.contiguous(), backend="eager")
    out, lse = attend_rows(watched.backend, call, q, part, partial=True)
    assert lse.shape == q.shape[:3]
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    if rows > 1:
        assert {shape[0] for shape in watched.calls} == {1}
        assert sum(queries for _, queries, _ in watched.calls) == 3 * BATCH


def test_every_backend_runs_folded_calls():
    q, k, v = of_rows(16, dtype=torch.bfloat16)
    q, k, v = (torch.cat([x, x], -1) for x in (q, k[:1], v[:1]))
    k, v = k.expand(BATCH, -1, -1, -1), v.expand(BATCH, -1, -1, -1)
    expected = attend(q, k.contiguous(), v.contiguous(), backend="eager").float()
    for name in BACKENDS.keys() - {"flex"}:  # slow
        with backends_run() as ran, torch.no_grad():
            try:
                out = attend(q, k, v, backend=name)
            except ValueError:
                continue
        assert ran[name]
        torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)


def test_pages_of_shared_rows_are_a_part_of_one_row():
    _, k, v = of_rows()
    part = part_of(in_pages((k, v), random.Random(2), shared=True)).rows(0, 1)
    assert part.stored[0].table.shape[0] == 1
    assert torch.equal(part.streams[1], v[:1])
