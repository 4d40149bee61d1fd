"""The law of the backward pass: gradients are those of the definition."""

import math
from typing import Any

import torch
from torch import Tensor

from regard_verify.law import NotApplicable, Sizes, Trial, law, require, worst
from regard_verify.laws.cases import attending, modes, needs_the_definition, on_sizes
from regard_verify.subject.subject import Subject, called


@law("bounded", "heads")
def oracle_gradient(subject: Subject, trial: Trial) -> None:
    """The gradients of q, k and v are those of the definition."""
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
