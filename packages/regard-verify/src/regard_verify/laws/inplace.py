"""A law of tensors that are changed in place between the forward and the backward pass."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard_verify.law import NotApplicable, Sizes, Trial, law, require
from regard_verify.laws.cases import modes
from regard_verify.subject.caches import TRUNCATES
from regard_verify.subject.decoding import CacheState
from regard_verify.subject.subject import Subject, SubjectError, called

WEIGHTS = 8  # of a module, that are changed one at a time


class Forward(NamedTuple):
    """A forward pass: its output, the leaves of the graph, and what may be changed, by name."""

    out: Tensor
    leaves: dict[str, Tensor]
    changes: Mapping[str, Callable[[], object]]

    def gradients(self, push: Tensor) -> list[Tensor] | None:
        """The gradient of each leaf for the output's gradient `push`; None if that is an error."""
        try:
            found = torch.autograd.grad(
                (self.out * push).sum(), list(self.leaves.values()), allow_unused=True
            )
        except Exception:
            return None
        pairs = zip(found, self.leaves.values(), strict=True)
        return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs]


@law("exact", "heads|layer")
def inplace_between_passes(subject: Subject, trial: Trial) -> None:
    """A tensor that is changed in place between the forward and the backward pass gives an error or
    the right gradient.
    """
    checked = [_right_after_changes(*each, trial) for each in _passes(subject, trial)]
    if not any(checked):
        raise NotApplicable("it has no gradient")


def _right_after_changes(label: str, run: Callable[[], Forward], trial: Trial) -> bool:
    """Whether there is a gradient; a gradient that changes without an error is raised."""
    try:
        first = run()
    except SubjectError:
        return False  # it refuses gradients, or other laws report the error
    push = trial.randn(*first.out.shape)
    base = first.gradients(push) if first.out.requires_grad else None
    if base is None:
        return False
    for name in first.changes:
        again = run()
        with torch.no_grad():
            again.changes[name]()
        for leaf, mine, right in zip(again.leaves, again.gradients(push) or [], base, strict=False):
            case = f"{label}, {name} changed between the passes, d{leaf}"
            cause = "the backward pass reads the changed tensor, and autograd reports no error"
            require(case, mine, right, 1e-4 * (1.0 + float(right.abs().max())), cause)
    return True


def _passes(subject: Subject, trial: Trial) -> Iterator[tuple[str, Callable[[], Forward]]]:
    """Each case in words, and a function that runs its forward pass on new tensors."""
    if subject.attend is not None and subject.module is None:
        sizes = subject.fit(Sizes(2, 4, 2, 5, 7, 4, 4))
        heads = dict(zip("qkv", subject.inputs(sizes, trial), strict=True))
        for label, options in modes(subject, sizes, trial):
            for wanted in ("qkv", "q", "k", "v"):  # that decides what is saved for the backward
                yield label, partial(_heads, subject, heads, wanted, options)
    if subject.module is not None:
        x, y = subject.tokens(2, 5, trial), subject.tokens(2, 5, trial)
        for frozen in (False, True):
            yield "B=2 L=5", partial(_layer, subject, x, frozen)
        if subject.stepper is not None:
            yield "B=2, 5 tokens with a cache", partial(_steps, subject, x, y)


def _write(x: Tensor) -> Tensor:
    return x.logical_not_() if x.dtype == torch.bool else x.zero_()


def _heads(
    subject: Subject, heads: dict[str, Tensor], wanted: str, options: dict[str, Any]
) -> Forward:
    assert subject.attend is not None
    given = {n: x.clone().requires_grad_(n in wanted) for n, x in heads.items()}
    changed, options = dict(given), dict(options)
    if "keep" in options:
        batch, count = heads["q"].shape[:2]
        options["raw"] = subject.form.encode(options.pop("keep"), (batch, count), torch.float32)
        changed["mask"] = options["raw"]
    out = subject.attend(*given.values(), **options)
    changes = {name: partial(_write, x) for name, x in changed.items()}
    return Forward(out, {name: given[name] for name in wanted}, changes)


def _copied(subject: Subject, frozen: bool = False) -> Any:
    """A copy of the module whose weights may be changed."""
    try:
        return copy.deepcopy(subject.module).requires_grad_(not frozen)  # type: ignore[union-attr]
    except Exception as error:
        raise SubjectError("it cannot be copied") from error


def _layer(subject: Subject, x: Tensor, frozen: bool) -> Forward:
    """x or one weight is changed, as by a step of the optimizer."""
    twin, x = _copied(subject, frozen), x.clone().requires_grad_()
    weights = dict(twin.named_parameters())
    changes = {"x": x, **dict(list(weights.items())[:WEIGHTS])}
    leaves = {"x": x} if frozen else {"x": x, **weights}
    out = subject.layer_of(twin)(x)
    return Forward(out, leaves, {name: partial(_write, each) for name, each in changes.items()})


def _steps(subject: Subject, x: Tensor, y: Tensor) -> Forward:
    """The cache is used again before the backward pass: continued, truncated and filled, reset."""
    twin, x = _copied(subject), x.clone().requires_grad_()
    assert subject.stepper is not None
    stepper = subject.stepper.of(twin)
    out, state = stepper.follow(x, stepper.new())

    def again(state: Callable[[], CacheState]) -> None:
        with suppress(SubjectError):
            stepper.step(y, state())

    changes = {
        "the next tokens": partial(again, lambda: state),
        "other tokens after truncation": partial(again, lambda: _emptied(state)),
    }
    if stepper.style == "internal":
        changes["other tokens after a reset"] = partial(again, stepper.new)
    return Forward(out, {"x": x, **dict(twin.named_parameters())}, changes)


def _emptied(state: CacheState) -> CacheState:
    """The same cache object without its tokens, where it can be truncated."""
    truncate = next((name for name in TRUNCATES if hasattr(state.held, name)), None)
    if truncate is None:
        raise SubjectError("it cannot be truncated")
    called(getattr(state.held, truncate), 0)
    return CacheState(state.held, 0)
