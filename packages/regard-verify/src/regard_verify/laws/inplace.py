"""A law of tensors that are changed in place between the forward and the backward pass."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard_verify.law import NotApplicable, Sizes, Trial, law, require
from regard_verify.laws.cases import modes
from regard_verify.subject.caches import TRUNCATES
from regard_verify.subject.decoding import CacheState
from regard_verify.subject.subject import Stepper, Subject, SubjectError, called

FEW, MORE = Sizes(2, 4, 2, 5, 7, 4, 4), Sizes(1, 2, 2, 300, 300, 8, 8)

Change = Callable[[dict[str, Tensor]], None]  # changes tensors, given by name


class Pass(NamedTuple):
    """A forward pass that can be repeated.

    Attributes:
        label: the case in words.
        run: makes new tensors, and the output computed from them.
        wanted: names of the tensors that require a gradient.
        changes: what may be changed between the passes, by name.
    """

    label: str
    run: Callable[[], tuple[Tensor, dict[str, Tensor]]]
    wanted: tuple[str, ...]
    changes: dict[str, Change]


@law("exact", "heads|layer")
def inplace_between_passes(subject: Subject, trial: Trial) -> None:
    """A tensor that is changed in place between the forward and the backward pass gives an error or
    the right gradient.
    """
    checked = [_has_right_gradients(each, trial) for each in _passes(subject, trial)]
    if not any(checked):
        raise NotApplicable("it has no gradient")


def _has_right_gradients(each: Pass, trial: Trial) -> bool:
    """Whether there is a gradient; a gradient that changes without an error is raised."""
    try:
        out, tensors = each.run()
    except SubjectError:
        return False  # it refuses gradients, or other laws report the error
    if not out.requires_grad:
        return False
    push = trial.randn(*out.shape)
    base = _gradients(out, push, tensors, each.wanted)
    if base is None:
        return False
    for name, change in each.changes.items():
        out, tensors = each.run()
        with torch.no_grad():
            change(tensors)
        got = _gradients(out, push, tensors, each.wanted)
        for wanted, mine, right in zip(each.wanted, got or [], base, strict=False):
            label = f"{each.label}, {name} changed between the passes, d{wanted}"
            cause = "the backward pass reads the changed tensor, and autograd reports no error"
            require(label, mine, right, 1e-4 * (1.0 + float(right.abs().max())), cause)
    return True


def _gradients(
    out: Tensor, push: Tensor, tensors: dict[str, Tensor], wanted: Iterable[str]
) -> list[Tensor] | None:
    """The gradient of each wanted tensor; None if that is an error."""
    asked = [tensors[name] for name in wanted]
    total = (out * push).sum()
    try:
        found = torch.autograd.grad(total, asked, allow_unused=True)
    except Exception:
        return None
    return [torch.zeros_like(x) if g is None else g for x, g in zip(asked, found, strict=True)]


def _passes(subject: Subject, trial: Trial) -> Iterator[Pass]:
    if subject.attend is not None and subject.module is None:
        yield from _of_heads(subject, trial)
    if subject.layer is None or subject.module is None:
        return
    try:
        twin = copy.deepcopy(subject.module)
    except Exception:
        return
    yield from _of_layer(subject, twin, trial)
    if subject.stepper is not None:
        yield from _of_steps(subject, subject.stepper.of(twin), twin, trial)


def _changed(name: str) -> Change:
    """Write into the tensor of this name."""

    def change(tensors: dict[str, Tensor]) -> None:
        x = tensors[name]
        if name == "mask":
            x.logical_not_() if x.dtype == torch.bool else x.zero_()
        else:
            x.mul_(0.5)

    return change


def _of_heads(subject: Subject, trial: Trial) -> Iterator[Pass]:
    """With gradients of all inputs, or of one: that decides what is saved for the backward pass."""
    for wide in (FEW, MORE):
        sizes = subject.fit(wide)
        heads = dict(zip("qkv", subject.inputs(sizes, trial), strict=True))
        for label, options in modes(subject, sizes, trial):
            given = heads
            if "keep" in options:
                mask = subject.form.encode(options["keep"], (sizes.B, sizes.H), heads["q"].dtype)
                given, options = {**heads, "mask": mask}, {}
            changes = {name: _changed(name) for name in given}
            for wanted in ("qkv", "q", "k", "v") if wide == FEW else ("qkv", "q"):
                run = partial(_run_heads, subject, given, wanted, options)
                yield Pass(label, run, tuple(wanted), changes)


def _run_heads(
    subject: Subject, given: dict[str, Tensor], wanted: str, options: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    assert subject.attend is not None
    tensors = {name: x.clone() for name, x in given.items()}
    for name in wanted:
        tensors[name].requires_grad_()
    heads = [tensors[name] for name in "qkv"]
    return subject.attend(*heads, raw=tensors.get("mask"), **options), tensors


def _of_layer(subject: Subject, twin: nn.Module, trial: Trial) -> Iterator[Pass]:
    """x or one weight is changed, as by a step of the optimizer."""
    call = subject.layer_of(twin)
    weights = dict(twin.named_parameters())
    saved = {name: weight.detach().clone() for name, weight in weights.items()}
    x = subject.tokens(2, 5, trial)

    def run(wanted: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        for name, weight in weights.items():
            with torch.no_grad():
                weight.copy_(saved[name])
            weight.requires_grad_(name in wanted)
        tensors = {**weights, "x": x.clone().requires_grad_("x" in wanted)}
        return call(tensors["x"]), tensors

    changes = {name: _changed(name) for name in ("x", *list(weights)[: 8 if trial.quick else 64])}
    for wanted in (("x", *weights), ("x",)):
        yield Pass("B=2 L=5", partial(run, wanted), wanted, changes)


def _of_steps(subject: Subject, stepper: Stepper, twin: nn.Module, trial: Trial) -> Iterator[Pass]:
    """The cache is used again before the backward pass: continued, truncated and filled, reset."""
    weights = dict(twin.named_parameters())
    x, y = subject.tokens(2, 4, trial), subject.tokens(2, 4, trial)
    states: list[CacheState] = []

    def run(wanted: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        for name, weight in weights.items():
            weight.requires_grad_(name in wanted)
        tensors = {**weights, "x": x.clone().requires_grad_("x" in wanted)}
        out, state = stepper.follow(tensors["x"], stepper.new())
        states[:] = [state]
        return out, tensors

    def again(state: Callable[[], CacheState]) -> Change:
        def change(tensors: dict[str, Tensor]) -> None:
            with suppress(SubjectError):
                stepper.step(y, state())

        return change

    changes = {
        "the next tokens": again(lambda: states[0]),
        "other tokens after truncation": again(lambda: _emptied(states[0])),
    }
    if stepper.style == "internal":
        changes["other tokens after a reset"] = again(stepper.new)
    alone = [(name,) for name, weight in weights.items() if weight.ndim == 2]
    for wanted in (("x", *weights), *alone[: 4 if trial.quick else 16]):
        yield Pass("B=2, 4 tokens with a cache", partial(run, wanted), wanted, changes)


def _emptied(state: CacheState) -> CacheState:
    """The same cache object without its tokens, where it can be truncated."""
    truncate = next((name for name in TRUNCATES if hasattr(state.held, name)), None)
    if truncate is None:
        raise SubjectError("it cannot be truncated")
    called(getattr(state.held, truncate), 0)
    return CacheState(state.held, 0)
