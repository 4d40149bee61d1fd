"""Masks that are typed: the same masks as Python's, and one clear error for all else."""

import contextlib
import time
from operator import and_, or_

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.masks import Everything, Not, Nothing, Span
from regard.see.grammar import LONGEST, MOST_RULES, mask_from

NUMBERS = st.integers(1, 9)
LISTS = st.lists(st.integers(0, 1), min_size=5, max_size=5)
RULES = st.one_of(  # whose repr is all of them: what builds them, and its arguments
    st.sampled_from([(make,) for make in (regard.Causal, Everything, Nothing)]),
    st.sampled_from([(lambda: regard.EVERYTHING,), (lambda: regard.NOTHING,)]),
    st.tuples(st.sampled_from([regard.SlidingWindow, regard.Chunked, regard.Prefix]), NUMBERS),
    st.tuples(st.just(regard.Prefix), st.lists(NUMBERS, min_size=1, max_size=1)),
)
TREES = st.recursive(
    RULES,
    lambda inner: st.one_of(
        st.tuples(st.just(Not), inner),
        st.tuples(st.sampled_from([and_, or_]), inner, inner),
    ),
    max_leaves=12,
)
CODE = st.recursive(  # as users write it: without sense, with spaces, with data
    st.one_of(
        st.sampled_from(["Causal()", "EVERYTHING", "NOTHING", "Nothing( )", "Causal(\n)"]),
        NUMBERS.map("SlidingWindow({})".format),
        NUMBERS.map("Chunked( size ={})".format),
        NUMBERS.map("Chunked({}, start=[2])".format),
        NUMBERS.map("Prefix(({}))".format),
        NUMBERS.map("Prefix(lengths=({},),)".format),
        LISTS.map("Padding({})".format),
        LISTS.map("Padding(valid=[{}])".format),
        LISTS.map("Documents({}, )".format),
        LISTS.map(lambda bits: f"Dense([{[bool(bit) for bit in bits]}])"),
    ),
    lambda inner: st.one_of(
        inner.map("~{}".format),
        inner.map("({})".format),
        st.tuples(inner, st.sampled_from(["&", " & ", "|", " |\t"]), inner).map("".join),
    ),
    max_leaves=8,
)


def tensors(make):
    return lambda *given, **named: make(
        *map(tensor, given), **{name: tensor(value) for name, value in named.items()}
    )


def tensor(value):
    return torch.tensor(value) if isinstance(value, list) else value


PYTHON = {
    name: tensors(getattr(regard.masks, name))
    for name in ("Causal", "SlidingWindow", "Chunked", "Documents", "Padding", "Dense", "Nothing")
} | {"Prefix": regard.Prefix, "EVERYTHING": regard.EVERYTHING, "NOTHING": regard.NOTHING}


def built(tree):
    make, *given = tree
    return make(*(built(each) if isinstance(each, tuple) else each for each in given))


@given(TREES)
def test_the_code_of_a_mask_is_read_as_the_mask(tree):
    mask = built(tree)
    assert mask_from(repr(mask)) == mask


@given(CODE)
def test_what_is_typed_is_what_python_makes_of_it(code):
    typed, made = mask_from(code), eval(code.replace("\n", "").replace("\t", ""), PYTHON)
    assert repr(typed) == repr(made)
    span = Span(0, 1, 0, 5)
    assert torch.equal(
        *(each.within(span).dense(span).broadcast_to(1, 5) for each in (typed, made))
    )


def test_the_complement_binds_tightest_then_and():
    one, two, three = regard.Causal(), regard.SlidingWindow(2), regard.Prefix(3)
    assert mask_from("~Causal() & SlidingWindow(2) | Prefix(3)") == ~one & two | three
    assert mask_from("Prefix(3) | Causal() & ~SlidingWindow(2)") == three | one & ~two
    assert mask_from("~(Causal() | Prefix(3))") == ~(one | three)


def test_rows_of_a_batch_and_heads():
    assert mask_from("Prefix([1, 2])") == regard.Prefix([1, 2])
    assert mask_from("Padding([[1, 1], [0, 1]])").start.tolist() == [0, 1]
    keep = mask_from("Dense([[[[1, 0]], [[1, 1]]]])").keep
    assert torch.equal(keep, torch.tensor([[[[True, False]], [[True, True]]]]))
    assert mask_from("Chunked(4, None)") == regard.Chunked(4)


