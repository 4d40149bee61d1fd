"""Keys that rows share are read once: the queries of all rows are those of one."""

import random

import pytest
import torch

from paged import in_pages, part_of
from regard import Alibi, Causal, Padding, Part, Span, attend, prepare
from regard.ops.backends import BACKENDS
from regard.ops.observed import backends_run
from regard.ops.shared_rows import folded, rows_at_once, unfolded

BATCH, KEYS = 5, 13


def drawn(queries=1, heads=4, kv_heads=2, dtype=torch.float32):
    torch.manual_seed(1)
    q = torch.randn(BATCH, heads, queries, 8, dtype=dtype)
    k, v = (torch.randn(1, kv_heads, KEYS, 8, dtype=dtype).expand(BATCH, -1, -1, -1) for _ in "kv")
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
    q, k, v = drawn(queries)
    expected = attend(q, k.contiguous(), v.contiguous(), backend="eager")
    watched = Watched(backend)
    monkeypatch.setitem(BACKENDS, backend, watched.backend)
    for streams in ((k, v), in_pages((k, v), random.Random(3), shared=True)):
        watched.calls.clear()
        call = prepare(q, k, v, backend=backend)
        out = call.run(q, (Part(0, KEYS, streams),))
        assert watched.calls == [(1, BATCH * queries, KEYS)]
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
        assert out.shape == q.shape


@pytest.mark.parametrize("backend", ["eager", "grouped"])
def test_a_shared_prefix_and_own_tokens_are_merged(backend, monkeypatch):
    q, k, v = drawn(2)
    own_k, own_v = torch.randn(2, BATCH, 2, 4, 8)
    whole = [torch.cat(pair, 2) for pair in ((k, own_k), (v, own_v))]
    given = {"mask": Causal(), "span": Span(KEYS + 2, KEYS + 4, 0, KEYS + 4)}
    sinks = torch.randn(4)
    expected = attend(q, *whole, **given, sinks=sinks, backend="eager")
    watched = Watched(backend)
    monkeypatch.setitem(BACKENDS, backend, watched.backend)
    call = prepare(q, own_k, own_v, **given, sinks=sinks, backend=backend)
    out = call.run(q, (Part(0, KEYS, (k, v)), Part(KEYS, KEYS + 4, (own_k, own_v))))
    assert watched.calls == [(1, BATCH * 2, KEYS), (BATCH, 2, BATCH * 4)]
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)


def test_fewer_rows_are_attended_together_where_a_backend_takes_few_queries(monkeypatch):
    q, k, v = drawn(queries=40, heads=2, kv_heads=1)  # 80 rows of a key head each: 3 are too many
    watched = Watched("grouped")
    monkeypatch.setitem(BACKENDS, "grouped", watched.backend)
    out = prepare(q, k, v, backend="grouped").run(q, (Part(0, KEYS, (k, v)),))
    assert watched.calls == [(1, 120, KEYS), (1, 80, KEYS)] or watched.calls == [
        (1, 80, KEYS),
        (1, 80, KEYS),
        (1, 40, KEYS),
    ]
    expected = attend(q, k.contiguous(), v.contiguous(), backend="eager")
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    watched.calls.clear()
    found = prepare(q, k, v, backend="grouped").partial(q, (Part(0, KEYS, (k, v)),))
    assert len(watched.calls) > 1
    assert found.lse.shape == q.shape[:3]
    torch.testing.assert_close(found.out, expected, atol=1e-6, rtol=1e-6)


def test_one_row_at_a_time_is_not_folded():
    q, k, v = drawn(queries=200, heads=1, kv_heads=1)
    call, part = prepare(q, k, v, backend="grouped").call, Part(0, KEYS, (k, v))
    assert rows_at_once(call, part, BACKENDS["grouped"]) == 1
    assert rows_at_once(call, part, BACKENDS["eager"]) == BATCH


def test_rows_that_differ_are_read_each():
    """By their keys, what is hidden from them, or what is added to their scores."""
    eager = BACKENDS["eager"]

    def together(q, k, v, **given):
        prepared = prepare(q, k, v, **given)
        return rows_at_once(prepared.call, Part(0, KEYS, (k, v)), eager)

    q, k, v = drawn()
    assert together(q, k, v) == BATCH
    assert together(q, k, v.contiguous()) == 1
    assert together(q[:1], k[:1], v[:1]) == 1
    valid = torch.ones(BATCH, KEYS, dtype=torch.bool)
    valid[2, 3] = False
    assert together(q, k, v, mask=Padding(valid)) == 1
    assert together(q, k, v, mask=Padding(valid), span=Span(20, 21, 0, KEYS)) == 1
    assert together(q, k, v, mask=Causal(), span=Span(KEYS - 1, KEYS, 0, KEYS)) == BATCH
    assert together(q, k, v, mask=Causal(), span=Span(KEYS - 2, KEYS - 1, 0, KEYS)) == BATCH
    ragged = Span.ragged(
        torch.tensor([15, 20, 13, 14, 30]), queries=1, kv_start=0, kv_stop=KEYS, bounds=(13, 30)
    )
    assert together(q, k, v, mask=Causal(), span=ragged) == BATCH
    assert together(q, k, v, score_bias=torch.randn(BATCH, 1, 1, 1)) == 1
    assert together(q, k, v, score_bias=Alibi(torch.ones(4)), span=ragged) == 1
    assert together(q, k, v, dropout=0.5) == 1
    assert together(q.clone().requires_grad_(), k, v) == 1


def test_gradients_of_shared_keys_are_those_of_a_sum():
    q, k, v = (x.double() for x in drawn())
    one = k[:1].clone().requires_grad_()
    attend(q, one.expand_as(k), v).sum().backward()
    each = k.clone().requires_grad_()
    attend(q, each, v.contiguous()).sum().backward()
    torch.testing.assert_close(one.grad, each.grad.sum(0, keepdim=True))


def test_folding_and_unfolding_are_inverse():
    q, k, v = drawn(3)
    call = prepare(q, k, v).call
    for rows in (1, 2, 5):
        found = list(folded(call, q, Part(0, KEYS, (k, v)), rows))
        back = torch.cat([unfolded(each.q, each.rows) for each in found])
        assert torch.equal(back, q)
        for each in found:
            assert (each.call.batch, each.call.num_queries) == (1, 3 * each.rows)
            assert each.part.streams[0].shape[0] == 1


def test_every_backend_runs_folded_calls():
    q, k, v = drawn(16, dtype=torch.bfloat16)
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
    q, k, v = drawn()
    part = part_of(in_pages((k, v), random.Random(2), shared=True))
    (one,) = folded(prepare(q, k, v).call, q, part, BATCH)
    assert one.part.stored[0].table.shape[0] == 1
    assert torch.equal(one.part.streams[1], v[:1])
