"""Each rule against a Python predicate that shares no code with it, cell by cell."""

import random

import pytest
import torch

from regard import (
    EVERYTHING,
    NOTHING,
    Attention,
    Causal,
    Chunked,
    Dense,
    Documents,
    Everything,
    KVCache,
    Nothing,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
    Where,
)

IDS = [[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 7, 7]]
VALID = [[0, 1, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0]]


def last(rows, b, slot):
    return rows[b][min(slot, len(rows[b]) - 1)]


RULES = {  # each rule, and whether query q may attend to key k in batch row b
    "everything": (EVERYTHING, lambda b, q, k: True),
    "nothing": (NOTHING, lambda b, q, k: False),
    "causal": (Causal(), lambda b, q, k: k <= q),
    "window": (SlidingWindow(3), lambda b, q, k: q - k < 3),
    "chunk": (Chunked(3), lambda b, q, k: q // 3 == k // 3),
    "chunk from start": (
        Chunked(4, start=torch.tensor([0, 2])),
        lambda b, q, k: (q - [0, 2][b]) // 4 == (k - [0, 2][b]) // 4,
    ),
    "prefix": (Prefix(3), lambda b, q, k: k < 3),
    "prefixes": (Prefix([1, 4]), lambda b, q, k: k < [1, 4][b]),
    "prefix from start": (
        Prefix([2, 1], start=torch.tensor([1, 3])),
        lambda b, q, k: [1, 3][b] <= k < [3, 4][b],
    ),
    "documents": (Documents(torch.tensor(IDS)), lambda b, q, k: last(IDS, b, q) == last(IDS, b, k)),
    "padding": (
        Padding(torch.tensor(VALID)),
        lambda b, q, k: bool(VALID[b][k]) if k < len(VALID[b]) else True,
    ),
    "where": (Where(lambda b, h, q, kv: (q + kv) % 2 == 0), lambda b, q, k: (q + k) % 2 == 0),
}


def combined(rng: random.Random):
    """A random expression of rules, and the same expression of predicates."""
    (a, p), (b, q), (c, r) = (RULES[rng.choice(list(RULES))] for _ in range(3))
    return rng.choice(
        [
            (a, p),
            (~a, lambda *i: not p(*i)),
            (a & b, lambda *i: p(*i) and q(*i)),
            (a | b, lambda *i: p(*i) or q(*i)),
            (a & b & c, lambda *i: p(*i) and q(*i) and r(*i)),
            (a & ~b | c, lambda *i: (p(*i) and not q(*i)) or r(*i)),
            (~(a | b) & c, lambda *i: not (p(*i) or q(*i)) and r(*i)),
        ]
    )


def random_span(rng: random.Random):
    """A span and each row's first query."""
    start, queries = rng.randint(0, 8), rng.randint(1, 4)
    kv_start = rng.randint(0, 8)
    kv_stop = kv_start + rng.randint(1, 6)
    if rng.random() < 0.3:
        starts = torch.tensor([start, start + rng.randint(0, 3)])
        return Span(starts, starts + queries, kv_start, kv_stop), starts.tolist()
    return Span(start, start + queries, kv_start, kv_stop), [start, start]


def table(predicate, starts, queries, kv_start, kv_stop):
    return torch.tensor(
        [
            [[[predicate(b, s + i, k) for k in range(kv_start, kv_stop)] for i in range(queries)]]
            for b, s in enumerate(starts)
        ]
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_mask_equals_its_predicate_before_and_after_simplification(seed):
    rng = random.Random(seed)
    for _ in range(150):
        mask, predicate = combined(rng)
        span, starts = random_span(rng)
        want = table(predicate, starts, span.num_queries, span.kv_start, span.kv_stop)
        for each in (mask, mask.within(span)):
            got = each.dense(span, batch=2)
            assert got.shape[-2:] == (span.num_queries, span.num_keys)
            assert torch.equal(got.expand_as(want), want), (mask, span)


@pytest.mark.parametrize("seed", range(20))
def test_no_visible_key_lies_outside_of_the_reach(seed):
    rng = random.Random(1000 + seed)
    for _ in range(100):
        mask, predicate = combined(rng)
        span, starts = random_span(rng)
        columns = table(predicate, starts, span.num_queries, 0, 24).any(0).any(0).any(0).nonzero()
        low, high = mask.reach(span)
        if len(columns):
            assert low is None or low <= int(columns[0]), (mask, span)
            assert high is None or high >= int(columns[-1]), (mask, span)


@pytest.mark.parametrize(
    ("mask", "span", "reach"),
    [
        (Causal(), Span(3, 5, 0, 9), (0, 4)),
        (SlidingWindow(3), Span(5, 7, 0, 9), (3, None)),
        (Causal() & SlidingWindow(3), Span(5, 7, 0, 9), (3, 6)),
        (Chunked(4), Span(5, 7, 0, 9), (4, 7)),
        (Prefix(3), Span(5, 7, 0, 9), (0, 2)),
        (Causal() | Prefix(9), Span(5, 7, 0, 9), (0, 8)),
        (NOTHING, Span(5, 7, 0, 9), (0, -1)),
    ],
)
def test_the_reach_of_a_rule_of_positions_is_exact(mask, span, reach):
    assert mask.reach(span) == reach


@pytest.mark.parametrize(
    ("mask", "span", "becomes"),
    [
        (Causal() & SlidingWindow(8192), Span(4096, 4097, 0, 4097), EVERYTHING),
        (Causal() & SlidingWindow(1024), Span(4096, 4097, 0, 4097), SlidingWindow(1024)),
        (Causal() & SlidingWindow(8192), Span(0, 512, 0, 512), Causal()),
        (Causal(), Span(0, 4, 4, 8), NOTHING),
        (~Causal(), Span(7, 8, 0, 8), NOTHING),
        (~~Causal(), Span(0, 8, 0, 8), Causal()),
        (Causal() & Causal(), Span(0, 8, 0, 8), Causal()),
        (Chunked(8), Span(8, 12, 8, 12), EVERYTHING),
        (Chunked(8), Span(8, 12, 0, 8), NOTHING),
        (Prefix(4), Span(0, 9, 0, 4), EVERYTHING),
        (Prefix(4), Span(0, 9, 4, 9), NOTHING),
        (Padding(torch.ones(2, 9).bool()), Span(0, 9, 0, 9), EVERYTHING),
        (Padding(torch.tensor([[0, 1, 1]])), Span(2, 3, 1, 3), EVERYTHING),
        (Documents(torch.tensor([[0, 0, 1]])), Span(5, 6, 2, 6), EVERYTHING),
        (Causal() | EVERYTHING, Span(0, 8, 0, 8), EVERYTHING),
    ],
    ids=repr,
)
def test_masks_simplify(mask, span, becomes):
    assert mask.within(span) == becomes


def test_a_window_counts_the_query_itself():
    visible = (Causal() & SlidingWindow(3)).dense(Span(0, 6, 0, 6)).sum(-1)
    assert visible.tolist() == [1, 2, 3, 3, 3, 3]


def test_documents_from_cumulative_lengths():
    assert Documents.from_cu_seqlens(torch.tensor([0, 2, 3])).ids.tolist() == [[0, 0, 1]]
    with pytest.raises(ValueError, match="starts at 0"):
        Documents.from_cu_seqlens(torch.tensor([1, 2]))


def test_the_start_of_padding_is_the_first_real_token():
    assert Padding(torch.tensor([[0, 0, 1], [1, 0, 1], [0, 0, 0]])).start.tolist() == [2, 0, 3]
    assert Padding.from_lengths([2, 0], total=3).valid.tolist() == [
        [True, True, False],
        [False] * 3,
    ]


def test_an_explanation_names_the_rule_that_hides_the_key():
    mask = Causal() & SlidingWindow(3)
    assert mask.explain(0, 0, 5, 1) == (
        "query 5 may not attend to key 1: "
        "SlidingWindow(size=3) hides keys 3 or more before the query (5 - 1 = 4)"
    )
    assert mask.explain(0, 0, 1, 3) == (
        "query 1 may not attend to key 3: Causal() hides keys after the query (3 > 1)"
    )
    assert mask.explain(0, 0, 3, 3) == "query 3 may attend to key 3: every rule allows it"
    for q in range(6):
        for k in range(6):
            visible = bool(mask.dense(Span(q, q + 1, k, k + 1)))
            assert ("may attend" in mask.explain(0, 0, q, k)) == visible


def test_a_drawing_has_a_line_for_each_query():
    drawn = (Causal() & SlidingWindow(2)).draw(3, 4)
    assert drawn.splitlines()[1:] == ["  0 1 2 3", "0 ■ · · ·", "1 ■ ■ · ·", "2 · ■ ■ ·"]
    assert Causal().draw(Span(9, 10, 8, 11)).splitlines()[1:] == ["   8  9 10", "9  ■  ■  ·"]
    assert Padding(torch.tensor([[1, 0], [0, 1]])).draw(1, 2, b=1).endswith("0 · ■")


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        EVERYTHING,
        NOTHING,
        Causal() & SlidingWindow(3),
        (Causal() | Prefix(2)) & Chunked(4),
        ~(Causal() & SlidingWindow(2)) | Prefix(1),
        ~Causal(),
        Causal() & ~SlidingWindow(5),
    ],
    ids=repr,
)
def test_the_repr_of_a_mask_is_the_code_that_builds_it(mask):
    names = {
        "Causal": Causal,
        "SlidingWindow": SlidingWindow,
        "Prefix": Prefix,
        "Chunked": Chunked,
        "Everything": Everything,
        "Nothing": Nothing,
    }
    assert eval(repr(mask), names) == mask
    assert hash(eval(repr(mask), names)) == hash(mask)


