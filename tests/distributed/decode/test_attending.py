"""Attention to each rank's tokens, merged here: that of one softmax over all slots."""

import pytest
import torch

from regard import (
    EVERYTHING,
    Alibi,
    Causal,
    Chunked,
    Dense,
    Documents,
    Padding,
    Part,
    Prefix,
    RelativeBias,
    SlidingWindow,
    Span,
    Where,
    merge,
    prepare,
)
from regard.distributed.decode import attending
from regard.distributed.decode.slots import Slots
from regard.masks import NOTHING

HELD, NEW = 17, 9  # tokens
ALL = HELD + NEW
VALID = torch.arange(ALL) >= torch.tensor([0, 4, 20])[:, None]
IDS = (torch.arange(ALL) + torch.tensor([0, 2, 5])[:, None]) // 6
KEEP = torch.rand(3, 4, NEW, ALL, generator=torch.Generator().manual_seed(0)) < 0.4
MASKS = {
    "everything": EVERYTHING,
    "nothing": NOTHING,
    "causal": Causal(),
    "window": Causal() & SlidingWindow(5),
    "chunked": Causal() & Chunked(4),
    "prefix": Causal() | Prefix(torch.tensor([20, 3, 0])),
    "padding": Causal() & Padding(VALID),
    "documents": Causal() & Documents(IDS),
    "dense": Dense(KEEP),
    "mod": Where(lambda b, h, q, k: (q - k) % 3 != 1),
    "neither": ~(Causal() & SlidingWindow(5)),
}
BIASES = {
    "none": None,
    "rule": Alibi.for_heads(4),
    "learned": RelativeBias(4, num_buckets=8, max_distance=6, bidirectional=False).double(),
    "of keys": torch.randn(1, 1, 1, ALL, dtype=torch.float64),
    "of all": torch.randn(3, 4, NEW, ALL, dtype=torch.float64),
    "of queries": torch.randn(4, NEW, 1, dtype=torch.float64),
    "number": torch.tensor(0.3),
}


def expected(q, k, v, span, mask, bias):
    """Plain attention; rows that may attend to nothing are 0."""
    keep = mask.within(span).dense(span, batch=3, heads=4)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if bias is not None:
        rule = bias if isinstance(bias, torch.Tensor) else bias.bias(span, dtype=torch.float64)
        scores = scores + rule
    return scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num() @ v


def merged(prepared, q, k, v, slots):
    """What the ranks compute, one after the other."""
    found = []
    for rank, pieces in enumerate(slots.pieces):
        mine = torch.tensor([s for p in pieces for s in range(p.start, p.stop)], dtype=torch.int64)
        part = Part(0, len(mine), (k[:, :, mine], v[:, :, mine]))
        found.append(attending.attend_locally(prepared, q, part, slots, rank))
        assert found[-1].out.shape == (*q.shape[:3], v.shape[-1])
        assert found[-1].lse.shape == q.shape[:3]
        assert found[-1].out.dtype == torch.float64
    return merge(*found).out


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of queries, the last one smaller."""
    monkeypatch.setattr(attending, "_QUERIES", 4)
    monkeypatch.setattr(attending, "_ROWS", 4)


@pytest.mark.parametrize("page", [1, 3, 64])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_masks_and_biases(mask, bias, page):
    torch.manual_seed(0)
    mask, bias = MASKS[mask], BIASES[bias]
    q = torch.randn(3, 4, NEW, 6, dtype=torch.float64)
    k, v = (torch.randn(3, 2, ALL, width, dtype=torch.float64) for width in (6, 5))
    span = Span(HELD, ALL, 0, ALL)
    prepared = prepare(q, k, v, mask=mask, span=span, score_bias=bias, partial=True)
    slots = Slots(3, page)
    slots.add(slots.following(ALL))
    out = merged(prepared, q, k, v, slots)
    torch.testing.assert_close(out, expected(q, k, v, span, mask, bias), rtol=0, atol=1e-13)


def calls_of(mask, held, *, page=2, queries=1, bias=None, batch=1):
    """The keys of each call that a backend runs on rank 1 of 2."""
    q, k = torch.randn(batch, 4, queries, 6), torch.randn(batch, 2, held, 6)
    span = Span(held - queries, held, 0, held)
    prepared = prepare(q, k, k, mask=mask, span=span, score_bias=bias, partial=True)
    slots, calls, run = Slots(2, page), [], attending.attend_part
    slots.add(slots.following(held))
    mine = torch.cat([torch.arange(p.start, p.stop) for p in slots.pieces[1]])
    part = Part(0, len(mine), (k[:, :, mine], k[:, :, mine]))

    def observed(backend, call, q, part, *, partial):
        calls.append((call.num_keys, call.mask))
        return run(backend, call, q, part, partial=partial)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attending, "attend_part", observed)
        attending.attend_locally(prepared, q, part, slots, 1)
    return calls


@torch.no_grad()
def test_a_decoded_token_is_one_call_without_a_mask():
    assert calls_of(Causal(), 1024) == [(512, EVERYTHING)]
    assert calls_of(Causal() & SlidingWindow(100), 1024) == [(50, EVERYTHING)]
    assert [keys for keys, _ in calls_of(Causal(), 1024, bias=Alibi.for_heads(4))] == [512]
    valid = torch.arange(1024) >= torch.tensor([0, 96])[:, None]
    calls = calls_of(Causal() & Padding(valid), 1024, batch=2)
    assert [keys for keys, _ in calls] == [464, 48]
    assert calls[0][1] is EVERYTHING


@torch.no_grad()
def test_hidden_keys_are_not_computed():
    calls = calls_of(Causal() & Chunked(8), 1024, page=8, queries=8)
    assert [keys for keys, _ in calls] == [1, 3, 5, 3]
    assert [mask for _, mask in calls] == [EVERYTHING, Causal(), EVERYTHING, Causal()]
    assert calls_of(NOTHING, 64) == []
    keys = [keys for keys, _ in calls_of(Causal(), 64, page=8, queries=32)]
    assert keys == [16, 16, 17, 3, 21, 3, 24, 24, 25, 3, 29, 3]


@torch.no_grad()
def test_a_backend_that_cannot_run_a_piece_leaves_it_to_another():
    q = torch.randn(1, 4, 3, 8)
    prepared = prepare(q, q, q, mask=EVERYTHING)
    out, lse = attending._attended("sdpa", prepared.call, q, Part(0, 3, (q, q)))  # has no lse
    torch.testing.assert_close(out, prepared.run(q, (Part(0, 3, (q, q)),)))
    torch.testing.assert_close(lse, (q @ q.mT * 8**-0.5).logsumexp(-1))
