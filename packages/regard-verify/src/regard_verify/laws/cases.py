"""Shared by laws: sizes from small to odd, masks, calls to repeat, and causal calls."""

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from regard_verify.law import Broken, LawFunction, NotApplicable, Sizes, Trial, require, smallest
from regard_verify.oracle import pattern
from regard_verify.subject.decoding import in_steps
from regard_verify.subject.probe_weights import learned_in_scores
from regard_verify.subject.subject import Call, Subject, SubjectError

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
FOUR = Sizes(1, 1, 1, 4, 4, 4, 4)  # one head, four tokens: what a mask does can be read at a glance
ODD = Sizes(2, 2, 2, 5, 5, 4, 4)  # an odd length, which no vector width divides


def sizes_for(subject: Subject, trial: Trial, *, most: int = len(SIZES)) -> list[Sizes]:
    """The sizes that a subject takes, each once, small ones first."""
    few = min(most, 6) if trial.quick else most
    return list(dict.fromkeys(subject.fit(sizes) for sizes in SIZES[:few]))


def on_sizes(
    subject: Subject, trial: Trial, attempt: Callable[[Sizes], None], *, most: int = len(SIZES)
) -> None:
    """Run `attempt` on each size; the first counter-example is raised, shrunk."""
    smallest(sizes_for(subject, trial, most=most), attempt)


def random_mask(subject: Subject, sizes: Sizes, trial: Trial) -> Tensor:
    """A random mask [B, 1, L, S] that the subject's form can express.

    It fully masks no query, except those that the subject's own pattern masks.
    """
    own = subject.visible(sizes.L, sizes.S)
    keep = trial.rand(sizes.B, 1, sizes.L, sizes.S) < 0.6
    shape = subject.form.shape
    if shape == "LS":
        keep = keep[:1].expand(sizes.B, -1, -1, -1).clone()
    if shape in ("BS", "B11S"):
        keep = keep[:, :, :1].expand(-1, -1, sizes.L, -1).clone()
        first = own.any(0).float().argmax() if own.numel() else 0
        keep[..., int(first)] = True
        return keep
    masked = ~(own & keep).any(-1) & own.any(-1)
    first = own.float().argmax(-1).expand(keep.shape[:-1])
    return keep | (torch.nn.functional.one_hot(first, sizes.S).bool() & masked[..., None])


def modes(subject: Subject, sizes: Sizes, trial: Trial) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sizes in words and the options of a call: without any, with a mask, causal."""
    yield str(sizes), {}
    if subject.has.padding:
        yield f"{sizes}, a mask", {"keep": random_mask(subject, sizes, trial)}
    if options := subject.causal_options():
        yield f"{sizes}, causal", options


def calls_on_heads(subject: Subject, trial: Trial) -> list[Call]:
    """Calls in all modes, with many queries and with one, for few and for many keys."""
    if subject.attend is None:
        return []
    found = []
    few, many = Sizes(2, 4, 2, 17, 19, 4, 4), Sizes(1, 4, 2, 1, 600, 16, 16)
    for sizes in dict.fromkeys(subject.fit(each) for each in (few, few._replace(L=1), many)):
        given = dict(zip("qkv", subject.inputs(sizes, trial, peak=2.0), strict=True))
        for label, options in modes(subject, sizes, trial):
            found.append(Call(label, partial(subject.attend, **options), given))
    return found


def calls_on_tokens(subject: Subject, trial: Trial) -> list[Call]:
    """Calls of a layer: on the whole sequence, with a mask, and in pieces with a cache."""
    if subject.layer is None:
        return []
    given = {"x": 2.0 * subject.tokens(2, 17, trial)}
    found = [Call("B=2 L=17", subject.layer, given)]
    if subject.has.causal_alone:
        found.append(Call("B=2 L=17, causal", partial(subject.layer, causal=True), given))
    if subject.has.mask:
        length = subject.length(17)
        keep = pattern(length, length, causal=True)[None, None]
        found.append(Call("B=2 L=17, a mask", partial(subject.layer, keep=keep), given))
    if subject.stepper is not None:
        cut = partial(in_steps, subject, cuts=[13, 3, 1])
        found.append(Call("B=2 L=17 in pieces of [13, 3, 1]", cut, given))
    return found


def rows_alone(call: Call, cause: str) -> None:
    """Raise unless each row of the batch gives what it gives alone; other laws judge NaN."""
    base = call()
    for row in range(base.shape[0]):
        one = slice(row, row + 1)
        alone = call(**{name: x[one] for name, x in call.given.items()})
        alone = torch.where(alone.isnan(), base[one], alone)
        require(call.label, base[one], alone, 1e-4, f"row {row} {cause}")


REFUSALS = (ValueError, TypeError, NotImplementedError, RuntimeError, AssertionError)


def refused(error: SubjectError) -> bool:
    """Whether the subject raised an error that refuses the call, and not an accidental one."""
    cause = error.__cause__
    return isinstance(cause, REFUSALS) and not isinstance(cause, RecursionError)


def causal_call(subject: Subject, queries: int, keys: int) -> dict[str, Any] | None:
    """The options of a causal call on heads, by a mask if there is no other way, or None."""
    options = subject.causal_options()
    if options is None and subject.has.mask:
        return {"keep": pattern(queries, keys, causal=True)[None, None]}
    return options


def attending(
    subject: Subject, sizes: Sizes, *, keep: Tensor | None = None, **options: Any
) -> Tensor:
    """The queries [.., L, 1] that are neither fully masked, which other laws judge, nor padding."""
    visible = subject.visible(sizes.L, sizes.S, **options)[None, None]
    visible = visible if keep is None else visible & keep
    return visible.any(-1, keepdim=True) & ~subject.declared_padding(keep)


def by_definition(run: LawFunction) -> LawFunction:
    """A decorator: the law compares with the definition, and does not apply where that is unknown.

    It is unknown, too, where a counter-example is found and learned parameters enter the scores: a
    temperature, a mixture of heads.
    """

    @wraps(run)
    def checked(subject: Subject, trial: Trial) -> None:
        if subject.has.negative_weights:
            raise NotApplicable("its weights are a difference of two softmaxes")
        if subject.has.unknown_positions:
            raise NotApplicable("positions change its scores in a way that is not known")
        try:
            run(subject, trial)
        except Broken:
            if names := learned_in_scores(subject, Trial("learned")):
                raise NotApplicable(
                    f"its output depends on {' and '.join(names)} beside its projections, and no "
                    "definition says which values are right"
                ) from None
            raise

    return checked
