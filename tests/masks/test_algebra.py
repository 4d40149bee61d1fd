"""What all masks have: combination, the size of the dense mask, explanations."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from cases import draw_mask, draw_sizes
from interpreters import run_python
from regard import (
    EVERYTHING,
    NOTHING,
    Causal,
    Chunked,
    Dense,
    Documents,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
    Where,
)
from regard.masks import AllOf, AnyOf, Not

VALID = torch.tensor([[0, 1, 1, 1, 0, 1, 1], [1, 1, 1, 0, 0, 1, 0]])
STARTS = torch.tensor([0, 2])
MASKS = [
    EVERYTHING,
    NOTHING,
    Causal(),
    SlidingWindow(3),
    Chunked(3),
    Causal() & Chunked(2, start=STARTS),
    Causal() | Prefix(3),
    Prefix([1, 4], start=STARTS),
    Documents(VALID.cumsum(1)) & Causal(),
    Documents(VALID[0]),
    ~Padding(VALID) | Causal(),
    Causal() & Where(lambda b, h, q, kv: (q + kv + h) % 2 == 0),
    Dense(torch.eye(7).bool()[None].expand(2, 7, 7)),
]
SPAN = Span(0, 7, 0, 7)


class NoOperators(TorchDispatchMode):
    """Fails where an operator of torch is called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


@given(st.integers(0, 10**9))
def test_simplifying_and_reach_call_no_operator(seed):
    rng = random.Random(seed)
    sizes = draw_sizes(rng)
    mask, _ = draw_mask(rng, sizes)
    span = sizes.span()
    with NoOperators():
        mask.within(span).within(span)
        mask.reach(span)
        assert isinstance(mask.opaque, bool)


@given(st.integers(0, 10**9))
def test_an_explanation_says_whether_the_key_is_visible_and_which_rule_decides(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes = draw_sizes(rng)
    mask, sees = draw_mask(rng, sizes)
    span = sizes.span()
    if 0 in (span.num_queries, span.num_keys):
        return
    b, h = rng.randrange(sizes.batch), rng.randrange(sizes.heads)
    q = sizes.starts[b] + rng.randrange(span.num_queries)
    k = rng.randrange(span.kv_start, span.kv_stop)
    may = "may" if sees(b, h, q, k) else "may not"
    text = mask.within(span).explain(b, h, q, k)
    assert text.startswith(f"query {q} {may} attend to key {k}: ")
    assert text.count(" hides ") + text.count(" allows ") >= 1


def test_explanations_name_the_rules_that_decide():
    explain = lambda mask, q, k: mask.explain(0, 0, q, k).split(": ", 1)[1]  # noqa: E731
    both, either = Causal() & SlidingWindow(2), Causal() | Prefix(2)
    assert explain(Causal(), 3, 1) == "Causal() allows it"
    assert explain(both, 1, 0) == "every rule allows it"
    assert explain(both, 3, 1) == "SlidingWindow(size=2) hides keys 2 or more before the query " + (
        "(3 - 1 = 2)"
    )
    assert explain(both & Prefix(1), 3, 1).split("; ") == [
        "SlidingWindow(size=2) hides keys 2 or more before the query (3 - 1 = 2)",
        "Prefix(lengths=1) hides keys outside the prefix (0 <= key < 1)",
    ]
    assert explain(either, 0, 1) == "Prefix(lengths=2) allows it"
    assert explain(either, 0, 2) == (
        "no rule allows it: Causal() hides keys after the query (2 > 0); "
        "Prefix(lengths=2) hides keys outside the prefix (0 <= key < 2)"
    )
    assert explain(~Causal(), 0, 2) == (
        "~Causal() allows it, as Causal() hides keys after the query (2 > 0)"
    )
    assert explain(~Causal(), 2, 0) == "~Causal() hides it, as Causal() allows it"
    assert explain(NOTHING, 2, 0) == "Nothing() hides everything"


@pytest.mark.parametrize(("b", "h"), [(2, 0), (-1, 0), (0, 3), (0, -1)])
def test_explain_refuses_rows_and_heads_without_data(b, h):
    mask = Causal() & Dense(torch.ones(2, 3, 4, 4, dtype=torch.bool))
    name, last, given = ("b", 1, b) if h == 0 else ("h", 2, h)
    with pytest.raises(ValueError, match=rf"^{name} is 0 to {last} in .*Dense.*, got {given}$"):
        mask.explain(b, h, 1, 1)
    assert Causal().explain(9, 9, 1, 1).endswith("Causal() allows it")
    assert Dense(torch.ones(1, 1, 4, 4, dtype=torch.bool)).explain(9, 9, 1, 1)


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (EVERYTHING, (7, 7)),
        (Causal() & SlidingWindow(2) | Prefix(2), (7, 7)),
        (Padding(VALID[:1]), (7, 7)),
        (Padding(VALID), (2, 1, 7, 7)),
        (Padding(VALID) & Causal(), (2, 1, 7, 7)),
        (Where(lambda b, h, q, kv: kv <= q + h), (1, 3, 7, 7)),
        (Where(lambda b, h, q, kv: h > 0), (1, 3, 7, 7)),
        (Where(lambda b, h, q, kv: True), (7, 7)),
        (Dense(torch.ones(2, 7, 7).bool()), (2, 1, 7, 7)),
        (Dense(torch.ones(1, 3, 1, 7).bool()), (1, 3, 7, 7)),
    ],
)
def test_a_dense_mask_has_no_axis_that_the_rule_does_not_need(mask, shape):
    assert mask.dense(SPAN, batch=2, heads=3).shape == shape
    inner = Span(0, 7, 2, 4)
    assert mask.within(SPAN).within(inner).dense(inner, batch=2, heads=3).shape == (*shape[:-1], 2)


