"""Laws of the numbers: what softmax attention is, whatever computes it."""

import math
from typing import Any

import torch
from torch import Tensor

from regard.verify.law import (
    Counterexample,
    NotApplicable,
    Sizes,
    Trial,
    compare,
    fail,
    insist,
    law,
    smallest,
    worst,
)
from regard.verify.laws.cases import known, modes, rows_that_see, sizes_for, weights_width
from regard.verify.oracle import attention, bound, variants
from regard.verify.subject.probe_functions import read_scale
from regard.verify.subject.subject import Subject
from regard.verify.visibility import read_weights


@law(
    "The output is softmax(scale q k + mask) v, in every shape, to rounding in float32.",
    "bounded",
    "everything gross: scale, softmax axis, head order, softcap that is ignored, lost keys",
    "heads",
)
def oracle_forward(subject: Subject, trial: Trial) -> None:
    known(subject)

    def broken(sizes: Sizes) -> Counterexample | None:
        for peak in (0.3, 4.0):
            for said, asked in modes(subject, sizes, trial):
                found = _judged(subject, sizes, trial, peak, asked)
                if found is not None:
                    shape = f"{sizes}, {said}" if said else str(sizes)
                    return Counterexample(shape, *list(vars(found).values())[1:])
        return None

    insist(smallest(sizes_for(subject, trial), broken))


def _judged(
    subject: Subject, sizes: Sizes, trial: Trial, peak: float, asked: dict[str, Any]
) -> Counterexample | None:
    q, k, v = subject.inputs(sizes, trial, peak=peak)
    out = subject.run(q, k, v, **asked).double()
    judged = subject.judge(q, k, v, **asked)
    sees = rows_that_see(subject, sizes, **asked)
    expected = torch.where(sees, judged.out, out)
    allowed = bound(judged, v, torch.float32)
    if not out.isfinite().all() or worst(out, expected)[1] > allowed:
        return compare(sizes, out, expected, allowed, _causes(subject, q, k, v, asked))
    return None


def _causes(
    subject: Subject, q: Tensor, k: Tensor, v: Tensor, asked: dict[str, Any]
) -> dict[str, Tensor]:
    """What the usual mistakes would have given."""
    width = subject.conventions.width or q.shape[1] * q.shape[3]
    found = {
        said: subject.judge(q, k, v, **asked, **options).out
        for said, options in variants(q, v, width).items()
    }
    judged = subject.judge(q, k, v, **asked)
    plain = subject.judge(q, k, v)
    found["the mask is ignored"] = plain.out
    found["the mask is applied after the softmax, so that weights no longer sum to 1"] = (
        _after_softmax(subject, q, k, v, asked)
    )
    mean = v.double().mean(2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], 1)
    found["queries and keys do not matter: it is the mean of the values"] = mean.expand_as(
        judged.out
    )
    found["the softmax runs over the queries"] = _over(q, k, v, judged.weights, axis=2)
    found["the softmax runs over the heads"] = _over(q, k, v, judged.weights, axis=1)
    found["the softcap is ignored"] = subject.judge(q, k, v, **asked, softcap=0.0).out
    found["the sinks are ignored"] = subject.judge(q, k, v, **asked, sinks=None).out
    return found


def _after_softmax(
    subject: Subject, q: Tensor, k: Tensor, v: Tensor, asked: dict[str, Any]
) -> Tensor:
    own = attention(q, k, v, scale=subject.conventions.scale).weights
    keep = subject.judge(q, k, v, **asked).weights > 0
    values = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (own * keep) @ values


def _over(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, axis: int) -> Tensor:
    many = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(many, 1)
    scores = q.double() @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.softmax(axis) @ v.double().repeat_interleave(many, 1)


