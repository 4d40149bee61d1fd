"""Laws of the backward pass: gradients are those of the definition, and slopes of the output."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard_verify.law import NotApplicable, Sizes, Trial, fail, law, require, worst
from regard_verify.laws.cases import attending, modes, needs_the_definition, on_sizes
from regard_verify.subject.subject import Subject, SubjectError, called


@law(
    "The gradients of q, k and v are those of the definition.",
    "bounded",
    "a wrong backward: a detached score, a hand-written gradient, an in-place edit",
    "heads",
)
def oracle_gradient(subject: Subject, trial: Trial) -> None:
    needs_the_definition(subject)

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
    assert subject.attend is not None
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


@law(
    "Small steps of the inputs change the output as its gradient predicts, masked or not.",
    "bounded",
    "a hand-written backward, gradients through a mask",
    "heads",
)
def gradcheck_tiny(subject: Subject, trial: Trial) -> None:
    sizes = subject.fit(Sizes(1, 2, 2, 3, 4, 3, 3))
    for label, options in modes(subject, sizes, trial):
        given = subject.inputs(sizes, trial, dtype=torch.float64)
        assert subject.attend is not None
        call = partial(subject.attend, **options)
        if not _in_float64(call, given):
            raise NotApplicable("it computes in float32, which is too coarse for small steps")
        _central_differences(label, call, given, trial)


def _in_float64(call: Any, given: tuple[Tensor, ...]) -> bool:
    try:
        with torch.no_grad():
            double, single = call(*given), call(*(x.float() for x in given))
    except SubjectError:
        return False
    return double.dtype == torch.float64 and worst(double, single)[1] > 0.0


def _central_differences(label: str, call: Any, given: tuple[Tensor, ...], trial: Trial) -> None:
    ours = [x.clone().requires_grad_() for x in given]
    out = call(*ours)
    if not out.requires_grad:
        raise NotApplicable("its output has no gradient")
    push = torch.where(out.detach().isfinite(), trial.randn(*out.shape, dtype=out.dtype), 0.0)
    called(torch.nan_to_num(out * push).sum().backward)
    step = 1e-4
    for at, (name, mine) in enumerate(zip("qkv", ours, strict=True)):
        way = trial.randn(*mine.shape, dtype=mine.dtype)
        sums = []
        for sign in (1, -1):
            moved = [x + sign * step * way if i == at else x for i, x in enumerate(given)]
            sums.append(float((torch.nan_to_num(call(*moved)) * push).sum()))
        slope = (sums[0] - sums[1]) / (2 * step)
        along = float((torch.zeros_like(way) if mine.grad is None else mine.grad).mul(way).sum())
        if not abs(slope - along) <= 1e-3 * (1 + abs(slope)):
            fail(label, f"d{name} along a random direction", f"{slope:.6g}", f"{along:.6g}",
                 f"the gradient of {name} is not the slope of the output")  # fmt: skip


LAWS = (oracle_gradient, gradcheck_tiny)
