"""Laws of the values: the output is softmax attention, however it is computed."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard_verify.law import (
    NotApplicable,
    Sizes,
    Trial,
    fail,
    law,
    require,
    tolerance,
    where_finite,
    worst,
)
from regard_verify.laws.cases import attending, by_definition, modes, on_sizes, refused
from regard_verify.mistakes import AVERAGED, halves_averaged, heads_of, mistakes
from regard_verify.oracle import bound, wrong_scales
from regard_verify.subject.conventions import THETA
from regard_verify.subject.probe_weights import read_scale
from regard_verify.subject.subject import Subject, SubjectError, called

ROUNDED = 4e-3  # half of the spacing of bfloat16 below 1: what rounding changes in a sum of weights


@law("bounded", "heads")
@by_definition
def oracle_forward(subject: Subject, trial: Trial) -> None:
    """The output is softmax(scale q k + mask) v in every shape, up to rounding in float32."""

    def attempt(sizes: Sizes) -> None:
        for peak in (0.3, 4.0):
            for label, options in modes(subject, sizes, trial):
                q, k, v = subject.inputs(sizes, trial, peak=peak)
                out = subject.run(q, k, v, **options).double()
                right = subject.expected(q, k, v, **options)
                expected = torch.where(attending(subject, sizes, **options), right.out, out)
                allowed = bound(right, v, torch.float32)
                if not out.isfinite().all() or worst(out, expected)[1] > allowed:
                    causes = _causes(subject, q, k, v, options)
                    require(label, out, expected, allowed, causes)

    on_sizes(subject, trial, attempt)


def _causes(
    subject: Subject, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> dict[str, Tensor]:
    """The output that each common mistake gives."""
    own = subject.conventions
    width = own.width or q.shape[1] * q.shape[3]
    right = partial(subject.expected, q, k, v, **options)
    scales = wrong_scales(q.shape[3], width, v.shape[2])
    found = {mistake: right(scale=scale).out for mistake, scale in scales.items()}
    found["query head h reads key head h % G, it must read h // (H / G)"] = right(tiled=True).out
    many = q.shape[1] // v.shape[1]
    mean = v.double().mean(2, keepdim=True).repeat_interleave(many, 1)
    structural: dict[str, Tensor] = {}
    ranks: dict[str, Tensor] = {}
    if not own.softcap and subject.sinks is None and {"keep", "causal"} >= set(options):
        keep = subject.visible(q.shape[2], k.shape[2], causal="causal" in options)[None, None]
        keep = keep & options["keep"] if "keep" in options else keep
        scale = q.shape[-1] ** -0.5 if own.scale is None else own.scale
        plain = heads_of(q, k, v, keep, scale, tiled=own.head_order == "tiled")
        ranks = {AVERAGED: halves_averaged(plain)} if own.ranks == 2 else {}
        structural = dict(mistakes(plain, own.pairing or "none", own.theta or THETA))
    return {
        **ranks,
        **found,
        "the mask is ignored": subject.expected(q, k, v).out,
        "queries and keys do not matter: it is the mean of the values": mean.expand_as(right().out),
        "the softcap is ignored": right(softcap=0.0).out,
        "the sinks are ignored": right(sinks=None).out,
        **structural,
    }


@law("bounded", "heads")
@by_definition
def scale_closed_form(subject: Subject, trial: Trial) -> None:
    """Two keys whose scores differ by 1 before scaling have weights in the ratio exp(scale)."""
    if subject.conventions.pairing in ("halves", "pairs"):
        raise NotApplicable("rotation changes the scores; oracle_forward tests the scale")
    for dim in (4,) if subject.fixed.get("D") else (1, 4, 9, 64):
        dim = subject.fixed.get("D", dim)
        right = _capped(subject, subject.conventions.scale or dim**-0.5)
        got = read_scale(subject, trial, dim)
        if got is None:
            raise NotApplicable("key 0 or key 1 is hidden from query 1")
        if not abs(got - right) <= 1e-5 * (1 + abs(right)):
            usual = wrong_scales(dim, subject.conventions.width or dim, 2)
            usual = {mistake: _capped(subject, would) for mistake, would in usual.items()}
            usual["the softcap is ignored"] = subject.conventions.scale or dim**-0.5
            named = (m for m, would in usual.items() if abs(got - would) <= 1e-5 * (1 + abs(would)))
            cause = next(named, f"the scale is {got * dim**0.5:.4g} times what it should be")
            fail(f"D={dim}", "log odds of two keys", f"{right:.6g}", f"{got:.6g}", cause)


def _capped(subject: Subject, score: float) -> float:
    """A score under the subject's softcap."""
    cap = subject.conventions.softcap
    return cap * math.tanh(score / cap) if cap else score


