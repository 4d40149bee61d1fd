"""What must be true of masks and rotation, in sentences. The names are the specification.

A rule and its plain twin are asked about the same cells.
"""

import itertools
import random

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import regard
from cases import (
    Case,
    draw_leaf,
    draw_mask,
    draw_sizes,
    table,
)
from layers import (
    WIDTH,
    WINDOW,
    assert_same,
    inputs,
    make,
)
from regard import (
    EVERYTHING,
    Attention,
    Causal,
    Chunked,
    Documents,
    LinearScaling,
    Llama3,
    Prefix,
    Rotary,
    SlidingWindow,
    Span,
    Yarn,
)

SEEDS = st.integers(0, 10**9)
TOKENS = 11


def grid_of(mask, span: Span, batch: int, heads: int) -> Tensor:
    """The rule on every cell, spread out to [B, H, L, S]."""
    dense = mask.dense(span, batch=batch, heads=heads)
    assert dense.dtype == torch.bool
    return dense.expand(batch, heads, span.num_queries, span.num_keys)


def draw_rule(seed: int):
    """Sizes, a mask and its twin as a table."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes = draw_sizes(rng)
    mask, sees = draw_mask(rng, sizes)
    case = Case(seed, sizes, *(torch.empty(0),) * 3, sees=sees)
    return rng, sizes, mask, sees, table(case)


@given(SEEDS)
def test_a_mask_simplifies_to_its_equal(seed):
    """On its span, and again on any span inside it. Simplifying twice simplifies no further."""
    rng, s, mask, _, expected = draw_rule(seed)
    placed = mask.within(s.span())
    assert torch.equal(grid_of(placed, s.span(), s.batch, s.heads), expected)
    first = rng.randint(0, s.keys)
    last = rng.randint(first, s.keys)
    fields = vars(s.span()) | {"kv_start": s.kv_start + first, "kv_stop": s.kv_start + last}
    inner = Span(**fields)
    cut = placed.within(inner)
    assert torch.equal(grid_of(cut, inner, s.batch, s.heads), expected[..., first:last])
    assert repr(cut.within(inner)) == repr(cut)


EXACT = [
    Causal(),
    ~Causal(),
    *(SlidingWindow(n) for n in (1, 2, 4)),
    *(Chunked(n) for n in (1, 2, 3)),
    *(Prefix(n) for n in (0, 1, 3)),
    Causal() & SlidingWindow(2),
    Causal() | Prefix(2),
]


@pytest.mark.parametrize("mask", EXACT, ids=repr)
def test_a_structured_mask_simplifies_rightly_on_every_small_span(mask):
    """Off by one is found at an edge, so every edge is visited."""
    for start, queries, first, keys in itertools.product(range(5), (1, 2), range(4), range(1, 4)):
        span = Span(start, start + queries, first, first + keys)
        expected = grid_of(mask, span, 1, 1)
        placed = mask.within(span)
        assert torch.equal(grid_of(placed, span, 1, 1), expected), span
        if isinstance(mask, Causal | SlidingWindow | Prefix) and len(expected.unique()) == 1:
            assert placed == (EVERYTHING if expected.all() else regard.NOTHING), span


@given(SEEDS)
def test_no_cell_beyond_the_reach_of_a_mask_is_visible(seed):
    """`reach` is never narrower than the truth, also outside the span's own keys."""
    _, s, mask, sees, _ = draw_rule(seed)
    assume("Dense" not in repr(mask))
    low, high = mask.reach(s.span())
    for b in range(s.batch):
        for h in range(s.heads):
            for i in range(s.queries):
                for kv in range(30):
                    if sees(b, h, s.starts[b] + i, kv):
                        assert low is None or low <= kv
                        assert high is None or kv <= high


@given(SEEDS)
def test_a_mask_describes_its_cells(seed):
    """Cell by cell, in words that name the cell's fate; and calling it is asking it."""
    rng, s, mask, sees, _ = draw_rule(seed)
    assume("Dense" not in repr(mask))
    b, h = rng.randrange(s.batch), rng.randrange(s.heads)
    q, kv = rng.randint(0, s.last_slot), rng.randint(0, s.last_slot)
    assert isinstance(mask.explain(b, h, q, kv), str)
    asked = mask(*(torch.tensor(index) for index in (b, h, q, kv)))
    assert bool(asked) == bool(sees(b, h, q, kv))


@given(SEEDS)
def test_and_can_only_hide_or_can_only_show_and_not_is_the_rest(seed):
    _, s, a, _, _ = draw_rule(seed)
    b, _ = draw_leaf(random.Random(seed + 1), s)
    span = s.span()
    seen = lambda mask: grid_of(mask.within(span), span, s.batch, s.heads)  # noqa: E731
    assert torch.equal(seen(a & b), seen(a) & seen(b))
    assert torch.equal(seen(a | b), seen(a) | seen(b))
    assert torch.equal(seen(~a), ~seen(a))
    assert torch.equal(seen(~~a), seen(a))
    assert torch.equal(seen(~(a & b)), seen(~a | ~b))