def test_neutral_masks_are_left_out():
    assert Causal() & EVERYTHING == Causal() == EVERYTHING & Causal()
    assert Causal() | NOTHING == Causal()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: SlidingWindow(0), ValueError, "at least 1"),
        (lambda: Chunked(0), ValueError, "at least 1"),
        (lambda: Prefix(-1), ValueError, "0 or more"),
        (lambda: Prefix(1, start=torch.zeros(1, 1)), ValueError, r"start is \[B\]"),
        (lambda: Documents(torch.zeros(2, 3)), TypeError, "integer"),
        (lambda: Documents(torch.zeros(1, 2, 3, dtype=torch.int64)), ValueError, r"\[B, S\]"),
        (lambda: Padding(torch.tensor([[0.0, -1e9]])), TypeError, "from_additive"),
        (lambda: Padding(torch.tensor([0, 2])), ValueError, "True or 1"),
        (lambda: Padding(torch.ones(1, 1, 2).bool()), ValueError, r"Dense\(keep\)"),
        (lambda: Dense(torch.zeros(3, 3)), TypeError, "from_additive"),
        (lambda: Dense(torch.ones(3, dtype=torch.bool)), ValueError, "Padding"),
        (lambda: Where(3), TypeError, "mask_mod|function"),
        (lambda: Causal() & torch.ones(2, 2), TypeError, r"Dense\(keep\)"),
        (lambda: Causal() and EVERYTHING, TypeError, "& | ~"),
        (
            lambda: Padding(torch.ones(2, 3).bool()).dense(Span(0, 1, 0, 3), batch=4),
            ValueError,
            "batch",
        ),
        (lambda: Span(3, 2, 0, 4), ValueError, "before they start"),
        (lambda: Span(0, 1, 4, 3), ValueError, "before they start"),
        (
            lambda: Span(torch.tensor([1, 2]), torch.tensor([2, 4]), 0, 4),
            ValueError,
            "same number of queries",
        ),
    ],
)
def test_errors_say_what_to_give_instead(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


def test_the_bounds_of_a_ragged_span():
    span = Span(torch.tensor([3, 1]), torch.tensor([5, 3]), 0, 5)
    assert (span.num_queries, span.first_query, span.last_query) == (2, 1, 4)
    assert span.positions().tolist() == [[3, 4], [1, 2]]


def test_a_function_with_data_for_the_present_tokens_only_decodes():
    """FlexAttention's document masks cover the documents only; the check of later keys goes on."""
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mask = Where(lambda b, h, q, k: documents[q] == documents[k])
    layer = Attention(12, 4, mask=Causal())
    x, cache = torch.randn(2, 7, 12), KVCache()
    steps = torch.cat([layer(token, mask=mask, cache=cache) for token in x.split(1, 1)], 1)
    assert torch.allclose(steps, layer(x, mask=mask), atol=1e-5)


def test_a_dense_mask_with_heads_and_a_function_decode():
    layer, cache = Attention(12, 4, mask=Causal()), KVCache()
    heads = Dense(torch.rand(1, 4, 3, 3) > 0.5) & Where(lambda b, h, q, k: q >= k)
    layer(torch.randn(2, 3, 12), mask=heads, cache=cache)
    assert cache.length == 3


@pytest.mark.parametrize(
    ("mask_mod", "message"),
    [
        (lambda b, h, q, k: q >= k if k > 1 else q == k, "and torch.where, not with and, or"),
        (lambda b, h, q, k: (q >= k) and (k > 1), "raised RuntimeError .Boolean value"),
        (lambda b, h, q, k: q >= int(k), r"takes \(b, h, q_idx, kv_idx\)"),
        (lambda q, k: q >= k, "raised TypeError .* 2 positional arguments"),
        (lambda b, h, q, k: {}["x"], "raised KeyError"),
        (
            lambda b, h, q, k: torch.ones(3, 3, dtype=torch.bool),
            r"shape \[3, 3\] .* \[1, 1, 4, 4\]",
        ),
        (lambda b, h, q, k: (q >= k)[None, None, None], "returned booleans of shape"),
        (lambda b, h, q, k: (q >= k)[..., :3], r"shape \[4, 3\]"),
    ],
)
def test_a_function_that_is_no_mask_is_a_sentence_about_it(mask_mod, message):
    with pytest.raises(ValueError, match=rf"Where\(<lambda>\) .*{message}"):
        (Causal() & Where(mask_mod)).dense(Span(0, 4, 0, 4))


def test_what_interrupts_a_function_is_not_taken_for_its_mistake():
    class Interrupted(Exception):
        """Of a dispatch mode, a signal handler or a debugger."""

    def interrupted(b, h, q, k):
        raise Interrupted

    with pytest.raises(Interrupted):
        Where(interrupted).dense(Span(0, 3, 0, 3))
