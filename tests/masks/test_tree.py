"""Trees of draft tokens, against loops that walk from a token to its root."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

import oracle
from regard import (
    EVERYTHING,
    Attention,
    Causal,
    KVCache,
    MultiHeadLatentAttention,
    Padding,
    PagedCache,
    PagePool,
    Prefix,
    Rotary,
    SlidingWindow,
    Span,
    StaticCache,
    Tree,
    attend,
)
from regard.masks.row_data import row_masks

# 0 and 1 begin; 2, 3 continue 0; 4 continues 1; 5 continues 2; 6 continues 5
PARENTS = [-1, -1, 0, 0, 1, 2, 5]
N, PAST = len(PARENTS), 5
PATHS = [[0, 2, 5, 6], [0, 3], [1, 4]]
CALL = Span(PAST, PAST + N, 0, PAST + N)
CHAIN = list(range(-1, N - 1))


def sees(parents, start, query, key):
    """Whether a path upwards from the query's token meets the key's."""
    if key < start:
        return True
    place, wanted = query - start, key - start
    if not 0 <= place < len(parents):
        return False
    while place != wanted and place != -1:
        place = parents[place]
    return place == wanted


def dense(mask, span, batch=1):
    """[L, S] or [B, L, S]."""
    keep = mask.dense(span, batch=batch).expand(batch, 1, span.num_queries, span.num_keys)
    return keep[:, 0].squeeze(0)


def drawn(seed):
    rng = random.Random(seed)
    return [rng.randint(max(-1, place - 4), place - 1) for place in range(rng.randint(1, 9))]


def cells(parents, start, span):
    queries, keys = range(span.q_start, span.q_stop), range(span.kv_start, span.kv_stop)
    return torch.tensor([[sees(parents, start, q, k) for k in keys] for q in queries])


@pytest.mark.parametrize("seed", range(20))
def test_a_token_sees_itself_its_ancestors_and_the_keys_before_the_tree(seed):
    parents = drawn(seed)
    past, size = seed % 4, len(parents)
    span = Span(past, past + size, 0, past + size)
    tree = Tree(torch.tensor(parents))
    placed = tree.within(span)
    assert torch.equal(
        placed.dense(span).expand(1, 1, size, past + size)[0, 0], cells(parents, past, span)
    )
    wide = Span(0, past + size + 2, 0, past + size + 2)  # and slots outside of the tree
    if placed == EVERYTHING:
        return
    assert torch.equal(
        placed.dense(wide).expand(1, 1, *2 * [wide.num_keys])[0, 0], cells(parents, past, wide)
    )
    for first, last in itertools.combinations_with_replacement(range(wide.num_keys), 2):
        some, every, _ = placed.runs(first, last)
        here = cells(parents, past, wide)[first : last + 1]
        for key in range(wide.num_keys):
            assert any(low <= key < high for low, high in some) == here[:, key].any()
            assert any(low <= key < high for low, high in every) == here[:, key].all()


def test_rows_have_trees_of_their_own():
    both = torch.tensor([PARENTS, CHAIN])
    placed = Tree(both).within(CALL)
    for row, mask in enumerate(row_masks(placed, 2)):
        keep = dense(placed, CALL, 2)[row]
        assert torch.equal(keep, cells(both[row].tolist(), PAST, CALL))
        assert torch.equal(
            mask.dense(CALL)[0, 0] if mask.dense(CALL).dim() == 4 else mask.dense(CALL), keep
        )
    assert Tree(both).depths.tolist() == [[0, 0, 1, 1, 1, 2, 3], list(range(N))]


def test_a_tree_begins_where_the_tokens_of_its_row_end():
    starts = torch.tensor([3, 5])
    span = Span.ragged(starts, queries=N, kv_start=0, kv_stop=5 + N, bounds=(3, 5))
    keep = (Causal() & Tree(torch.tensor(PARENTS))).within(span).dense(span, batch=2)
    for row, start in enumerate((3, 5)):
        own = Span(start, start + N, 0, 5 + N)
        assert torch.equal(keep[row, 0], cells(PARENTS, start, own))
    placed = Tree(torch.tensor(PARENTS)).within(span)
    assert placed.reach(span) == (0, 5 + N - 1)  # the last token of the longer row sees its own key
    assert placed.runs(0, 2) == placed.runs(0, 4)  # queries before the trees see all keys before
    assert placed.within(replace(span, kv_stop=3)) == EVERYTHING


def test_what_is_known_of_a_tree_simplifies_it():
    tree = Tree(torch.tensor(PARENTS)).within(CALL)
    assert tree.within(Span(PAST, PAST + N, 0, PAST)) == EVERYTHING
    assert repr(tree.within(Span(PAST, PAST + 2, PAST + 2, PAST + N))) == "Nothing()"
    chain = Tree(torch.tensor(CHAIN)).within(CALL)
    assert torch.equal(chain.dense(CALL), Causal().dense(CALL).expand_as(chain.dense(CALL)))
    assert tree.reach(CALL) == (0, PAST + N - 1)
    assert (
        Tree(torch.tensor(PARENTS)).reach(Span(PAST, PAST + N, 0, PAST + N + 9))[1] == PAST + N - 1
    )
    assert Tree(torch.tensor([], dtype=torch.long)).within(CALL).dense(CALL).sum() == 12 * N


@pytest.mark.parametrize(
    ("mask", "twin"),
    [
        (lambda tree: Causal() & tree, lambda q, k, seen: seen and k <= q),
        (lambda tree: tree & SlidingWindow(6), lambda q, k, seen: seen and k > q - 6),
        (
            lambda tree: (tree & ~Prefix(2)) | Prefix(1),
            lambda q, k, seen: (seen and k > 1) or k < 1,
        ),
        (
            lambda tree: tree & Padding(torch.arange(N + PAST) > 2),
            lambda q, k, seen: seen and k > 2,
        ),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "sdpa", "blocked", "flex"])
def test_combinations_are_attended_as_by_loops(mask, twin, backend):
    q, k = torch.randn(2, 4, N, 8), torch.randn(2, 2, PAST + N, 8)
    want = oracle.attention(
        q.tolist(),
        k.tolist(),
        k.tolist(),
        visible=lambda b, h, i, j: twin(PAST + i, j, sees(PARENTS, PAST, PAST + i, j)),
    )
    given = mask(Tree(torch.tensor(PARENTS)))
    with torch.no_grad():
        out = attend(q, k, k, mask=given, span=CALL, backend=backend)
    assert torch.allclose(out, torch.tensor(want.out), atol=1e-5)


def layers():
    yield Attention(32, 4, num_kv_heads=2, rope=Rotary(8), mask=Causal())
    yield Attention(32, 4, mask=Causal())
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    yield MultiHeadLatentAttention(32, 4, **sizes, rope=Rotary(4), mask=Causal())


CACHES = {
    "growing": KVCache,
    "fixed": lambda: StaticCache(32),
    "pages": lambda: PagedCache(PagePool(32, page_size=4)),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("layer", [*layers()], ids=lambda layer: layer.kind)
def test_each_path_is_as_if_decoded_alone(layer, cache):
    """With the positions of the paths' tokens: drafts of the same depth have the same."""
    layer, prompt, drafts = layer.double(), *torch.randn(2, 2, N, 32).double().unbind()
    tree, held = Tree(torch.tensor(PARENTS)), CACHES[cache]()
    with torch.no_grad():
        layer(prompt, cache=held)
        out = layer(drafts, mask=tree, cache=held, positions=N + tree.depths.expand(2, -1))
        for path in PATHS:
            alone = CACHES[cache]()
            layer(prompt, cache=alone)
            steps = [layer(drafts[:, place, None], cache=alone) for place in path]
            assert torch.allclose(out[:, path], torch.cat(steps, 1), atol=1e-12)


