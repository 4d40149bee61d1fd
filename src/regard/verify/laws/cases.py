"""Sizes from small to odd, masks that leave something to see, and ways of asking for causality."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.verify.law import NotApplicable, Sizes, Trial
from regard.verify.oracle import pattern
from regard.verify.subject.decoding import in_steps
from regard.verify.subject.subject import Subject, SubjectError

SIZES = (
    Sizes(1, 1, 1, 1, 1, 1, 1),
    Sizes(1, 1, 1, 2, 2, 2, 2),
    Sizes(1, 2, 2, 3, 3, 4, 4),
    Sizes(2, 1, 1, 3, 4, 4, 4),
    Sizes(2, 3, 3, 4, 5, 4, 4),
    Sizes(2, 4, 2, 5, 7, 4, 6),
    Sizes(2, 4, 1, 7, 5, 8, 8),
    Sizes(4, 4, 4, 4, 4, 4, 4),
    Sizes(1, 8, 2, 17, 33, 16, 16),
    Sizes(2, 2, 2, 65, 65, 8, 8),
)


def sizes_for(subject: Subject, trial: Trial, *, most: int = len(SIZES)) -> list[Sizes]:
    """The sizes that a subject takes, each once, small ones first."""
    few = min(most, 6) if trial.quick else most
    return list(dict.fromkeys(subject.fit(sizes) for sizes in SIZES[:few]))


def some_keep(subject: Subject, sizes: Sizes, trial: Trial, share: float = 0.6) -> Tensor:
    """A random mask [B, 1, L, S] of a form the subject can be given; no query is left blind that
    would see something without it."""
    own = subject.visible(sizes.L, sizes.S)
    keep = trial.rand(sizes.B, 1, sizes.L, sizes.S) < share
    shape = subject.form.shape
    if shape == "LS":
        keep = keep[:1].expand(sizes.B, -1, -1, -1).clone()
    if shape in ("BS", "B11S"):
        keep = keep[:, :, :1].expand(-1, -1, sizes.L, -1).clone()
        first = own.any(0).float().argmax() if own.numel() else 0
        keep[..., int(first)] = True
        return keep
    seen = own & keep
    blind = ~seen.any(-1) & own.any(-1)
    where = own.float().argmax(-1).expand(keep.shape[:-1])
    return keep | (torch.nn.functional.one_hot(where, sizes.S).bool() & blind[..., None])


def modes(subject: Subject, sizes: Sizes, trial: Trial) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways of calling it: plainly, with a mask, causally."""
    yield "", {}
    if subject.has & {"mask", "padding"}:
        yield "a mask", {"keep": some_keep(subject, sizes, trial)}
    if "causal" in subject.has and not subject.module and not subject.conventions.causal:
        yield "causal", {"causal": True}


class Way(NamedTuple):
    """One way of calling a subject: `call` of the tensors `given`, by name."""

    said: str
    call: Callable[..., Tensor]
    given: dict[str, Tensor]

    def __call__(self, **instead: Tensor) -> Tensor:
        """The output, without gradients, for copies of `given` or of what is given instead."""
        with torch.no_grad():
            return self.call(**{name: x.clone() for name, x in {**self.given, **instead}.items()})


def ways_with_heads(subject: Subject, trial: Trial) -> list[Way]:
    """A function of heads: plainly, masked, causally; with one query for few and for many keys."""
    if subject.attend is None:
        return []
    found = []
    few, many = Sizes(2, 4, 2, 17, 19, 4, 4), Sizes(1, 4, 2, 1, 600, 16, 16)
    for sizes in dict.fromkeys(subject.fit(each) for each in (few, few._replace(L=1), many)):
        given = dict(zip("qkv", subject.inputs(sizes, trial, peak=2.0), strict=True))
        for said, asked in modes(subject, sizes, trial):
            said = f"{sizes}, {said}".removesuffix(", ")
            found.append(Way(said, partial(subject.attend, **asked), given))
    return found


def ways_with_tokens(subject: Subject, trial: Trial, *, pieces: bool = True) -> list[Way]:
    """A layer: at once, masked, and in pieces with a past."""
    if subject.layer is None:
        return []
    given = {"x": 2.0 * subject.tokens(2, 17, trial)}
    found = [Way("B=2 L=17", subject.layer, given)]
    if "mask" in subject.has:
        keep = pattern(17, 17, causal=True)[None, None]
        found.append(Way("B=2 L=17, a mask", partial(subject.layer, keep=keep), given))
    if pieces and subject.stepper is not None:
        cut = partial(in_steps, subject, cuts=[13, 3, 1])
        found.append(Way("B=2 L=17 in pieces of [13, 3, 1]", cut, given))
    return found


REFUSALS = (ValueError, TypeError, NotImplementedError, RuntimeError, AssertionError)


def refused(error: SubjectError) -> bool:
    """Whether the subject raised an error that says no, and not one that is an accident."""
    cause = error.__cause__
    return isinstance(cause, REFUSALS) and not isinstance(cause, RecursionError)


def causal_call(subject: Subject, queries: int, keys: int) -> dict[str, Any] | None:
    """How to ask for a causal call; None if there is no way."""
    if subject.conventions.causal:
        return {}
    if "causal" in subject.has and not subject.module:
        return {"causal": True}
    if "mask" in subject.has:
        return {"keep": pattern(queries, keys, causal=True)[None, None]}
    return None


def causal_layer_call(subject: Subject, length: int) -> dict[str, Any] | None:
    """The same for a layer."""
    if subject.conventions.causal:
        return {}
    if "mask" in subject.has:
        return {"keep": pattern(length, length, causal=True)[None, None]}
    return None


def rows_that_see(
    subject: Subject, sizes: Sizes, *, keep: Tensor | None = None, **asked: Any
) -> Tensor:
    """Which queries [.., L, 1] see anything: those that do not have a law of their own."""
    seen = subject.visible(sizes.L, sizes.S, **asked)[None, None]
    seen = seen if keep is None else seen & keep
    return seen.any(-1, keepdim=True)


def weights_width(subject: Subject, sizes: Sizes) -> int | None:
    """How many channels a value may have when weights are read."""
    return None if "wide" in subject.has else sizes.V


def known(subject: Subject) -> None:
    """Laws that need the definition say nothing where positions enter in an unknown way."""
    if "unknown positions" in subject.has:
        raise NotApplicable("positions enter its scores in a way that was not found out")