@pytest.mark.parametrize(
    ("text", "at", "reason"),
    [
        ("", 0, "a rule, or &, | or ) is missing here"),
        ("Causal() &", 10, "a rule, or &, | or ) is missing here"),
        ("Causl()", 0, "'Causl' is no rule; the rules are"),
        ("Causal", 0, "Causal is called: Causal()"),
        ("~ Where(f)", 2, "Where(function) holds Python"),
        ("Causal() and Causal()", 0, "masks combine with &, not `and`"),
        ("not Causal()", 0, "~mask, not `not`"),
        ("Causal() SlidingWindow(4)", 9, "&, | or ) is missing here"),
        ("(Causal()", 0, "never closed"),
        ("Causal())", 8, "unmatched ')'"),
        ("Causal(3)", 0, "too many positional arguments: Causal()"),
        ("SlidingWindow", 0, "needs data: SlidingWindow(size)"),
        ("SlidingWindow()", 0, "missing a required argument: 'size'"),
        ("SlidingWindow(0)", 0, "at least 1, got 0"),
        ("SlidingWindow(-4)", 0, "at least 1, got -4"),
        ("SlidingWindow(4.5)", 14, "whole numbers"),
        ("SlidingWindow(1e3)", 14, "whole numbers"),
        ("SlidingWindow(٤)", 14, "means nothing here"),
        ("SlidingWindow(9999999999999999999)", 14, "a number is below 1,000,"),
        ("SlidingWindow('4')", 14, "means nothing here"),
        ("SlidingWindow(Causal())", 14, "data are whole numbers"),
        ("SlidingWindow(4 5)", 14, "a comma"),
        ("SlidingWindow(width=4)", 0, "'size': SlidingWindow(size)"),
        ("SlidingWindow(4, size=4)", 0, "multiple values for argument 'size'"),
        ("SlidingWindow(size=3, size=4)", 0, "given twice"),
        ("Prefix(start=[1], 2)", 19, "follows keyword argument"),
        ("Dense([[1]], place=3)", 0, "unexpected keyword argument 'place'"),
        ("Prefix([])", 0, "one number or more"),
        ("Prefix([1, [2]])", 0, "have one length"),
        ("Documents([[0, 1], [1]])", 0, "have one length"),
        ("Documents([None])", 0, "got None in it"),
        ("Documents([0, 1", 10, "never closed"),
        ("Padding([[1, 2]])", 0, "takes 0 and 1"),
        ("Dense([1, 2])", 0, "Dense takes booleans"),
        ("Padding(valid=<[2, 5] bool>)", 14, "write them out"),
        ("__import__('os').system('ls')", 11, "means nothing here"),
        ("open(0)", 0, "is no rule"),
        ("Causal().__class__", 0, "is no rule"),
        ("SlidingWindow(-[4])", 14, "whole numbers"),
        ("(lambda: Causal())()", 7, "':' means nothing here"),
        ("[Causal()][0]", 0, "is no rule"),
        ("Causal() if 1 else NOTHING", 0, "is no rule"),
        ("Causal() == Causal()", 0, "is no rule"),
        ("{**Causal()}", 0, "means nothing here"),
    ],
)
def test_a_mistake_is_pointed_at(text, at, reason):
    with pytest.raises(ValueError, match=r"\n  ") as caught:
        mask_from(text)
    sentence, line, caret = str(caught.value).rsplit("\n", 2)
    assert reason in sentence
    assert (line, caret) == (f"  {text}", f"  {' ' * at}^")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(" * 10_000, "too many nested"),
        ("~" * 10_000 + "Causal()", "too deep"),
        ("~" * 2000 + "Causal()", "too deep"),
        ("Dense(" + "[" * 10_000, "too many nested"),
        ("Causal() & " * 5000 + "Causal()", f"at most {MOST_RULES} rules"),
        ("Causal() | " * 10**5, f"at most {LONGEST:,} characters"),
        ("x" * LONGEST, "at most 60 characters"),
        ("1 if 1 else " * 8000 + "1", "too deep"),
        ("not " * 20_000 + "Causal()", "too deep"),
        ("SlidingWindow(" + "9" * 90_000 + ")", "at most 60 characters"),
        ("-" * 90_000, "too deep"),
        ("\x00\n\x1b[31m", "means nothing here"),
    ],
    ids=lambda text: text[:9],
)
def test_hostile_texts_are_refused_at_once(text, reason):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"at most|too |means nothing") as caught:
        mask_from(text)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 500
    assert str(caught.value).replace("\n", "").isprintable()
    assert time.perf_counter() - start < 1.0


@given(st.text(max_size=40))
def test_any_text_is_a_mask_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        assert isinstance(mask_from(text), regard.Mask)


@given(st.lists(st.sampled_from([*"()[],=&|~-<1.", "Causal", "Prefix", "size", "True"])))
def test_any_tokens_are_a_mask_or_a_value_error(tokens):
    test_any_text_is_a_mask_or_a_value_error.hypothesis.inner_test("".join(tokens))
