"""The tiled backend: the definition over random calls, and when it is chosen."""

import pytest
import torch

import cases
from contract import compare
from regard import (
    Causal,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
    attend,
    attend_partial,
    merge,
    prepare,
)
from regard.ops.backends import tiled
from session import LONG

pytest.importorskip("numba")

from regard.ops.kernels.launching_prefill import products
from regard.ops.kernels.vectors import machine_lanes

able = pytest.mark.skipif(products() is None, reason="no instructions for bfloat16")
wide = pytest.mark.skipif(machine_lanes() < 8, reason="no AVX2")
HALF, FULL = torch.bfloat16, torch.float32
DTYPES = [pytest.param(HALF, marks=able), pytest.param(FULL, marks=wide)]


@pytest.fixture
def any_length(monkeypatch):
    monkeypatch.setattr(tiled, "_LEAST", 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_calls_are_the_definition(any_length, dtype):
    """Masks, sinks, rows that start apart, and every order in memory."""
    accepted = 0
    for seed in range(52_000_000, 52_000_600):
        case = cases.draw_case(seed, dtype, 16)
        if not LONG and case.sizes.v_dim != 16:  # each takes seconds to compile
            continue
        try:
            out = attend(case.q, case.k, case.v, **case.given, backend="tiled")
        except ValueError as error:
            if not cases.is_objection(error, "tiled"):
                raise
            continue
        assert out.dtype == dtype
        compare(out, case, what="attend tiled")
        accepted += 1
    assert accepted > 30


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("filler", [1e30, torch.nan, torch.inf])
def test_hidden_keys_may_hold_anything(filler, dtype):
    q, k, v = (torch.randn(2, heads, 70, 16).to(dtype) for heads in (4, 2, 2))
    mask = Causal() & Padding.from_lengths([70, 40])
    clean = attend(q, k, v, mask=mask, backend="tiled")
    k[1, :, 40:], v[1, :, 40:] = filler, filler
    assert attend(q, k, v, mask=mask, backend="tiled").equal(clean)
    v[0, 0, 3, 5] = torch.inf  # a visible key may not
    assert attend(q, k, v, mask=mask, backend="tiled")[0, :2, 3:, 5].eq(torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_merge(dtype):
    q, k, v = (torch.randn(1, 4, n, 16).to(dtype) for n in (40, 100, 100))
    whole = attend(q.double(), k.double(), v.double(), mask=Causal(), span=Span(60, 100, 0, 100))
    parts = [
        attend_partial(
            q, k[:, :, a:b], v[:, :, a:b], mask=Causal(), span=Span(60, 100, a, b), backend="tiled"
        )
        for a, b in ((0, 37), (37, 100))
    ]
    merged = merge(*parts).out
    assert (merged.double() - whole).abs().max() <= cases.bound(dtype, v.abs().max().item(), 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", ["strict", "fast"])
def test_a_long_prefill_chooses_it(precision, dtype):
    q, k = torch.randn(1, 8, 600, 64).to(dtype), torch.randn(1, 2, 600, 64).to(dtype)
    assert prepare(q, k, k, mask=Causal(), precision=precision).name == "tiled"
    assert prepare(q, k, k, mask=Causal() | Prefix(99), precision=precision).name == "tiled"
    learned = q.clone().requires_grad_()
    name = prepare(learned, k, k, mask=Causal(), precision=precision).name
    assert name == "tiled"


@wide
def test_a_short_prefill_in_float32_compiles_nothing():
    q = torch.randn(1, 8, 200, 64)
    assert prepare(q, q, q, mask=Causal()).name != "tiled"


def gradients(inputs, backend, **options):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    *rows, sinks = inputs
    out = attend(*rows, sinks=sinks, backend=backend, **options)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, slope)]


def drawn(queries=70, keys=70, v_dim=32):
    shapes = (2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, v_dim), (4,)
    return [torch.randn(shape) for shape in shapes]


GRADIENTS = {
    "all": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Causal() & SlidingWindow(9)},
    "padding": {"mask": Causal() & Padding.from_lengths([70, 40])},
    "some see nothing": {"mask": Causal() & Padding(torch.arange(70) >= torch.tensor([[0], [30]]))},
    "scale": {"mask": Causal(), "scale": 1.5},
}