STRUCTURED = {
    "causal decode": (Causal(), Span(9, 10, 0, 10), "EVERYTHING"),
    "window decode inside": (WINDOW, Span(9, 10, 7, 10), "EVERYTHING"),
    "window long enough": (Causal() & SlidingWindow(99), Span(0, 9, 0, 9), "Causal()"),
    "causal before": (Causal(), Span(0, 3, 5, 9), "NOTHING"),
    "window behind": (SlidingWindow(2), Span(9, 10, 0, 5), "NOTHING"),
    "one chunk": (Chunked(8), Span(8, 12, 8, 16), "EVERYTHING"),
    "two chunks": (Chunked(8), Span(8, 12, 0, 8), "NOTHING"),
    "prefix": (Prefix(4), Span(0, 9, 0, 4), "EVERYTHING"),
    "causal or everything": (Causal() | EVERYTHING, Span(0, 3, 0, 3), "EVERYTHING"),
    "static buffer": (Causal(), Span(0, 4, 0, 9), "Causal()"),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_masks_become_as_simple_as_they_can(name):
    """This is what lets a kernel run without a mask."""
    mask, span, expected = STRUCTURED[name]
    neutral = {"EVERYTHING": EVERYTHING, "NOTHING": regard.NOTHING, "Causal()": Causal()}
    assert mask.within(span) == neutral[expected]


def test_documents_attend_as_if_alone():
    """Packed documents, each with its own positions, are the documents one by one."""
    x, lengths = inputs(1, TOKENS), [4, 1, 6]
    ids = torch.tensor([[0] * 4 + [1] + [2] * 6])
    positions = torch.tensor([*range(4), 0, *range(6)])
    layer = make("GQA")
    with torch.no_grad():
        packed = layer(x, mask=Documents(ids), positions=positions)
        alone = torch.cat([layer(piece) for piece in x.split(lengths, 1)], 1)
    assert_same(packed, alone)


ROTARIES = {
    "halves": Rotary(8),
    "pairs": Rotary(8, pairing="pairs"),
    "partial": Rotary(4),
    "linear": Rotary(8, scaling=LinearScaling(4.0)),
    "yarn": Rotary(8, scaling=Yarn(4.0, original_max_position=64)),
    "llama3": Rotary(8, scaling=Llama3(8.0, original_max_position=64), theta=500_000.0),
}


@pytest.mark.parametrize("rope", ROTARIES)
@pytest.mark.parametrize("shift", [1, 1_000, 100_000])
def test_rotation_depends_on_distance_alone(rope, shift):
    """Scores, and not the rotated vectors, are what a shift leaves alone."""
    rope = ROTARIES[rope]
    q, k = torch.randn(2, 3, 9, 8).double(), torch.randn(2, 3, 9, 8).double()
    here, there = torch.arange(9), torch.arange(9) + shift
    turned = rope(q, k, here)
    moved = rope(q, k, there)
    assert not torch.allclose(turned[0], moved[0])
    assert_same(moved[0] @ moved[1].mT, turned[0] @ turned[1].mT, 1e-9)


@pytest.mark.parametrize("rope", ROTARIES)
def test_rotation_keeps_lengths_and_leaves_the_rest_alone(rope):
    """Up to the one factor that some scalings put on cosines and sines."""
    rope = ROTARIES[rope]
    x = torch.randn(2, 3, 9, 8).double()
    turned = rope.rotate(x, torch.arange(9))
    before = x[..., : rope.dim] * rope.attention_factor
    assert_same(turned[..., : rope.dim].norm(dim=-1), before.norm(dim=-1))
    assert_same(turned[:, :, 0, : rope.dim], before[:, :, 0])
    assert torch.equal(turned[..., rope.dim :], x[..., rope.dim :])
    by_row = rope.rotate(x, torch.arange(9).expand(2, 9))
    assert torch.equal(by_row, turned)


def test_shifted_positions_change_no_layer():
    """What holds of a rotation holds of a whole layer."""
    x = inputs(2, TOKENS)
    for name in ("MHA", "GQA", "MLA", "latent KV"):
        layer = make(name)
        moved = layer(x, positions=torch.arange(TOKENS) + 1_000)
        assert_same(moved, layer(x), 1e-9)


def test_without_rotation_and_mask_tokens_have_no_order():
    x, order = inputs(2, TOKENS), torch.randperm(TOKENS)
    layer = Attention(WIDTH, 4, num_kv_heads=2).double()
    assert_same(layer(x[:, order]), layer(x)[:, order])
