"""Attention to what is stored: tensors, codes, codes of rotated values, pages,
and keys that rows share, which are read once."""

import random

import pytest
import torch

from paged import coded, in_pages, part_of
from regard import Alibi, Causal, Padding, Part, Span, attend, prepare
from regard.cache.codes import QuantizedStream, quantize
from regard.cache.paging.reading import PagedStream
from regard.cache.parts import Streams, storage_of
from regard.cache.rotation import blocks_of, hadamard
from regard.ops.backends import BACKENDS
from regard.ops.observed import backends_run
from regard.ops.partial import Partial
from regard.ops.stored import folded, partial_of, rows_at_once, run_of, unfolded
from session import LONG

KEYS = 21


def drawn(width, v_width, dtype, *, joined=False, queries=2):
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
    q, k, v = drawn(width, v_width, dtype)
    streams = [as_codes(x, *each) for x, *each in zip((k, v), bits, blocks, strict=True)]
    part = Part(0, KEYS, Streams(streams))
    agrees(backend, q, k, v, part, min(bits))


@pytest.mark.parametrize("backend", ["grouped", "fused", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_one_stream_the_first_columns_are_rotated_in_keys_and_values(backend, dtype):
    q, k, v = drawn(48, 32, dtype, joined=True)
    part = Part(0, KEYS, Streams([as_codes(k, 4, (32,))]))
    agrees(backend, q, k, v, part, 4)


@pytest.mark.parametrize("backend", ["grouped", "fused", "eager"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_pages_of_rotated_codes(backend, by_channel):
    q, k, v = drawn(32, 32, torch.float32)
    paged = in_pages((k, v), random.Random(8), page_size=16)
    rotations = () if by_channel else (32,), (32,)
    agrees(backend, q, k, v, part_of(coded(paged, (4, 4), rotations, by_channel=by_channel)), 4)


@pytest.mark.parametrize("backend", ["grouped", "fused", "eager"])
def test_pages_of_joined_codes_with_scales_by_channel(backend):
    q, k, v = drawn(48, 32, torch.float32, joined=True)
    paged = coded(in_pages((k,), random.Random(8), page_size=16), (6,), ((),), by_channel=True)
    agrees(backend, q, k, v, part_of(paged), 6)


def agrees(backend, q, k, v, part, bits):
    with torch.no_grad():
        try:
            call = prepare(q, k, v, backend=backend).stored_as(storage_of([part])).call
        except ValueError as error:
            pytest.skip(str(error))
        wanted, work = expected(call, q, part), BACKENDS[backend]
        out = run_of(work, call, q, part)
        assert out.dtype == q.dtype
        # codes are not rounded to bfloat16, as the values they stand for are: one rounding of each
        # key, 2 ** -9 of scores up to 4, and of each value
        atol, rtol = (2e-6, 1e-5) if q.dtype == torch.float32 else (0.04, 0.02)
        torch.testing.assert_close(out.double(), wanted.out, atol=atol, rtol=rtol)
        found = partial_of(work, call, q, part)
        assert isinstance(found, Partial)
        torch.testing.assert_close(found.out.double(), wanted.out, atol=atol, rtol=rtol)
        torch.testing.assert_close(found.lse.double(), wanted.lse, atol=atol, rtol=rtol)


def test_a_backend_gets_what_it_reads():
    """Its classes of streams, where its function says so; queries in float32 where these are
    rotated. Others are tensors."""
    q, k, v = drawn(32, 32, torch.bfloat16)
    call, got = prepare(q, k, v).call, []

    def run(call, q, k, v):
        got.append((type(k), type(v), q.dtype, call.dtype))
        return q.new_zeros(2, 4, 2, 32)

    every = dict.fromkeys((PagedStream, QuantizedStream), lambda streams: True)
    backend = BACKENDS["eager"]._replace(run=run, reads=every)
    half, wide = torch.bfloat16, torch.float32
    paged = in_pages((k, v), random.Random(8), page_size=16)
    run_of(backend, call, q, part_of(paged))
    run_of(backend, call, q, part_of(coded(paged, (4, 4), ((32,), (32,)))))
    plain = Streams([as_codes(x, 8, ()) for x in (k, v)])
    run_of(backend, call, q, Part(0, KEYS, plain))
    out = run_of(backend, call, q, Part(0, KEYS, Streams([as_codes(k, 4, (32,))] * 2)))
    assert got == [
        (PagedStream, PagedStream, half, half),
        (PagedStream, PagedStream, wide, wide),
        (QuantizedStream, QuantizedStream, half, half),
        (QuantizedStream, QuantizedStream, wide, wide),
    ]
    assert out.dtype == half
    got.clear()
    run_of(backend, call, q, Part(0, KEYS, (k, v)))
    never = dict.fromkeys(every, lambda streams: False)
    run_of(backend._replace(reads=never), call, q, part_of(paged))
    run_of(backend._replace(reads={}), call, q, Part(0, KEYS, plain))
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


def test_folding_and_unfolding_are_inverse():
    q, k, v = of_rows(3)
    call = prepare(q, k, v).call
    for rows in (1, 2, 5):
        found = list(folded(call, q, Part(0, SHARED, (k, v)), rows))
        back = torch.cat([unfolded(each.q, each.rows) for each in found])
        assert torch.equal(back, q)
        for each in found:
            assert (each.call.batch, each.call.num_queries) == (1, 3 * each.rows)
            assert each.part.streams[0].shape[0] == 1


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
    q, k, v = of_rows()
    part = part_of(in_pages((k, v), random.Random(2), shared=True))
    (one,) = folded(prepare(q, k, v).call, q, part, BATCH)
    assert one.part.stored[0].table.shape[0] == 1
    assert torch.equal(one.part.streams[1], v[:1])