@wide
@pytest.mark.parametrize(("dtype", "times"), [(FULL, 5), (HALF, 3)])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_the_definition(name, dtype, times):
    """At most so many times the error of the plain implementation in the same dtype."""
    check_gradients(dtype, times, **GRADIENTS[name])


def check_gradients(dtype, times, **options):
    inputs = [x.to(dtype) for x in drawn()]
    exact = gradients([x.double() for x in inputs], "eager", **options)
    found, plain = (gradients(inputs, backend, **options) for backend in ("tiled", "eager"))
    for one, other, truth in zip(found, plain, exact, strict=True):
        assert one.dtype is dtype
        least = torch.finfo(dtype).eps * truth.abs().max()
        assert (one - truth).abs().max() <= times * (other - truth).abs().max() + least


@wide
def test_hidden_rows_may_hold_anything_and_have_no_gradient():
    """Keys that no query sees, and queries that see no key."""
    inputs, options = drawn(), GRADIENTS["some see nothing"]
    clean = gradients(inputs, "tiled", **options)
    for x in inputs[:3]:
        x[1, :, :30] = torch.nan
    found = gradients(inputs, "tiled", **options)
    for one, other in zip(found, clean, strict=True):
        assert one.equal(other)
    assert all(x[1, :, :30].eq(0).all() for x in found[:4])


@wide
def test_a_gradient_of_rows_that_see_nothing_may_be_anything():
    """As that of a mean over no tokens, which is NaN."""
    inputs, options = [x.requires_grad_() for x in drawn()], GRADIENTS["some see nothing"]
    out = attend(*inputs[:3], sinks=inputs[3], backend="tiled", **options)
    slope = torch.randn_like(out)
    slope[1, :, :30] = 0
    wanted = torch.autograd.grad(out, inputs, slope, retain_graph=True)
    slope[1, :, :30] = torch.nan
    for one, other in zip(torch.autograd.grad(out, inputs, slope), wanted, strict=True):
        assert one.equal(other)


@wide
def test_gradients_of_one_number_given_to_all():
    """A sum's gradient has no memory of its own for each element."""
    inputs = [x.requires_grad_() for x in drawn()[:3]]
    attend(*inputs, mask=Causal(), backend="tiled").sum().backward()
    torch.testing.assert_close(inputs[2].grad.sum(), torch.tensor(2.0 * 4 * 70 * 32))


@wide
def test_a_second_derivative_is_refused():
    inputs = [x.requires_grad_() for x in drawn()[:3]]
    out = attend(*inputs, backend="tiled")
    (of_q,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(ValueError, match="has no second derivative"):
        of_q.sum().backward()


@wide
def test_keys_must_not_be_written_before_the_backward_pass():
    q, k, v, _ = (x.requires_grad_() for x in drawn())
    k = k * 1
    out = attend(q, k, v, backend="tiled")
    k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@wide
def test_gradients_of_bfloat16_need_no_instructions_for_it(monkeypatch):
    """Where they are missing, the forward pass is that of float32, too."""
    objection = {FULL: None, HALF: "no instructions"}
    monkeypatch.setattr(tiled, "_machine_objection", objection.get)
    check_gradients(HALF, 3, mask=Causal())


OBJECTIONS = {
    "on a CPU": {"dtype": torch.float16},
    "many queries": {"length": 3},
    "no dropout": {"dropout": 0.1},
    "or score_bias": {"score_bias": torch.zeros(64)},
    "multiples of 16": {"width": 40},
    "positive scale": {"scale": -1.0},
    "one interval": {"mask": ~SlidingWindow(4)},
}


@pytest.mark.parametrize("words", OBJECTIONS)
def test_it_objects(words):
    given = dict(OBJECTIONS[words])
    q = torch.randn(1, 2, given.pop("length", 64), given.pop("width", 32))
    q = q.to(given.pop("dtype", HALF))
    with pytest.raises(ValueError, match=f"backend='tiled' cannot run this call: .*{words}"):
        attend(q, q, q, backend="tiled", **given)
