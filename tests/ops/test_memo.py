"""Calls that repeat another one, or that of the step before, are described as if they were new."""

import gc
import inspect
import weakref
from dataclasses import fields

import numpy as np
import pytest
import torch

import regard.ops.memo as memo
from regard import (
    Alibi,
    Causal,
    Dense,
    KVCache,
    Padding,
    Part,
    Prefix,
    RelativeBias,
    SlidingWindow,
    Span,
    Where,
    attend,
    prepare,
)
from regard.masks import EVERYTHING
from regard.ops.choose import rounded
from regard.ops.observed import backends_run
from regard.rates import SPEED


@pytest.fixture(autouse=True)
def nothing_before():
    memo._ENTRIES.clear()


def heads(rows=1, keys=6, dtype=torch.float32):
    q = torch.randn(1, 4, rows, 16, dtype=dtype)
    return q, *(torch.randn(1, 2, keys, 16, dtype=dtype) for _ in range(2))


def as_if_new(*given, **options):
    before, memo._ENTRIES = memo._ENTRIES, {}
    try:
        return prepare(*given, **options)
    finally:
        memo._ENTRIES = before


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
    {"mask": Causal()},
    {"mask": Causal(), "span": Span(2, 3, 0, 6)},
    {"mask": Causal() & SlidingWindow(3)},
    {"mask": Causal() & SlidingWindow(4)},
    {"mask": Dense(torch.tensor([[True, False, True, True, False, True]]))},
    {"sinks": torch.zeros(4)},
    {"score_bias": torch.ones(6)},
    {"score_bias": torch.ones(6, requires_grad=True)},
    {"score_bias": Alibi([0.1, 0.2, 0.3, 0.4])},
    {"score_bias": RelativeBias(4)},
    {"mask": Padding(torch.tensor([[False, True, True, True, True, True]]))},
    {"mask": ~Causal()},
    {"mask": Causal() | Prefix(2), "span": Span(2, 3, 0, 6)},
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("other", OTHERS, ids=lambda each: "-".join(each))
def test_every_option_is_that_of_the_call(other, grad):
    with torch.set_grad_enabled(grad):
        check_options_of(other)


def check_options_of(other):
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
        same(again, mine)  # the next layer
        assert again.choices is mine.choices
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


def test_gradients_are_wanted_of_what_requires_them():
    q, k, v = heads()
    with torch.no_grad():
        prepare(q, k, v, **BASE)
    assert not prepare(q, k, v, **BASE).call.needs_grad
    assert prepare(q.requires_grad_(), k, v, **BASE).call.needs_grad
    with torch.no_grad():
        assert not prepare(q, k, v, **BASE).call.needs_grad


VALUES = {"mask": [Causal(), EVERYTHING], "span": [None, Span(0, 6, 0, 6)], "scale": [None, 0.5],
          "score_bias": [None, torch.zeros(6)], "softcap": [None, 9.0], "dropout": [0.0, 0.1],
          "sinks": [None, torch.zeros(4)], "backend": ["auto", "eager"], "partial": [False, True],
          "precision": ["strict", "fast"]}  # fmt: skip


def test_every_parameter_of_a_call_is_in_its_key():
    """A parameter that is added to `prepare` has to be added to `VALUES`, and to be told apart."""
    names = list(inspect.signature(prepare).parameters)
    assert set(names) == {*memo.Arguments._fields}
    assert set(names) - {"q", "k", "v"} == set(VALUES)
    tensors = heads(6)
    first = memo.Arguments(*tensors, **{name: values[0] for name, values in VALUES.items()})
    keys = [memo.key_of(first)]
    keys += [memo.key_of(first._replace(**{name: VALUES[name][1]})) for name in VALUES]
    for index, x in enumerate(tensors):
        for other in (x.double(), x.clone().requires_grad_(), torch.cat([x, x], 1), x[..., :8]):
            name = names[index]
            keys.append(memo.key_of(first._replace(**{name: other})))
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_what_a_key_cannot_hold_is_described_anew():
    q, k, v = heads(6)
    whole = {"mask": Where(lambda b, h, q, k: q >= k)}, {"mask": Causal(), "scale": np.float64(2)}
    for options in whole:
        assert prepare(q, k, v, **options) is not prepare(q, k, v, **options)
    assert not memo._ENTRIES


