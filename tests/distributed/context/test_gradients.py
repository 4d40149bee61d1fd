"""The backward pass of rectangles, given the output and the log-sum-exp over all keys."""

import math
from importlib.util import find_spec

import pytest
import torch

from regard import Causal, Documents, Padding, SlidingWindow, attend
from regard.distributed.context.gradients import (
    Attended,
    OfKeys,
    Sums,
    of_sinks,
)
from regard.distributed.context.rectangles import Scoring, rectangles
from regard.ops.attend import attend_partial
from regard.ops.backends import tiled
from regard.ops.partial import Partial, merge

LENGTH = 300
MASKS = [
    Causal(),
    Causal() & SlidingWindow(70),
    Causal() & Documents(torch.arange(LENGTH) // 110),
    Causal() & Padding(torch.arange(LENGTH) >= 40),  # the first queries may attend to no key
    Padding(torch.arange(LENGTH) % 3 != 0),
]


def found_by_rectangles(mask, softcap, sinks, runs, dtype=torch.float64, dims=(4, 3)):
    """Output and gradients of the whole, rectangle by rectangle; and those of `attend`."""
    torch.manual_seed(0)
    shapes = (1, 2, LENGTH, dims[0]), (1, 1, LENGTH, dims[0]), (1, 1, LENGTH, dims[1])
    q, k, v = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)
    options = {"mask": mask, "softcap": softcap}
    out = attend(q, k, v, **options, sinks=sinks, backend="eager")
    slope = torch.randn_like(out)
    expected = torch.autograd.grad(out, [x for x in (q, k, v, sinks) if x is not None], slope)
    with torch.no_grad():
        whole = attend_partial(q, k, v, **options, backend="eager")
        whole = whole if sinks is None else merge(whole, Partial.of_sinks(sinks))
        delta = (whole.out * slope).sum(-1)
        known = Attended(q, *whole, slope, delta, None, ())
        how = Scoring(mask, dims[0] ** -0.5, softcap, None, False, "auto", "strict", q.device)
        sums, of_keys = Sums(torch.zeros_like(q), None, ()), [[], []]
        for run in runs:
            keys = tuple(x[:, :, run[0] : run[1]] for x in (k, v))
            totals = tuple(map(torch.zeros_like, keys))
            for place in rectangles([(0, 120), (120, LENGTH)], [run]):
                OfKeys(how, known, keys, sums, totals).add(place)
            for each, total in zip(of_keys, totals, strict=True):
                each.append(total)
        grads = [sums.q, *(torch.cat(each, 2) for each in of_keys)]
        if sinks is not None:
            grads.append(of_sinks(sinks, known))
    return grads, expected


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["fused", "recomputed"])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_gradients_of_rectangles_add_up_to_those_of_the_whole(mask, softcap):
    runs = [(0, 100), (100, 101), (101, LENGTH)]
    for sinks in (None, torch.randn(2, dtype=torch.float64, requires_grad=True)):
        grads, expected = found_by_rectangles(mask, softcap, sinks, runs)
        for mine, its in zip(grads, expected, strict=True):
            torch.testing.assert_close(mine, its, atol=1e-12, rtol=1e-10)


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
@pytest.mark.parametrize("mask", MASKS[:-1], ids=repr)
def test_rectangles_of_float32_have_a_compiled_backward_pass(mask, monkeypatch):
    """At most 5 times the error of the plain implementation in the same dtype."""
    monkeypatch.setattr(tiled, "_WORTH_COMPILING", 0)
    calls, run = [], OfKeys._add_compiled
    monkeypatch.setattr(OfKeys, "_add_compiled", lambda *x: calls.append(x) or run(*x))
    sinks, runs = torch.randn(2, requires_grad=True), [(0, 100), (100, 101), (101, LENGTH)]
    grads, plain = found_by_rectangles(mask, None, sinks, runs, torch.float32, (16, 32))
    exact = exact_gradients(mask, sinks)
    for mine, its, truth in zip(grads, plain, exact, strict=True):
        least = torch.finfo(torch.float32).eps * truth.abs().max()
        assert (mine - truth).abs().max() <= 5 * (its - truth).abs().max() + least
    assert calls


def exact_gradients(mask, sinks):
    """Those of the same call in float64."""
    torch.manual_seed(0)
    shapes = (1, 2, LENGTH, 16), (1, 1, LENGTH, 16), (1, 1, LENGTH, 32)
    inputs = [torch.randn(shape).double().requires_grad_() for shape in shapes]
    sinks = sinks.detach().double().requires_grad_()
    out = attend(*inputs, mask=mask, sinks=sinks, backend="eager")
    slope = torch.randn(out.shape).double()
    return torch.autograd.grad(out, [*inputs, sinks], slope)


def test_hidden_scores_that_overflow_have_no_gradient():
    """A hidden score of +inf, plus -inf, would be NaN."""
    q, k, v, out = (
        torch.tensor(each).view(1, 1, 3, 1).expand(1, 1, 3, 2).contiguous()
        for each in ([0.0, 1e30, 1e30], [1e30, 0.0, 0.0], [1.0, 2.0, 3.0], [1.0, 2.5, 2.5])
    )
    mask = Documents(torch.tensor([0, 1, 1]))
    lse = torch.tensor([[[0.0, math.log(2.0), math.log(2.0)]]])
    slope = torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2).contiguous()
    known = Attended(q, out, lse, slope, (out * slope).sum(-1), None, ())
    how = Scoring(mask, 0.5, None, None, False, "auto", "strict", q.device)
    sums, of_keys = Sums(torch.zeros_like(q), None, ()), (torch.zeros_like(k), torch.zeros_like(v))
    for place in rectangles([(0, 3)], [(0, 3)]):
        OfKeys(how, known, (k, v), sums, of_keys).add(place)
    assert sums.q.isfinite().all() and of_keys[0].isfinite().all()
    torch.testing.assert_close(of_keys[1][0, 0, :, 0], torch.tensor([1.0, 1.0, 1.0]))


def test_a_sink_that_is_minus_infinity_has_no_gradient():
    lse = torch.tensor([[[-torch.inf, 0.0]]])
    x = torch.ones(1, 1, 2, 1)
    known = Attended(x, x, lse, x, torch.ones(1, 1, 2), None, ())
    assert of_sinks(torch.tensor([-torch.inf]), known).tolist() == [0.0]
    assert of_sinks(torch.tensor([0.0]), known).tolist() == [-1.0]