@law(
    "Two keys whose scores differ by 1 have weights of odds exp(scale).",
    "bounded",
    "a scale that is missing, doubled, or of the wrong size",
    "heads",
)
def scale_closed_form(subject: Subject, trial: Trial) -> None:
    known(subject)
    if subject.conventions.pairing in ("halves", "pairs"):
        raise NotApplicable("rotation changes the scores; the oracle judges the scale")
    for dim in (4,) if subject.fixed.get("D") else (1, 4, 9, 64):
        dim = subject.fixed.get("D", dim)
        right = subject.conventions.scale or dim**-0.5
        if subject.conventions.softcap:
            right = subject.conventions.softcap * math.tanh(right / subject.conventions.softcap)
        got = read_scale(subject, trial, dim)
        if got is None:
            raise NotApplicable("query 1 does not see keys 0 and 1")
        if not abs(got - right) <= 1e-5 * (1 + abs(right)):
            cause = _scale_cause(got, dim, subject)
            fail(f"D={dim}", "log odds of two keys", f"{right:.6g}", f"{got:.6g}", cause)


def _scale_cause(got: float, dim: int, subject: Subject) -> str:
    width = subject.conventions.width or dim
    usual = {
        "the scores are not scaled": 1.0,
        "the scores are divided by the head size without its root": 1 / dim,
        "the scores are multiplied by the root of the head size": dim**0.5,
        "the scores are scaled twice": 1 / dim,
        f"the scores are scaled by the root of the whole width {width}": width**-0.5,
        "the scores are scaled by the root of the number of keys": 2**-0.5,
        "the scores do not count": 0.0,
    }
    for said, would in usual.items():
        if abs(got - would) <= 1e-5 * (1 + abs(would)):
            return said
    return f"the scale is {got * dim**0.5:.4g} times what it should be"


@law(
    "Weights sum to 1: where every value is 1 the output is 1, and no output leaves the values.",
    "bounded",
    "a mask after the softmax, dropout that runs, a softmax over the wrong axis",
    "heads",
)
def convexity(subject: Subject, trial: Trial) -> None:
    if subject.sinks is not None:
        raise NotApplicable("sinks take their share of the weights")

    def broken(sizes: Sizes) -> Counterexample | None:
        for said, asked in modes(subject, sizes, trial):
            q, k, v = subject.inputs(sizes, trial, peak=2.0)
            out = subject.run(q, k, torch.ones_like(v), **asked).double()
            sees = rows_that_see(subject, sizes, **asked)
            expected = torch.where(sees, torch.ones_like(out), out)
            cause = "the weights of a query do not sum to 1: they were changed after the softmax"
            found = compare(f"{sizes} {said}", out, expected, 1e-5, cause)
            if found is not None:
                return found
        return None

    insist(smallest(sizes_for(subject, trial, most=7), broken))


@law(
    "The output is linear in the values.",
    "bounded",
    "values that enter the scores, rounding or clipping of values",
    "heads",
)
def value_linearity(subject: Subject, trial: Trial) -> None:
    def broken(sizes: Sizes) -> Counterexample | None:
        q, k, v = subject.inputs(sizes, trial)
        other = trial.randn(*v.shape)
        parts = [subject.run(q, k, each).double() for each in (v, other)]
        both = subject.run(q, k, 2.0 * v - 0.5 * other).double()
        expected = 2.0 * parts[0] - 0.5 * parts[1]
        allowed = 1e-4 * float(1 + torch.nan_to_num(expected).abs().max())
        expected = torch.where(expected.isfinite(), expected, both)
        return compare(sizes, both, expected, allowed, "the values do more than be averaged")

    insist(smallest(sizes_for(subject, trial, most=7), broken))


@law(
    "Adding one number to every score of a query changes nothing.",
    "bounded",
    "a softmax that does not subtract the largest score, and overflows",
    "heads",
)
def score_shift(subject: Subject, trial: Trial) -> None:
    if subject.conventions.pairing != "none" or subject.conventions.softcap:
        raise NotApplicable("rotation or a softcap makes the scores change by more than a number")
    if subject.sinks is not None:
        raise NotApplicable("a sink's score is not moved")

    def broken(sizes: Sizes) -> Counterexample | None:
        q, k, v = subject.inputs(sizes, trial)
        q[..., 0] = 1.0
        scale = subject.conventions.scale or sizes.D**-0.5
        expected = subject.run(q, k, v).double()
        for shift in (100.0, -100.0, 300.0):
            moved = k.clone()
            moved[..., 0] += shift / scale
            got = subject.run(q, moved, v).double()
            expected = torch.where(expected.isfinite(), expected, got)
            cause = f"all scores of a query are {shift:g} higher: exp overflows or vanishes"
            allowed = 1e-3 * float(1 + v.abs().max())
            found = compare(sizes, got, expected, allowed, cause)
            if found is not None:
                return found
        return None

    insist(smallest(sizes_for(subject, trial, most=6), broken))