def test_dense_padding_stores_one_row_for_all_queries():
    assert Padding(VALID).dense(SPAN, batch=2).stride(-2) == 0


def test_a_dense_mask_of_a_ragged_span_has_a_batch_axis():
    span = Span.ragged(STARTS, queries=2, kv_start=0, kv_stop=5, bounds=(0, 2))
    visible = Causal().dense(span, batch=2)
    assert visible.shape == (2, 1, 2, 5)
    assert visible.sum(-1).flatten(1).tolist() == [[1, 2], [3, 4]]


def test_sizes_that_do_not_fit_are_refused():
    heads = Dense(torch.ones(1, 2, 7, 7).bool())
    with pytest.raises(ValueError, match=r"heads=2, the call has heads=3"):
        (heads & Causal()).dense(SPAN, heads=3)
    with pytest.raises(ValueError, match=r"different sizes, batch=\[2, 3\]"):
        (Padding(VALID) & ~Padding(VALID[[0, 0, 0]])).dense(SPAN, batch=2)
    assert (Padding(VALID) & Padding(VALID[:1])).batch == 2
    assert (Padding(VALID[:1]) | Causal()).batch == 1
    assert Causal().batch is Causal().heads is None
    assert (~heads).heads == 2


def test_a_dense_mask_hides_all_keys_outside_of_it():
    """For spans that contain it, overlap it, or lie beside it."""
    dense = Dense(torch.rand(2, 3) < 0.7)
    for mask, (top, left) in ((dense, (0, 0)), (dense.within(Span(4, 6, 3, 6)), (4, 3))):
        whole = torch.zeros(9, 9).bool()
        whole[top : top + 2, left : left + 3] = dense.keep
        for a, c in itertools.product(range(8), range(8)):
            for b, d in itertools.product(range(a + 1, 9), range(c + 1, 9)):
                assert torch.equal(mask.dense(Span(a, b, c, d)), whole[a:b, c:d])


def test_a_part_of_a_dense_mask_is_a_view():
    keep = torch.rand(2, 2, 4, 6) < 0.5
    mask = Dense(keep).within(Span(3, 7, 2, 8))
    inner = mask.dense(Span(4, 6, 3, 5), batch=2, heads=2)
    assert torch.equal(inner, keep[..., 1:3, 1:3])
    assert inner.untyped_storage().data_ptr() == keep.untyped_storage().data_ptr()


