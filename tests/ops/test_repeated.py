"""Calls that repeat another one, or that of the step before, are described as if they were new."""

from dataclasses import fields

import pytest
import torch

import regard.ops.repeated as repeated
from regard import Causal, Dense, KVCache, Padding, Part, SlidingWindow, Span, attend, prepare
from regard.masks import EVERYTHING
from regard.ops.choose import rounded
from regard.ops.observed import backends_run
from regard.ops.rates import SPEED


@pytest.fixture(autouse=True)
def nothing_before():
    repeated._latest = None


def heads(rows=1, keys=6, dtype=torch.float32):
    q = torch.randn(1, 4, rows, 16, dtype=dtype)
    return q, *(torch.randn(1, 2, keys, 16, dtype=dtype) for _ in range(2))


def as_if_new(*given, **options):
    before, repeated._latest = repeated._latest, None
    try:
        return prepare(*given, **options)
    finally:
        repeated._latest = before


def same(mine, theirs):
    """Two descriptions are equal; masks are compared by what they are."""
    assert mine.name == theirs.name
    for field in fields(mine.call):
        one, other = (getattr(each.call, field.name) for each in (mine, theirs))
        assert one is other or one == other, field.name


BASE = {"mask": EVERYTHING, "span": Span(5, 6, 0, 6), "score_bias": None, "scale": 0.25,
        "softcap": None, "sinks": None, "dropout": 0.0, "precision": "strict"}  # fmt: skip
OTHERS = [
    {"scale": 0.5},
    {"softcap": 3.0},
    {"precision": "fast"},
    {"dropout": 0.5},
    {"backend": "eager"},
    {"partial": True},
    {"bits": 8},
    {"mask": Causal()},
    {"mask": Causal(), "span": Span(2, 3, 0, 6)},
    {"mask": Causal() & SlidingWindow(3)},
    {"mask": Causal() & SlidingWindow(4)},
    {"mask": Dense(torch.tensor([[True, False, True, True, False, True]]))},
    {"sinks": torch.zeros(4)},
    {"score_bias": torch.ones(6)},
]


@torch.no_grad()
@pytest.mark.parametrize("other", OTHERS, ids=lambda each: "-".join(each))
def test_every_option_is_that_of_the_call(other):
    given = heads()
    for options in (BASE, {**BASE, **other}, {**BASE, **other}, BASE):
        same(prepare(*given, **options), as_if_new(*given, **options))


@torch.no_grad()
def test_calls_without_a_span():
    square, wide = heads(6), heads(1)
    for given, mask in ((square, Causal()), (wide, EVERYTHING), (square, EVERYTHING)):
        first = prepare(*given, mask=mask)
        same(first, as_if_new(*given, mask=mask))
        assert prepare(*given, mask=mask) is first
        with pytest.raises(ValueError, match="needs to know where"):
            prepare(*wide, mask=Causal())
    span = Span(3, 9, 3, 9)
    same(prepare(*square, mask=Causal(), span=span), as_if_new(*square, mask=Causal(), span=span))
    same(prepare(*square, mask=Causal()), as_if_new(*square, mask=Causal()))


@torch.no_grad()
@pytest.mark.parametrize("mask", [EVERYTHING, Causal(), Causal() & SlidingWindow(5)], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_steps_of_a_growing_cache(mask, rows):
    cache = KVCache()
    for step in range(40):
        given = heads(rows, rows, torch.bfloat16 if step >= 30 else torch.float32)
        if step == 30:
            cache = KVCache()
        span = cache.span(rows)
        mine = prepare(*given, mask=mask, span=span)
        same(mine, as_if_new(*given, mask=mask, span=span))
        again = prepare(*given, mask=mask, span=span)
        assert again is mine  # the next layer
        cache.update(*given[1:])


@torch.no_grad()
@pytest.mark.parametrize(
    "span", [Span(3, 4, 0, 6), Span(6, 7, 2, 7), Span(0, 1, 0, 0), Span(9, 10, 0, 10)], ids=str
)
def test_a_step_that_hides_keys_or_has_none_is_described_anew(span):
    given = heads(keys=max(1, span.num_keys))
    prepare(*given, mask=Causal(), span=Span(5, 6, 0, 6))
    mine = prepare(*given, mask=Causal(), span=span)
    same(mine, as_if_new(*given, mask=Causal(), span=span))


@torch.no_grad()
@pytest.mark.usefixtures("unchecked")  # users have no such checks: they get our own errors
def test_what_a_call_is_refused_for_is_refused_after_a_right_one():
    q, k, v = heads()
    prepare(q, k, v, **BASE)
    with pytest.raises(ValueError, match="not a multiple"):
        prepare(q[:, :3], k, v, **BASE)
    with pytest.raises(ValueError, match="dtype"):
        prepare(q, k.double(), v, **BASE)
    for number in (torch.tensor(0.25), torch.tensor([0.25, 0.25])):
        with pytest.raises(TypeError, match="scale is a number, got a tensor"):
            prepare(q, k, v, **{**BASE, "scale": number})
    with pytest.raises(ValueError, match="holds 2"):
        prepare(q, k, v, **{**BASE, "span": Span(4, 6, 0, 6)})


@torch.no_grad()
def test_backends_of_other_functions_count_and_new_rates_choose():
    given = heads()
    prepare(*given, **BASE)
    with backends_run() as ran:
        prepare(*given, **BASE).run(given[0], [Part(0, 6, given[1:])])
    assert ran.total() == 1
    first = prepare(*given, **BASE)
    SPEED.use(SPEED.now())
    assert prepare(*given, **BASE) is not first


def test_gradients_and_data_are_not_memoised():
    q, k, v = heads()
    with torch.no_grad():
        prepare(q, k, v, **BASE)
    assert prepare(q.requires_grad_(), k, v, **BASE).call.needs_grad
    with torch.no_grad():
        padding = Padding(torch.ones(1, 6, dtype=torch.bool))
        first = prepare(q, k, v, mask=padding)
        assert prepare(q, k, v, mask=padding) is not first


@torch.no_grad()
def test_threads_with_different_calls_do_not_disturb_each_other():
    from concurrent.futures import ThreadPoolExecutor

    def work(number):
        q, k, v = heads(keys=3 + number)
        for _ in range(200):
            span = Span(2 + number, 3 + number, 0, 3 + number)
            out = attend(q, k, v, mask=Causal(), span=span, scale=0.1 * (1 + number))
            call = prepare(q, k, v, mask=Causal(), span=span, scale=0.1 * (1 + number)).call
            assert (call.num_keys, call.scale) == (3 + number, 0.1 * (1 + number))
        return out

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_rounding_up_to_four_digits():
    assert [rounded(n) for n in (0, 1, 15, 16, 17, 31, 32, 33, 100, 4095, 4097)] == [
        0, 1, 15, 16, 18, 32, 32, 36, 104, 4096, 4608]  # fmt: skip