@law("bounded", "heads")
def convexity(subject: Subject, trial: Trial) -> None:
    """Weights sum to 1: where all values are 1, so is the output."""
    if subject.sinks is not None:
        raise NotApplicable("sinks take a part of the weight")

    def attempt(sizes: Sizes) -> None:
        for label, options in modes(subject, sizes, trial):
            q, k, v = subject.inputs(sizes, trial, peak=2.0)
            out = subject.run(q, k, torch.ones_like(v), **options).double()
            total = torch.full_like(out, subject.total)
            expected = torch.where(attending(subject, sizes, **options), total, out)
            cause = (
                "the weights of a query do not sum to 1: they were changed after the softmax, or "
                "padding that the code adds takes a part"
            )
            if worst(out, expected)[1] < ROUNDED:
                cause = "the weights of a query are rounded, as in half precision"
            require(label, out, expected, 1e-5, cause)

    on_sizes(subject, trial, attempt, most=7)


@law("bounded", "heads")
def score_shift(subject: Subject, trial: Trial) -> None:
    """A constant added to all scores of a query changes nothing."""
    if subject.conventions.pairing != "none" or subject.conventions.softcap:
        raise NotApplicable("with a rotation or a softcap the scores do not shift by a constant")
    if subject.sinks is not None:
        raise NotApplicable("the scores of sinks are not shifted")

    def attempt(sizes: Sizes) -> None:
        q, k, v = subject.inputs(sizes, trial)
        q[..., 0] = 1.0
        scale = subject.conventions.scale or sizes.D**-0.5
        expected = subject.run(q, k, v).double()
        for shift in (100.0, -100.0, 300.0):
            shifted = k.clone()
            shifted[..., 0] += shift / scale
            got = subject.run(q, shifted, v).double()
            expected = where_finite(expected, got)
            cause = f"all scores of a query are {shift:g} higher: exp overflows or vanishes"
            require(sizes, got, expected, tolerance(v, 1e-3), cause)

    on_sizes(subject, trial, attempt, most=6)


@law("bounded", "scale|softcap|bias")
@by_definition
def options_obeyed(subject: Subject, trial: Trial) -> None:
    """The scale, softcap and bias of a call are applied, with a mask and without."""
    if subject.module is not None:
        raise NotApplicable("the options of a module are set when it is built")
    sizes = subject.fit(Sizes(2, 2, 2, 4, 4, 4, 4))
    bias = trial.randn(sizes.B, sizes.H, sizes.L, sizes.S, times=2.0)
    values: dict[str, Any] = {"scale": 0.9, "softcap": 1.5, "bias": bias}
    for name in (name for name in values if subject.has.any_of(name)):
        for label, options in modes(subject, sizes, trial):
            q, k, v = subject.inputs(sizes, trial, peak=2.0)
            attends = attending(subject, sizes, **options)
            ignored = subject.expected(q, k, v, **options).out
            options[name] = values[name]
            try:
                out = subject.run(q, k, v, **options).double()
            except SubjectError as error:
                if refused(error):
                    continue
                raise
            expected = torch.where(attends, subject.expected(q, k, v, **options).out, out)
            require(f"{label}, {name}", out, expected, 1e-4, {f"{name} is ignored": ignored})


@law("bounded", "heads")
@by_definition
def oracle_gradient(subject: Subject, trial: Trial) -> None:
    """The gradients of q, k and v are those of the definition."""

    def attempt(sizes: Sizes) -> None:
        for label, options in modes(subject, sizes, trial):
            _right_gradients(subject, sizes, trial, label, options)

    on_sizes(subject, trial, attempt, most=6)


def _right_gradients(
    subject: Subject, sizes: Sizes, trial: Trial, label: str, options: dict[str, Any]
) -> None:
    given = subject.inputs(sizes, trial)
    attends = attending(subject, sizes, **options)
    push = trial.randn(sizes.B, sizes.H, sizes.L, sizes.V) * attends
    ours = [x.clone().requires_grad_() for x in given]
    out = subject.attend(*ours, **options)
    got = _gradients(out, push.to(out.dtype), ours)
    theirs = [x.double().requires_grad_() for x in given]
    right = subject.expected(*theirs, **options)
    expected = _gradients(right.out, push.double(), theirs)
    value = torch.where(attends, right.out.detach(), out.detach().double())
    off = worst(out.detach(), value)[1] > 1e-3
    why = "because the output is: see oracle_forward" if off else "while the output is right"
    for name, mine, wanted in zip("qkv", got, expected, strict=True):
        size = float(wanted.abs().max()) + 1.0
        allowed = 64 * 2.0**-24 * (1 + right.largest) * size * math.sqrt(sizes.S)
        cause = f"the gradient of {name} is wrong {why}"
        require(f"{label}, d{name}", mine.double(), wanted, allowed, cause)


def _gradients(out: Tensor, push: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of the sum of out times push, 0 where there is none."""
    if not out.requires_grad:
        raise NotApplicable("its output has no gradient")
    called((out * push).sum().backward)
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
