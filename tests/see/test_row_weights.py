"""Blocks of rows: the weights of the whole call, whatever their size."""

import pytest
import torch

import regard.see.row_weights
from regard import (
    Alibi,
    Causal,
    Chunked,
    Dense,
    Documents,
    KVCache,
    Padding,
    Part,
    QuantizedCache,
    SlidingWindow,
    Span,
    attention_weights,
    prepare,
)
from regard.see.row_weights import one_row

L = 13
KEEP = torch.rand(2, 4, L, L, generator=torch.Generator().manual_seed(0)) > 0.4
VALID = torch.arange(L) >= torch.tensor([[0], [5]])
IDS = torch.tensor([[0] * 5 + [1] * 8, [0] * 9 + [1] * 4])
MASKS = {
    "causal": Causal(),
    "window": Causal() & SlidingWindow(4),
    "chunks": Causal() & Chunked(5),
    "documents": Causal() & Documents(IDS),
    "dense": Dense(KEEP),
    "padding": Causal() & Padding(VALID),
    "far": SlidingWindow(3) & ~Causal(),
}


def heads(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def rows_of(prepared, q, parts, row):
    """All rows, put together from blocks."""
    call = one_row(prepared, q, parts, row, past=0)
    whole = torch.zeros(q.shape[1], q.shape[2], prepared.call.given_span.kv_stop)
    for block in call.blocks():
        count, width = block.weights.shape[1:]
        whole[:, block.query : block.query + count, block.key : block.key + width] = block.weights
    return whole


MORE = (
    {},
    {"sinks": heads(4), "softcap": 2.0},
    {"score_bias": heads(2, 4, L, L)},
    {"score_bias": heads(L)},
    {"score_bias": Alibi([0.5, 0.2, 0.1, 0.0])},
)


@pytest.mark.parametrize("size", [1, 300, 1 << 20])
@pytest.mark.parametrize("name", MASKS)
def test_blocks_are_the_rows_of_the_whole(name, size, monkeypatch):
    monkeypatch.setattr(regard.see.row_weights, "BLOCK", size)
    q, k = heads(2, 4, L, 8), heads(2, 2, L, 8)
    for more in MORE:
        options = {"mask": MASKS[name], "span": Span(0, L, 0, L), **more}
        prepared = prepare(q, k, k, **options)
        for row in range(2):
            found = rows_of(prepared, q, [Part(0, L, (k, k))], row)
            wanted = attention_weights(q, k, **options)[row]
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_hidden_content_that_is_not_finite_is_not_read():
    q, k = heads(1, 2, L, 8), heads(1, 2, L, 8)
    k[:, :, :3] = torch.nan
    mask = Padding(torch.arange(L)[None] >= 3) & Causal()
    found = rows_of(prepare(q, k, k, mask=mask), q, [Part(0, L, (k, k))], 0)
    assert found.isfinite().all()
    assert found[:, 3:].sum(-1).allclose(torch.ones(2, L - 3))


@pytest.mark.parametrize("make", [KVCache, lambda: QuantizedCache(bits=8)], ids=["plain", "int8"])
def test_keys_as_a_cache_returns_them(make):
    q, k, cache = heads(1, 4, L, 64), heads(1, 2, L, 64), make()
    cache.update(k[:, :, :9], k[:, :, :9])
    prepared = prepare(q[:, :, 9:], k[:, :, 9:], k[:, :, 9:], mask=Causal(), span=cache.span(4))
    parts = cache.update(k[:, :, 9:], k[:, :, 9:])
    call = one_row(prepared, q[:, :, 9:], parts, 0, past=9)
    (block,) = call.blocks()
    stored = torch.cat([part.streams[0] for part in parts], dim=2)
    wanted = attention_weights(q[:, :, 9:], stored, mask=Causal(), span=Span(9, L, 0, L))
    torch.testing.assert_close(block.weights, wanted[0], rtol=1e-5, atol=1e-6)
    assert (block.query, block.key, call.last_key) == (9, 0, L - 1)


def test_rows_that_start_at_different_slots():
    q, k = heads(2, 4, 2, 8), heads(2, 2, 7, 8)
    span = Span(torch.tensor([3, 5]), torch.tensor([5, 7]), 0, 7)
    prepared = prepare(q, k, k, mask=Causal(), span=span)
    for row, start in enumerate((3, 5)):
        call = one_row(prepared, q, [Part(0, 7, (k, k))], row, past=start)
        (block,) = call.blocks()
        own = {"mask": Causal(), "span": Span(start, start + 2, 0, 7)}
        wanted = attention_weights(q[row:][:1], k[row:][:1], **own)[0, :, :, : start + 2]
        torch.testing.assert_close(block.weights, wanted, rtol=1e-5, atol=1e-6)
        assert block.query == start


def test_a_window_whose_cache_counts_from_the_first_key_it_holds():
    q, k = heads(1, 2, 2, 8), heads(1, 2, 5, 8)
    prepared = prepare(q, k, k, mask=Causal(), span=Span(3, 5, 0, 5))
    (block,) = one_row(prepared, q, [Part(0, 5, (k, k))], 0, past=10).blocks()
    assert (block.query, block.key) == (10, 7)
