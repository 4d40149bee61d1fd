"""Blocks and functions of masks, against the mask written out and torch's own block masks."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from cases import draw_case, table
from regard import (
    Causal,
    Chunked,
    Dense,
    Documents,
    Mask,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
    Where,
    prepare,
)
from regard.ops import block_masks, mask_tensors
from regard.ops.block_masks import all_keys_visible, mask_mod, planned, visible_blocks

IDS = torch.arange(420)[None] // torch.tensor([[90], [130]])
VALID = torch.arange(420)[None] >= torch.tensor([[140], [3]])


class Alternate(Mask):
    """A user's rule, which the library cannot analyse."""

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx + kv_idx) % 2 == h % 2


RULES = {
    "causal": Causal(),
    "window": Causal() & SlidingWindow(130),
    "documents": Causal() & Documents(IDS),
    "padding": Causal() & Padding(VALID),
    "prefix": Causal() | Prefix(torch.tensor([200, 7])),
    "chunks": Causal() & Chunked(128, start=torch.tensor([5, 0])),
    "not": ~Chunked(200),
    "dense": Dense(torch.rand(2, 4, 300, 420) > 0.999),
    "where": Where(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 == b),
    "always": Causal() & Where(lambda b, h, q_idx, kv_idx: True),
    "user's": Alternate(),
}
SPANS = {
    "chunk": Span(120, 420, 0, 420),
    "far": Span(120, 420, 100, 520),
    "ragged": Span.ragged(
        torch.tensor([120, 7]), queries=300, kv_start=0, kv_stop=420, bounds=(7, 120)
    ),
}


def made(mask, span):
    q, k = torch.empty(2, 4, 300, 8), torch.empty(2, 4, 420, 8)
    return prepare(q, k, k, mask=mask, span=span, backend="eager").call


def cells(call):
    """The mask written out, [B, H, L, S]."""
    return call.keep().expand(call.batch, call.num_heads, call.num_queries, call.num_keys)


def by_function(call):
    """The function at every cell."""
    index = [torch.arange(n) for n in (2, 4, call.num_queries, call.num_keys)]
    visible = mask_mod(call)
    for axis in range(4):
        index[axis] = index[axis].view([-1 if a == axis else 1 for a in range(4)])
    return visible(*index).expand(2, 4, call.num_queries, call.num_keys)


def of_plane(plane):
    """torch's own block mask of a mask written out."""
    function = lambda b, h, q, kv: plane[q, kv]  # noqa: E731  # torch counts its arguments
    return create_block_mask(function, 1, 1, *plane.shape, device="cpu")


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("most", [block_masks.CELLS, 1])
def test_blocks_and_functions_are_the_mask(rule, span, most, monkeypatch):
    """Evaluated at once, or block by block."""
    monkeypatch.setattr(block_masks, "CELLS", most)
    call = made(RULES[rule], SPANS[span])
    keep = cells(call)
    assert torch.equal(by_function(call), keep)
    some, every, keys = visible_blocks(call)
    size = block_masks.BLOCK
    for row in range(2):
        for head in range(4):
            plane = keep[row, head]
            theirs = of_plane(plane)
            mine = some[min(row, len(some) - 1), min(head, some.shape[1] - 1)]
            assert torch.equal(mine, theirs.to_dense()[0, 0].bool())
            whole = every[min(row, len(some) - 1), min(head, some.shape[1] - 1)]
            for i, j in whole.nonzero().tolist():
                block = plane[i * size : (i + 1) * size, j * size : (j + 1) * size]
                assert block.shape == (size, size)
                assert block.all()
            if theirs.full_kv_num_blocks is not None:
                assert whole.sum() == theirs.full_kv_num_blocks.sum()
    assert torch.equal(keys.expand(2, 4, 1, -1), keep.any(-2, keepdim=True))
    if all_keys_visible(call.mask, call.span):
        assert keys.all()


@pytest.mark.parametrize("seed", range(30))
def test_functions_of_random_masks(seed):
    """Against predicates that share no code with the masks."""
    case = draw_case(seed * 7)
    try:
        made = prepare(case.q, case.k, case.v, **case.given, backend="eager").call
    except ValueError:
        pytest.skip("refused")
    if 0 in (made.num_keys, made.num_queries):
        pytest.skip("no key is visible")
    sizes = (made.batch, made.num_heads, made.num_queries, made.num_keys)
    index = [
        torch.arange(n).view([-1 if a == x else 1 for a in range(4)]) for x, n in enumerate(sizes)
    ]
    first = made.span.kv_start - made.given_span.kv_start
    want = table(case)[..., first : first + made.num_keys]
    assert torch.equal(mask_mod(made)(*index).expand(sizes), want)


def test_layers_share_one_block_mask(monkeypatch):
    mask_tensors._MADE.clear()
    documents, counts = Documents(IDS), []
    real = block_masks._plan
    monkeypatch.setattr(block_masks, "_plan", lambda call: counts.append(1) or real(call))
    for _ in range(30):  # the mask of a layer and that of the call are joined anew in each layer
        first = planned(made(Causal() & documents, SPANS["chunk"]))
    assert counts == [1]
    assert planned(made(Causal() & documents, SPANS["chunk"])).blocks is first.blocks
    planned(made(Causal() & Documents(IDS.clone()), SPANS["chunk"]))
    planned(made(Causal() & documents, SPANS["far"]))
    assert len(counts) == 3
    planned(made(Causal(), SPANS["ragged"]))
    planned(made(Causal(), SPANS["ragged"]))
    assert len(counts) == 5  # starts may be written in place
    mask_tensors._MADE.clear()


def test_a_function_of_data_that_changes_is_planned_anew():
    """A user may write to what a `Where` reads; a dense mask is as large as what it would save."""
    mask_tensors._MADE.clear()
    ids = torch.zeros(420, dtype=torch.int64)
    same = Where(lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx])
    first = planned(made(Causal() & same, SPANS["chunk"])).blocks.to_dense()
    ids[200:] = 1
    assert not torch.equal(planned(made(Causal() & same, SPANS["chunk"])).blocks.to_dense(), first)
    planned(made(RULES["dense"], SPANS["chunk"]))
    planned(made(Alternate(), SPANS["chunk"]))
    assert not mask_tensors._MADE


def test_only_keys_in_reach_are_evaluated(monkeypatch):
    """Of a causal window over 64 blocks, those of each query's window."""
    seen = []
    real = block_masks._keep

    def keep(call, mask, here):
        seen.append(here.num_queries * here.num_keys)
        return real(call, mask, here)

    monkeypatch.setattr(block_masks, "_keep", keep)
    q = torch.empty(1, 1, 8192, 8)
    visible_blocks(prepare(q, q, q, mask=Causal() & SlidingWindow(1024), backend="eager").call)
    assert len(seen) == 1 + 64
    assert sum(seen) <= 9 * 64 * block_masks.BLOCK**2 + 1


def test_keys_are_known_to_be_visible_without_reading():
    square = Span(0, 1000, 0, 1000)
    assert all_keys_visible(Causal(), square)
    assert all_keys_visible(Causal() & SlidingWindow(128), square)
    assert all_keys_visible(Causal() & Chunked(256), square)
    assert not all_keys_visible(Causal() & SlidingWindow(3), square)  # some are, but not by block
    assert not all_keys_visible(Causal() & Padding(VALID[:1]), square)
    assert not all_keys_visible(Causal(), SPANS["ragged"])