def test_a_tree_may_be_drafted_depth_by_depth():
    """A draft model computes the tokens of one depth in a call, and the cache holds the earlier."""
    layer, x = Attention(32, 4, mask=Causal()).double(), torch.randn(1, PAST + N, 32).double()
    whole, steps = KVCache(), KVCache()
    with torch.no_grad():
        layer(x[:, :PAST], cache=whole), layer(x[:, :PAST], cache=steps)
        want = layer(x[:, PAST:], mask=Tree(torch.tensor(PARENTS)), cache=whole)
        found = [
            layer(x[:, PAST + a : PAST + b], mask=Tree(torch.tensor(PARENTS[:b])), cache=steps)
            for a, b in itertools.pairwise([0, 2, 5, 6, 7])
        ]
    assert torch.allclose(torch.cat(found, 1), want, atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: Tree(torch.tensor([-1, 1])), ValueError, r"earlier token.*\[\[-1, 1\]\]"),
        (lambda: Tree(torch.tensor([-2])), ValueError, "or -1"),
        (lambda: Tree(torch.tensor([0.0])), TypeError, "float32"),
        (lambda: Tree(torch.zeros(1, 1, 1).long()), ValueError, r"\[B, S\]|\[1, 1, 1\]"),
        (lambda: Tree(torch.tensor([-1, 0])).within(Span(0, 1, 0, 1)), ValueError, "slot 0"),
    ],
)
def test_errors_say_what_a_tree_is(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


def test_a_parent_that_is_written_later_is_refused():
    parents = torch.tensor([-1, 0])
    tree = Tree(parents)
    parents[1] = -1
    with pytest.raises(ValueError, match="written in place"):
        tree.within(Span(0, 2, 0, 2))


def test_a_tree_says_why_a_key_is_hidden():
    tree = Tree(torch.tensor(PARENTS)).within(CALL)
    assert tree.explain(0, 0, PAST + 4, PAST).endswith("hides tokens that are not its ancestors")
