"""The plan of a call: blocks cover every visible cell once, without a mask where none hides."""

import itertools
import random

import pytest
import torch

from blocks import MASKS, tensors
from cases import Sizes, draw_mask
from regard import EVERYTHING, NOTHING, Causal, Dense, Documents, Padding, Span, prepare
from regard.masks.runs import intersection
from regard.ops import blocks as planned
from regard.ops.blocks import Gathered, hiding, part_of, plan, shown_by_parts


def call_of(mask, length=23, batch=2):
    q, k, v = tensors(length, batch)
    return prepare(q, k, v, mask=mask, backend="eager").call


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("size", [1, 5, 64])
@pytest.mark.parametrize("mask", [name for name in MASKS if MASKS[name] is not NOTHING])
def test_blocks_cover_the_visible_cells(monkeypatch, mask, size, whole):
    monkeypatch.setattr(planned, "GAP", 2)
    monkeypatch.setattr(planned, "SHORT", 2)
    call = call_of(MASKS[mask])
    keep = MASKS[mask].dense(Span(0, 23, 0, 23), batch=2, heads=4).expand(2, 4, 23, 23)
    found, queries = torch.zeros_like(keep), torch.zeros(2, 23)
    for block in plan(call, size, whole=whole):
        rows = slice(*block.rows)
        queries[rows, block.first : block.first + block.queries] += 1
        if not block.runs:
            continue
        visible = part_of(call, block).keep()
        keys = torch.cat([torch.arange(start, stop) for start, stop in block.runs])
        for row in range(*block.rows):
            every = visible.expand(block.rows[1] - block.rows[0], 4, *visible.shape[-2:])
            here = found[row, :, block.first : block.first + block.queries]
            here[..., keys] = every[row - block.rows[0]]
    assert torch.equal(found, keep)
    assert (queries == 1).all()


def shape_of(mask, length, batch=1):
    return [
        (block.rows, block.first, block.queries, block.runs, block.plain)
        for block in plan(call_of(mask, length, batch), 64, whole=True)
    ]


def test_documents_are_blocks_without_a_mask():
    ids = torch.arange(4).repeat_interleave(torch.tensor([100, 30, 20, 150]))
    assert shape_of(Causal() & Documents(ids), 300) == [
        ((0, 1), 0, 100, [(0, 100)], True),
        ((0, 1), 100, 50, [(100, 150)], False),  # short documents are joined
        ((0, 1), 150, 150, [(150, 300)], True),
    ]


def test_rows_of_equal_lengths_share_blocks():
    mask = Causal() & Padding.from_lengths([100, 100, 200])
    assert shape_of(mask, 200, 3) == [
        ((0, 2), 0, 100, [(0, 100)], True),
        ((0, 2), 100, 100, [(0, 100)], True),
        ((2, 3), 0, 200, [(0, 200)], True),
    ]


def test_blocks_of_a_dense_mask_have_no_mask_where_they_are_full(monkeypatch):
    monkeypatch.setattr(planned, "GAP", 16)
    keep = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 1]]).bool()
    keep = keep.repeat_interleave(64, 0).repeat_interleave(64, 1)
    assert [(runs, plain) for *_, runs, plain in shape_of(Dense(keep), 192)] == [
        ([(0, 64), (128, 192)], True),
        ([(64, 128)], True),
        ([(0, 192)], True),
    ]


def test_runs_are_gathered_side_by_side(monkeypatch):
    monkeypatch.setattr(planned, "GAP", 2)
    call = call_of(MASKS["holes"])
    blocks = plan(call, 64, whole=True)
    _, k, _ = tensors()
    (block,) = [block for block in blocks if len(block.runs) > 1][:1]
    want = torch.cat([k[:, :, start:stop] for start, stop in block.runs], 2)
    assert torch.equal(Gathered(k, blocks).of(block), want)
    total = torch.zeros_like(k)
    block.add_to_keys(total, want)
    assert torch.equal(total != 0, (total == k) & (k != 0)) and (total != 0).any()


@pytest.mark.parametrize("seed", range(60))
def test_the_parts_that_hide_agree_with_the_mask_on_visible_runs(seed):
    mask, _ = draw_mask(random.Random(seed), Sizes(2, 2, 1, 1, 1, [0, 0], 9, 0, 9))
    mask = mask.within(Span(0, 9, 0, 9))
    for first, last in itertools.combinations(range(9), 2):
        runs = intersection(mask.finder()(first, last).some, [(0, 9)])
        rest = hiding(shown_by_parts(mask)(first, last), runs)
        for start, stop in runs:
            span = Span(first, last + 1, start, stop)
            got = rest.dense(span, batch=2, heads=2).expand(2, 2, -1, -1)
            assert torch.equal(got, mask.dense(span, batch=2, heads=2).expand_as(got))


def test_parts_that_hide_nothing_are_left_out():
    documents = Documents(torch.tensor([0, 0, 0, 1, 1, 1]))
    both = shown_by_parts(Causal() & documents)
    assert hiding(both(3, 5), [(3, 6)]) == Causal()
    assert hiding(shown_by_parts(documents)(3, 5), [(3, 6)]) == EVERYTHING
    assert hiding(both(2, 5), [(0, 6)]) == Causal() & documents