def test_a_dense_mask_of_ragged_rows_is_placed_row_by_row():
    keep = torch.rand(2, 1, 3, 6) < 0.5
    span = Span.ragged(STARTS, queries=3, kv_start=1, kv_stop=7, bounds=(0, 2))
    mask = Dense(keep).within(span)
    assert torch.equal(mask.dense(span, batch=2), keep)
    b = torch.arange(2).view(2, 1, 1, 1)
    q, kv = span.positions()[:, None, :, None], torch.arange(1, 7)
    assert torch.equal(mask(b, torch.zeros(1, 1, 1).long(), q, kv), keep)


def test_values_are_equal_by_value_and_tensors_by_identity():
    assert Causal() & SlidingWindow(2) == Causal() & SlidingWindow(2) != Causal() & SlidingWindow(3)
    assert Chunked(2) == Chunked(2) != Chunked(3)
    assert Chunked(2, start=STARTS) == Chunked(2, start=STARTS) != Chunked(2, start=STARTS.clone())
    padding, keep = Padding(VALID), torch.ones(7, 7).bool()
    assert padding & Causal() == padding & Causal() != Padding(VALID) & Causal()
    assert Dense(keep).within(SPAN) == Dense(keep).within(SPAN) != Dense(keep)
    assert len({hash(Dense(keep)), hash(Dense(keep).within(SPAN))}) == 1
    assert len({Causal(), Causal(), ~Causal(), ~Causal(), padding, padding}) == 3


def test_equal_parts_are_kept_once_and_nested_ones_are_unpacked():
    a, b, c = Causal(), SlidingWindow(2), Prefix(3)
    assert a & a == a == a | a
    assert ((a & b) & (b & c)).parts == (a, b, c)
    assert ((a | b) | (b | c)).parts == (a, b, c)
    assert (a & (b | c)).parts == (a, b | c)


def test_rules_that_cannot_be_analysed_are_opaque():
    some = Where(lambda b, h, q, kv: kv == q)
    assert some.opaque
    assert (~Causal()).opaque
    assert (Causal() & some).opaque
    assert (Causal() | ~Prefix(2)).opaque
    assert not (Causal() & SlidingWindow(2) | Padding(VALID)).opaque


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_a_mask_is_a_mask_mod_of_flex_attention(mask):
    dense = mask.dense(SPAN, batch=2, heads=3).expand(2, 3, 7, 7)
    assert torch.equal(create_mask(mask, 2, 3, 7, 7, device="cpu"), dense)


def test_masks_go_through_compile_and_export():
    """In another process, because jaxtyping's checks can neither be traced nor take symbols."""
    script = Path(__file__).parents[1] / "support/traced_masks.py"
    done = run_python(script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: torch.ones(2, 2).bool() | Causal(), TypeError, r"Dense\(keep\)"),
        (lambda: AllOf(()), ValueError, "EVERYTHING hides nothing"),
        (lambda: AnyOf(()), ValueError, "NOTHING hides every key"),
        (lambda: AllOf((Causal(), torch.ones(2))), TypeError, "got Tensor|Type-check"),
        (lambda: not Causal(), TypeError, "neither true nor false"),
        (lambda: Where(torch.ones(2)), TypeError, r"Dense\(keep\)|Type-check"),
        (lambda: Where(lambda b, h, q, kv: q - kv).dense(SPAN), TypeError, "score_bias"),
        (lambda: Dense.from_additive(torch.ones(2, 2).bool()), TypeError, r"Dense\(keep\)"),
        (lambda: Dense(torch.ones(2, 2).long()), TypeError, "from_additive.*Padding"),
        (lambda: Dense(torch.ones(2, 2, 2, 2, 2).bool()), ValueError, r"\[B, H, L, S\]"),
        (lambda: Dense(torch.ones(2, 4).bool()).within(SPAN), ValueError, r"\[7, 7\].*\[2, 4\]"),
    ],
)
def test_errors_of_combination_say_what_to_write_instead(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


def test_not_of_not_simplifies_to_the_mask():
    assert (~~Causal()).within(SPAN) == Causal()
    assert (~NOTHING).within(SPAN) == EVERYTHING
    assert repr(~(Causal() & SlidingWindow(2))) == "~(Causal() & SlidingWindow(size=2))"
    assert isinstance(~Causal(), Not)