@law(
    "The only visible key gets all the weight, however low its score; and the highest of very "
    "different scores gets it too.",
    "exact",
    "a finite fill that is mistaken for a score, overflow",
    "heads",
    advised=True,
)
def extreme_scores(subject: Subject, trial: Trial) -> None:
    known(subject)
    if subject.conventions.softcap or subject.sinks is not None:
        raise NotApplicable("a softcap or sinks keep other keys in play")
    if subject.conventions.pairing != "none":
        raise NotApplicable("rotation changes the scores")
    sizes = subject.fit(Sizes(1, 1, 1, 3, 3, 4, 3))
    q, k, v = subject.inputs(sizes, trial)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = 1.0
    k[:, :, :, 0] = -5e5 / (subject.conventions.scale or sizes.D**-0.5)
    if subject.has & {"mask", "padding"}:
        keep = torch.zeros(sizes.B, 1, sizes.L, sizes.S, dtype=torch.bool)
        keep[..., 0] = True
        _one_key(subject, (q, k, v), keep, "a key that is hidden beats a visible, very low score")
    k[:, :, 0, 0] = -k[:, :, 0, 0]
    _one_key(subject, (q, k, v), None, "scores of 5e5 and -5e5 overflow")


def _one_key(subject: Subject, given: tuple[Tensor, ...], keep: Tensor | None, cause: str) -> None:
    asked = {} if keep is None else {"keep": keep}
    got = subject.run(*given, **asked).double()
    value = given[2].double()[:, :, :1].repeat_interleave(got.shape[1] // given[2].shape[1], 1)
    insist(compare("scores of -5e5", got, value.expand_as(got), 0.0, cause))


@law(
    "The weights that are read from outside are those of the definition.",
    "bounded",
    "a softmax over the wrong axis, lost precision in the scores",
    "heads",
    quick=False,
)
def weights_probe(subject: Subject, trial: Trial) -> None:
    known(subject)
    for sizes in sizes_for(subject, trial, most=6):
        q, k, _ = subject.inputs(sizes, trial, peak=3.0)
        weights = read_weights(subject.run, q, k, width=weights_width(subject, sizes)).double()
        v = torch.ones(1)
        judged = subject.judge(q, k, torch.zeros(*k.shape[:3], 1))
        sees = rows_that_see(subject, sizes)
        expected = torch.where(sees, judged.weights, weights)
        cause = "the weights are not the softmax of the scaled scores"
        insist(compare(sizes, weights, expected, bound(judged, v, torch.float32), cause))


@law(
    "What a call asks for is done: its own scale, softcap and bias, with a mask too.",
    "bounded",
    "an argument that is accepted and ignored, a bias that is scaled, a cap over the mask",
    "scale|softcap|bias",
)
def options_obeyed(subject: Subject, trial: Trial) -> None:
    known(subject)
    if subject.module is not None:
        raise NotApplicable("a module's options are its own")
    sizes = subject.fit(Sizes(2, 2, 2, 4, 4, 4, 4))
    bias = trial.randn(sizes.B, sizes.H, sizes.L, sizes.S, times=2.0)
    options: dict[str, Any] = {"scale": 0.9, "softcap": 1.5, "bias": bias}
    for name, value in options.items():
        if name not in subject.has:
            continue
        for said, asked in modes(subject, sizes, trial):
            q, k, v = subject.inputs(sizes, trial, peak=2.0)
            with_it: dict[str, Any] = {name: value, **asked}
            out = subject.run(q, k, v, **with_it).double()
            judged = subject.judge(q, k, v, **with_it)
            causes = {f"{name} is ignored": subject.judge(q, k, v, **asked).out}
            expected = torch.where(rows_that_see(subject, sizes, **asked), judged.out, out)
            insist(compare(f"{sizes}, {name} {said}", out, expected, 1e-4, causes))


LAWS = (
    oracle_forward,
    scale_closed_form,
    convexity,
    value_linearity,
    score_shift,
    extreme_scores,
    weights_probe,
    options_obeyed,
)
