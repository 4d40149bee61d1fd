"""Laws of the backward: gradients are those of the definition, and slopes of the output."""

import math
from functools import partial
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
from regard.verify.laws.cases import known, modes, rows_that_see, sizes_for
from regard.verify.subject.subject import Subject, SubjectError


@law(
    "The gradients of q, k and v are those of the definition.",
    "bounded",
    "a wrong backward: a detached score, a hand-written gradient, an in-place edit",
    "heads",
)
def oracle_gradient(subject: Subject, trial: Trial) -> None:
    known(subject)

    def broken(sizes: Sizes) -> Counterexample | None:
        for said, asked in modes(subject, sizes, trial):
            found = _gradients(subject, sizes, trial, asked)
            if found is not None:
                shape = f"{sizes}, {said}" if said else str(sizes)
                return Counterexample(shape, *list(vars(found).values())[1:])
        return None

    insist(smallest(sizes_for(subject, trial, most=6), broken))


def _gradients(
    subject: Subject, sizes: Sizes, trial: Trial, asked: dict[str, Any]
) -> Counterexample | None:
    given = subject.inputs(sizes, trial)
    sees = rows_that_see(subject, sizes, **asked)
    push = trial.randn(sizes.B, sizes.H, sizes.L, sizes.V) * sees
    ours = [x.clone().requires_grad_() for x in given]
    assert subject.attend is not None
    out = subject.attend(*ours, **asked)
    if not out.requires_grad:
        raise NotApplicable("its output has no gradient")
    (out * push.to(out.dtype)).sum().backward()
    theirs = [x.double().requires_grad_() for x in given]
    judged = subject.judge(*theirs, **asked)
    (judged.out * push.double()).sum().backward()
    for name, mine, right in zip("qkv", ours, theirs, strict=True):
        expected = torch.zeros_like(right) if right.grad is None else right.grad
        got = torch.zeros_like(mine) if mine.grad is None else mine.grad
        size = float(expected.abs().max()) + 1.0
        allowed = 64 * 2.0**-24 * (1 + judged.largest) * size * math.sqrt(sizes.S)
        cause = f"the gradient of {name} is wrong {_while(out, judged.out, sees)}"
        found = compare(f"{sizes}, d{name}", got.double(), expected, allowed, cause)
        if found is not None:
            return found
    return None


def _while(out: Tensor, right: Tensor, sees: Tensor) -> str:
    """Whether the output is wrong too: then the gradient is the lesser worry."""
    expected = torch.where(sees, right.detach(), out.detach().double())
    off = worst(out.detach(), expected)[1] > 1e-3
    return "because the output is: see oracle_forward" if off else "while the output is right"


@law(
    "Small steps of the inputs move the output as its gradient says, with and without a mask.",
    "bounded",
    "a hand-written backward, gradients through a mask",
    "heads",
)
def gradcheck_tiny(subject: Subject, trial: Trial) -> None:
    sizes = subject.fit(Sizes(1, 2, 2, 3, 4, 3, 3))
    for said, asked in modes(subject, sizes, trial):
        given = subject.inputs(sizes, trial, dtype=torch.float64)
        assert subject.attend is not None
        call = partial(subject.attend, **asked)
        if not _in_float64(call, given):
            raise NotApplicable("it computes in float32, too coarsely for small steps")
        _central_differences(f"{sizes} {said}", call, given, trial)


def _in_float64(call: Any, given: tuple[Tensor, ...]) -> bool:
    try:
        with torch.no_grad():
            double, single = call(*given), call(*(x.float() for x in given))
    except SubjectError:
        return False
    return double.dtype == torch.float64 and worst(double, single)[1] > 0.0


def _central_differences(said: str, call: Any, given: tuple[Tensor, ...], trial: Trial) -> None:
    ours = [x.clone().requires_grad_() for x in given]
    out = call(*ours)
    if not out.requires_grad:
        raise NotApplicable("its output has no gradient")
    push = torch.where(out.detach().isfinite(), trial.randn(*out.shape, dtype=out.dtype), 0.0)
    torch.nan_to_num(out * push).sum().backward()
    step = 1e-4
    for name, mine, x in zip("qkv", ours, given, strict=True):
        way = trial.randn(*x.shape, dtype=x.dtype)
        moved = [
            float((torch.nan_to_num(call(*_moved(given, x, sign * step * way))) * push).sum())
            for sign in (1, -1)
        ]
        slope = (moved[0] - moved[1]) / (2 * step)
        told = float((torch.zeros_like(x) if mine.grad is None else mine.grad).mul(way).sum())
        if not abs(slope - told) <= 1e-3 * (1 + abs(slope)):
            fail(said, f"d{name} along a random direction", f"{slope:.6g}", f"{told:.6g}",
                 f"the gradient of {name} is not the slope of the output")  # fmt: skip


def _moved(given: tuple[Tensor, ...], x: Tensor, by: Tensor) -> list[Tensor]:
    return [each + by if each is x else each for each in given]


LAWS = (
    oracle_gradient,
    gradcheck_tiny,
)
