"""Laws of the caller: another default dtype, autocast, forward-mode derivatives."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.verify.law import NotApplicable, Sizes, Trial, compare, fail, insist, law, worst
from regard.verify.laws.cases import (
    REFUSALS,
    Way,
    modes,
    refused,
    ways_with_heads,
    ways_with_tokens,
)
from regard.verify.run.forked import Tell, in_a_copy
from regard.verify.subject.decoding import in_steps
from regard.verify.subject.subject import Subject, SubjectError

HALF = torch.finfo(torch.bfloat16).eps / 2  # unit roundoff of bfloat16


def _that_run(ways: list[Way]) -> list[tuple[Way, Tensor]]:
    """The ways that work without anything unusual, each with its output."""
    found = []
    for way in ways:
        try:
            found.append((way, way()))
        except SubjectError:
            continue  # other laws say so
    if not found:
        raise NotApplicable("it could not be called in the usual way")
    return found


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@law(
    "torch's default dtype changes nothing: from float32 inputs it gives the same under a bfloat16 "
    "or a float64 default, or refuses.",
    "bounded",
    "memory allocated or tables computed in the default dtype, a constant that promotes",
    "heads|layer",
)
def default_dtype(subject: Subject, trial: Trial) -> None:
    tried = _that_run([*ways_with_heads(subject, trial), *ways_with_tokens(subject, trial)])
    slip = _rounded_scale(subject, tried)

    def ask(tell: Tell) -> None:
        answers = 0
        for dtype, share in ((torch.bfloat16, 1e-3 + slip), (torch.float64, 1e-5)):
            for way, base in tried:
                said = f"{way.said}, default dtype {dtype}"
                tell(said)
                got = _under(dtype, way)
                if got is None:
                    continue
                answers += 1
                _unchanged(said, got, base, share)
        if not answers:
            raise NotApplicable("it refuses to run under another default dtype")

    in_a_copy(lambda: _run_all(tried), ask)


def _run_all(tried: list[tuple[Way, Tensor]]) -> None:
    for way, _ in tried:
        way()


def _under(dtype: torch.dtype, way: Way) -> Tensor | None:
    """What it gives under a default dtype; None if it refuses."""
    try:
        with _default(dtype):
            return way()
    except SubjectError as error:
        if refused(error):
            return None
        raise


def _rounded_scale(subject: Subject, tried: list[tuple[Way, Tensor]]) -> float:
    """How much of the output a scale that is a tensor of the default dtype may cost in bfloat16.

    `torch.tensor(head_dim).sqrt()` is such a scale. It is not what this law is about.
    """
    dims = {way.given["q"].shape[-1] for way, _ in tried if "q" in way.given}
    dims |= {subject.conventions.head_dim or 1}
    roots = [power for dim in dims for power in (dim**0.5, dim**-0.5)]
    slips = [abs(float(torch.tensor(root).bfloat16()) / root - 1.0) for root in roots]
    return 4.0 * max(slips, default=0.0)  # scores are several times larger than what they move


def _unchanged(said: str, got: Tensor, base: Tensor, share: float) -> None:
    if got.dtype != base.dtype:
        fail(said, "", f"{base.dtype}", f"{got.dtype}", "the output's dtype is the default's, "
             "not the inputs'")  # fmt: skip
    base = torch.where(base.isfinite(), base, got)
    size = float(base.abs().max()) if base.numel() else 0.0
    insist(compare(said, got, base, share * (size + 1e-3),
                   "something is allocated or computed in the default dtype"))  # fmt: skip


class Slope(NamedTuple):
    """A direction in which one input of `way` is moved, and how fast the output moves then."""

    way: Way
    name: str
    tangent: Tensor
    slope: Tensor

    @property
    def said(self) -> str:
        return f"{self.way.said}, along {self.name}"


@law(
    "A forward-mode derivative is the slope of the output, or is refused; it is never missing.",
    "bounded",
    "a kernel that is chosen because nothing requires a gradient, a tangent that is dropped",
    "heads|layer",
    quick=False,
)
def forward_mode(subject: Subject, trial: Trial) -> None:
    ways = [*ways_with_heads(subject, trial), *ways_with_tokens(subject, trial, pieces=False)]
    ways += _after_a_past(subject, trial)
    slopes = [each for way, out in _that_run(ways) for each in _slopes(way, out, trial)]
    if not slopes:
        raise NotApplicable("its output has no gradient, or no slope")

    def ask(tell: Tell) -> None:
        answers = 0
        for asked, derive in (("dual numbers", _dual), ("torch.func.jvp", _jvp)):
            for each in slopes:
                said = f"{each.said}, {asked}"
                tell(said)
                answers += _is_the_slope(said, each, derive)
        if not answers:
            raise NotApplicable("it refuses forward-mode derivatives")

    _load_forward_mode()
    in_a_copy(lambda: _run_all([(each.way, each.slope) for each in slopes]), ask)


@cache
def _load_forward_mode() -> None:
    """torch imports its compiler for the first derivative: two seconds, once and not in a copy."""
    x = torch.ones(1)
    torch.func.jvp(lambda y: 2.0 * y, (x,), (x,))


def _after_a_past(subject: Subject, trial: Trial) -> list[Way]:
    """One token after four: x alone is moved, not the past."""
    if subject.stepper is None:
        return []
    stepper, first = subject.stepper, subject.tokens(2, 4, trial)

    def last(x: Tensor) -> Tensor:
        _, past = stepper.step(first, stepper.new())
        return stepper.follow(x, past)[0]

    return [Way("B=2, a token after 4", last, {"x": subject.tokens(2, 1, trial)})]


def _slopes(way: Way, out: Tensor, trial: Trial) -> Iterator[Slope]:
    """Along each input, where the output moves smoothly and its gradient says the same."""
    for name, x in way.given.items():
        tangent = trial.randn(*x.shape)
        coarse, fine = (
            (way(**{name: x + h * tangent}) - way(**{name: x - h * tangent})) / (2 * h)
            for h in (2.0**-6, 2.0**-7)
        )
        smooth = worst(coarse, fine)[1] <= _allowed(fine) if fine.numel() else False
        if smooth and _gradient_agrees(way, name, tangent, fine, trial):
            yield Slope(way, name, tangent, fine)


def _allowed(slope: Tensor) -> float:
    """Of differences in float32: rounding over the step, and what the slope bends in it."""
    return 1e-2 * (1.0 + float(slope.abs().max()))


def _gradient_agrees(way: Way, name: str, tangent: Tensor, slope: Tensor, trial: Trial) -> bool:
    """Whether its gradient is the slope too, or is refused. A function without any gradient, or
    one that cuts it on purpose, is not asked for another kind of derivative."""
    given = {n: x.clone() for n, x in way.given.items()}
    x = given[name].requires_grad_()
    push = trial.randn(*slope.shape)
    try:
        out = way.call(**given)
        if not out.requires_grad:
            return False
        (grad,) = torch.autograd.grad((out * push).sum(), [x], allow_unused=True)
    except (SubjectError, RuntimeError):
        return True
    told = 0.0 if grad is None else float((grad * tangent).sum())
    return abs(told - float((slope * push).sum())) <= _allowed(slope) * slope.numel() ** 0.5


def _is_the_slope(said: str, each: Slope, derive: Callable[[Slope], Tensor | None]) -> bool:
    """Whether it answers at all; a wrong answer is raised."""
    try:
        got = derive(each)
    except SubjectError as error:
        if refused(error):
            return False
        raise
    except REFUSALS:  # of torch itself
        return False
    cause = "the output has no tangent" if got is None else "the tangent is not the slope"
    found = torch.zeros_like(each.slope) if got is None else got
    insist(compare(said, found, each.slope, _allowed(each.slope), cause))
    return True


def _dual(each: Slope) -> Tensor | None:
    given = {name: x.clone() for name, x in each.way.given.items()}
    with forward_ad.dual_level():
        given[each.name] = forward_ad.make_dual(given[each.name], each.tangent)
        tangent: Tensor | None = forward_ad.unpack_dual(each.way.call(**given)).tangent
        return None if tangent is None else tangent.clone()


def _jvp(each: Slope) -> Tensor | None:
    def moved(x: Tensor) -> Tensor:
        return each.way.call(**{**each.way.given, each.name: x})

    x = each.way.given[each.name].clone()
    tangent: Tensor = torch.func.jvp(moved, (x,), (each.tangent,))[1]
    return tangent


@law(
    "Under autocast no more is lost than where everything is in bfloat16.",
    "bounded",
    "float32 products that autocast casts back, tables and sums in half precision",
    "heads|layer",
)
def autocast_precision(subject: Subject, trial: Trial) -> None:
    """Twice the error of the same code in bfloat16, or of rounding weights and output."""
    judged = 0
    for way, half in _ways_and_halves(subject, trial):
        try:
            right, plain = way().double(), half().double()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = way().double()
        except SubjectError:
            continue  # it refuses bfloat16 or autocast, or other laws say so
        judged += 1
        right = torch.where(right.isfinite() & plain.isfinite(), right, got)
        largest = max((float(x.abs().max()) for n, x in way.given.items() if n == "v"), default=0.0)
        rounding = 1.5 * HALF * (largest or float(right.abs().max()))
        own = worst(torch.where(plain.isfinite(), plain, right), right)[1]
        insist(compare(f"{way.said}, autocast", got, right, 2 * max(own, rounding),
                       "autocast loses more than bfloat16 does, as where it casts float32 products "
                       "back"))  # fmt: skip
    if not judged:
        raise NotApplicable("it could not be called in bfloat16 and under autocast")


def _ways_and_halves(subject: Subject, trial: Trial) -> Iterator[tuple[Way, Way]]:
    """Ways in float32 on numbers that bfloat16 holds; the same with everything in bfloat16."""
    half = _in_half(subject)
    if subject.attend is not None:
        sizes = subject.fit(Sizes(2, 4, 2, 33, 65, 16, 16))
        heads = dict(zip("qkv", subject.inputs(sizes, trial, peak=8.0), strict=True))
        asked = dict(modes(subject, sizes, trial))
        if "softcap" in subject.has and subject.module is None:
            asked["softcap 20"] = {"softcap": 20.0}
        for said, options in asked.items():
            yield _pair(f"{sizes}, {said}", subject.attend, half.attend, options, heads)
    if subject.layer is not None:
        x = {"x": 2.0 * subject.tokens(2, 17, trial)}
        yield _pair("B=2 L=17", subject.layer, half.layer, {}, x)
    if subject.stepper is not None and half.stepper is not None:
        steps, cuts = partial(in_steps, subject), {"cuts": [12, 4, 1]}
        yield _pair("B=2 L=17 in pieces", steps, partial(in_steps, half), cuts, x)


def _in_half(subject: Subject) -> Subject:
    """The subject with its weights in bfloat16; itself, if it has none."""
    if subject.module is None:
        return subject
    attend: Any
    layer: Any
    try:
        attend, layer = copy.deepcopy((subject.attend, subject.layer))
        layer.module.bfloat16()
        if attend is not None:
            attend.call.module.bfloat16()
    except Exception as error:
        raise NotApplicable(f"it cannot be copied: {type(error).__name__}") from error
    stepper = None if subject.stepper is None else subject.stepper.of(layer.module)
    return replace(subject, attend=attend, layer=layer, stepper=stepper)


def _pair(
    said: str, call: Any, half: Any, options: dict[str, Any], given: dict[str, Tensor]
) -> tuple[Way, Way]:
    said = said.removesuffix(", ")
    rounded = {name: x.bfloat16() for name, x in given.items()}
    whole = {name: x.float() for name, x in rounded.items()}
    return Way(said, partial(call, **options), whole), Way(said, partial(half, **options), rounded)


@law(
    "Under autocast the output has one dtype: masked or not, with gradients or without, in pieces "
    "or at once.",
    "exact",
    "a path that casts its output back, and another that does not",
    "heads|layer",
)
def autocast_dtype(subject: Subject, trial: Trial) -> None:
    ways = ways_with_tokens(subject, trial)
    if subject.module is None:
        ways += ways_with_heads(subject, trial)
    found: dict[str, torch.dtype] = {}
    for way, _ in _that_run(ways):
        with torch.autocast("cpu", dtype=torch.bfloat16), suppress(SubjectError):  # it may refuse
            found[way.said] = way().dtype
            given = {name: x.clone().requires_grad_() for name, x in way.given.items()}
            found[f"{way.said}, with gradients"] = way.call(**given).dtype
    if not found:
        raise NotApplicable("it could not be called under autocast")
    first, dtype = next(iter(found.items()))
    for said, other in found.items():
        if other != dtype:
            fail(said, "", f"{dtype}, as of {first}", str(other),
                 "the dtype under autocast depends on the path that is taken")  # fmt: skip


LAWS = (
    default_dtype,
    forward_mode,
    autocast_precision,
    autocast_dtype,
)