@pytest.mark.parametrize("given", ["mask", "score_bias", "sinks"])
def test_no_tensor_stays_alive(given):
    q, k, v = heads(6)
    tensors = {"mask": torch.tensor([[False, True, True, True, True, True]]),
               "score_bias": torch.zeros(6), "sinks": torch.zeros(4)}  # fmt: skip
    value = tensors[given]
    options = {given: Padding(value) if given == "mask" else value}
    copy = options["mask"].valid if given == "mask" else value
    for _ in range(2):
        attend(q, k, v, **options)
    assert memo._ENTRIES
    alive = [weakref.ref(x) for x in (q, value, copy)]
    del q, k, v, value, copy, options, tensors
    gc.collect()
    assert [each() for each in alive] == [None, None, None]


def test_the_rules_and_tensors_of_a_description_are_those_of_the_call():
    q, k, v = heads(6)
    valid = torch.tensor([[False, True, True, True, True, True]])
    for _ in range(3):
        mask, sinks, bias = Causal() & Padding(valid), torch.randn(4), torch.randn(6)
        call = prepare(q, k, v, mask=mask, sinks=sinks, score_bias=bias).call
        assert call.given_mask is mask and call.mask.parts[1] is mask.parts[1]
        assert call.sinks is sinks and call.score_bias is bias
    past = prepare(q[:, :, :1], k, v, mask=mask, span=Span(5, 6, 0, 6)).call
    again = prepare(q[:, :, :1], k, v, mask=mask, span=Span(5, 6, 0, 6)).call
    assert past.mask is again.mask is mask.parts[1]


def test_padding_is_memoised_while_the_mask_lives():
    q, k, v = heads(6)
    padding = Padding(torch.tensor([[False, True, True, True, True, True]]))
    prepare(q, k, v, mask=Causal() & padding)
    count = len(memo._ENTRIES)
    prepare(q, k, v, mask=Causal() & padding)
    assert len(memo._ENTRIES) == count == 1
    prepare(q, k, v, mask=Causal() & Padding(torch.ones(1, 6, dtype=torch.bool)))
    assert len(memo._ENTRIES) == 2


def test_a_mask_whose_tensor_was_written_is_refused_after_a_right_call():
    q, k, v = heads(6)
    valid = torch.tensor([[False, True, True, True, True, True]])
    mask = Causal() & Padding(valid)
    prepare(q, k, v, mask=mask)
    valid[0, 1] = False
    with pytest.raises(ValueError, match="written in place"):
        prepare(q, k, v, mask=mask)


def test_the_precision_of_products_is_in_the_key():
    q, k, v = heads(6)
    first = prepare(q, k, v)
    torch.set_float32_matmul_precision("high")
    try:
        assert prepare(q, k, v) is not first
    finally:
        torch.set_float32_matmul_precision("highest")
    assert prepare(q, k, v) is first


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
        0, 16, 16, 16, 32, 32, 32, 48, 112, 4096, 4608]  # fmt: skip


@torch.no_grad()
def test_a_short_cache_that_grows_is_described_once_in_16_steps(monkeypatch):
    described, describe = [], memo._describe

    def counted(given):
        described.append(given)
        return describe(given)

    monkeypatch.setattr(memo, "_describe", counted)
    monkeypatch.setattr(memo, "_ENTRIES", {})
    for past in range(32):
        q, k, v = (torch.randn(1, 2, n, 4) for n in (1, past + 1, past + 1))
        attend(q, k, v, mask=Causal(), span=Span(past, past + 1, 0, past + 1))
    assert len(described) == 2
