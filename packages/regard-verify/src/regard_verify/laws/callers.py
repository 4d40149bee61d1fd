"""Laws of unusual callers: another default dtype, autocast, forward-mode derivatives."""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard_verify.blame import line_of
from regard_verify.forked import Announce, in_a_copy
from regard_verify.law import NotApplicable, Sizes, Trial, fail, law, require, where_finite, worst
from regard_verify.laws.cases import (
    REFUSALS,
    calls_on_heads,
    calls_on_tokens,
    modes,
    refused,
)
from regard_verify.subject.decoding import in_steps
from regard_verify.subject.subject import Call, Subject, SubjectError

HALF = torch.finfo(torch.bfloat16).eps / 2  # unit roundoff of bfloat16


def _that_run(calls: list[Call]) -> list[tuple[Call, Tensor]]:
    """The calls that work in the usual setting, each with its output."""
    found = []
    for call in calls:
        with suppress(SubjectError):  # other laws report it
            found.append((call, call()))
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


@law("bounded", "heads|layer")
def default_dtype(subject: Subject, trial: Trial) -> None:
    """torch's default dtype changes nothing: under a bfloat16 or float64 default, float32 inputs
    give the same, or are refused.
    """
    usual = _that_run([*calls_on_heads(subject, trial), *calls_on_tokens(subject, trial)])
    rounding = _rounded_scale(subject, usual)

    def check_defaults(announce: Announce) -> None:
        answers = 0
        for dtype, share in ((torch.bfloat16, 1e-3 + rounding), (torch.float64, 1e-5)):
            for call, base in usual:
                label = f"{call.label}, default dtype {dtype}"
                announce(label)
                got = _under(dtype, call, label)
                if got is None:
                    continue
                answers += 1
                _unchanged(label, got, base, share)
        if not answers:
            raise NotApplicable("it refuses to run under another default dtype")

    in_a_copy(lambda: _run_all(usual), check_defaults)


def _run_all(usual: list[tuple[Call, Tensor]]) -> None:
    for call, _ in usual:
        call()


def _under(dtype: torch.dtype, call: Call, label: str) -> Tensor | None:
    """The output under a default dtype; None if that is refused."""
    try:
        with _default(dtype):
            return call()
    except SubjectError as error:
        if _MIXED.search(str(error)) and not _is_raised(error):
            fail(label, "", "the same output", "an error", f"a constant has that dtype: {error}")
        if refused(error):
            return None
        raise


_MIXED = re.compile(r"scalar type|same dtype|dtype")  # in the errors of torch for such products


def _is_raised(error: SubjectError) -> bool:
    """Whether the subject raises it in so many words, and torch does not."""
    code = line_of(error.__cause__ or error).partition(": ")[2]
    return code.startswith(("raise", "assert"))


def _rounded_scale(subject: Subject, usual: list[tuple[Call, Tensor]]) -> float:
    """The allowed error of a scale that is a tensor of the default dtype, in bfloat16.

    `torch.tensor(head_dim).sqrt()` is such a scale. This law is not about it.
    """
    dims = {call.given["q"].shape[-1] for call, _ in usual if "q" in call.given}
    dims |= {subject.conventions.head_dim or 1}
    roots = [power for dim in dims for power in (dim**0.5, dim**-0.5)]
    errors = [abs(float(torch.tensor(root).bfloat16()) / root - 1.0) for root in roots]
    return 4.0 * max(errors, default=0.0)  # scores are several times larger than their effect


def _unchanged(label: str, got: Tensor, base: Tensor, share: float) -> None:
    if got.dtype != base.dtype:
        cause = "the output's dtype is the default's, not the inputs'"
        fail(label, "", f"{base.dtype}", f"{got.dtype}", cause)
    base = where_finite(base, got)
    size = float(base.abs().max()) if base.numel() else 0.0
    cause = "something is allocated or computed in the default dtype"
    require(label, got, base, share * (size + 1e-3), cause)


class Slope(NamedTuple):
    """One input of a call, a direction, and the derivative of the output along it."""

    call: Call
    name: str
    tangent: Tensor
    slope: Tensor

    @property
    def label(self) -> str:
        return f"{self.call.label}, along {self.name}"


@law("bounded", "heads|layer", quick=False)
def forward_mode(subject: Subject, trial: Trial) -> None:
    """A forward-mode derivative is the slope of the output, or is refused; it is never missing."""
    calls = [*calls_on_heads(subject, trial), *calls_on_tokens(subject, trial, pieces=False)]
    calls += _after_cached_tokens(subject, trial)
    slopes = [each for call, out in _that_run(calls) for each in _slopes(call, out, trial)]
    if not slopes:
        raise NotApplicable("its output has no gradient, or no slope")

    def check_derivatives(announce: Announce) -> None:
        answers = 0
        for way, derive in (("dual numbers", _dual), ("torch.func.jvp", _jvp)):
            for each in slopes:
                label = f"{each.label}, {way}"
                announce(label)
                answers += _is_the_slope(label, each, derive)
        if not answers:
            raise NotApplicable("it refuses forward-mode derivatives")

    _load_forward_mode()
    in_a_copy(lambda: _run_all([(each.call, each.slope) for each in slopes]), check_derivatives)


@cache
def _load_forward_mode() -> None:
    """torch imports its compiler for the first derivative: two seconds, not in each fork."""
    x = torch.ones(1)
    torch.func.jvp(lambda y: 2.0 * y, (x,), (x,))


def _after_cached_tokens(subject: Subject, trial: Trial) -> list[Call]:
    """One token after four: the derivative is along x alone, not along the cache."""
    if subject.stepper is None:
        return []
    stepper, first = subject.stepper, subject.tokens(2, 4, trial)

    def last(x: Tensor) -> Tensor:
        _, state = stepper.step(first, stepper.new())
        return stepper.follow(x, state)[0]

    return [Call("B=2, a token after 4", last, {"x": subject.tokens(2, 1, trial)})]


def _slopes(call: Call, out: Tensor, trial: Trial) -> Iterator[Slope]:
    """The slopes along each input, where the output is smooth and has the same gradient."""
    for name, x in call.given.items():
        tangent = trial.randn(*x.shape)
        coarse, fine = (
            (call(**{name: x + h * tangent}) - call(**{name: x - h * tangent})) / (2 * h)
            for h in (2.0**-6, 2.0**-7)
        )
        smooth = worst(coarse, fine)[1] <= _allowed(fine) if fine.numel() else False
        if smooth and _gradient_agrees(call, name, tangent, fine, trial):
            yield Slope(call, name, tangent, fine)


def _allowed(slope: Tensor) -> float:
    """The error of differences in float32: rounding divided by the step, and curvature."""
    return 1e-2 * (1.0 + float(slope.abs().max()))


def _gradient_agrees(call: Call, name: str, tangent: Tensor, slope: Tensor, trial: Trial) -> bool:
    """Whether its gradient is the slope too, or is refused.

    A function without gradients, or one that cuts them on purpose, need not have other derivatives.
    """
    given = {n: x.clone() for n, x in call.given.items()}
    x = given[name].requires_grad_()
    push = trial.randn(*slope.shape)
    try:
        out = call.target(**given)
        if not out.requires_grad:
            return False
        (grad,) = torch.autograd.grad((out * push).sum(), [x], allow_unused=True)
    except (SubjectError, RuntimeError):
        return True
    along = 0.0 if grad is None else float((grad * tangent).sum())
    return abs(along - float((slope * push).sum())) <= _allowed(slope) * slope.numel() ** 0.5


def _is_the_slope(label: str, each: Slope, derive: Callable[[Slope], Tensor | None]) -> bool:
    """Whether the derivative is not refused; a wrong one is raised."""
    try:
        got = derive(each)
    except SubjectError as error:
        if refused(error):
            return False
        raise
    except REFUSALS:  # raised by torch itself
        return False
    cause = "the output has no tangent" if got is None else "the tangent is not the slope"
    found = torch.zeros_like(each.slope) if got is None else got
    require(label, found, each.slope, _allowed(each.slope), cause)
    return True


def _dual(each: Slope) -> Tensor | None:
    given = {name: x.clone() for name, x in each.call.given.items()}
    with forward_ad.dual_level():
        given[each.name] = forward_ad.make_dual(given[each.name], each.tangent)
        tangent: Tensor | None = forward_ad.unpack_dual(each.call.target(**given)).tangent
        return None if tangent is None else tangent.clone()


def _jvp(each: Slope) -> Tensor | None:
    def moved(x: Tensor) -> Tensor:
        return each.call.target(**{**each.call.given, each.name: x})

    x = each.call.given[each.name].clone()
    tangent: Tensor = torch.func.jvp(moved, (x,), (each.tangent,))[1]
    return tangent


@law("bounded", "heads|layer")
def autocast_precision(subject: Subject, trial: Trial) -> None:
    """Under autocast no more is lost than where everything is in bfloat16.

    Two or three times the error of the same code in bfloat16, or of rounding its output.
    """
    checked = False
    for call, half in _calls_and_halves(subject, trial):
        try:
            right, plain = call().double(), half().double()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = call().double()
        except SubjectError:
            continue  # it refuses bfloat16 or autocast, or other laws report it
        checked = True
        right = torch.where(right.isfinite() & plain.isfinite(), right, got)
        largest = float(call.given.get("v", torch.zeros(1)).abs().max())
        rounding = 1.5 * HALF * (largest or float(right.abs().max()))
        own = worst(where_finite(plain, right), right)[1]
        cause = "autocast loses more than bfloat16 does, as where it casts float32 products back"
        times = 2 if "v" in call.given else 3  # a layer rounds its projections as well
        require(f"{call.label}, autocast", got, right, times * max(own, rounding), cause)
    if not checked:
        raise NotApplicable("it could not be called in bfloat16 and under autocast")


def _calls_and_halves(subject: Subject, trial: Trial) -> Iterator[tuple[Call, Call]]:
    """Calls in float32 on values that bfloat16 can represent; the same with all in bfloat16."""
    half = _in_half(subject)
    if subject.attend is not None:
        sizes = subject.fit(Sizes(2, 4, 2, 33, 65, 16, 16))
        heads = dict(zip("qkv", subject.inputs(sizes, trial, peak=8.0), strict=True))
        cases = list(modes(subject, sizes, trial))
        if subject.has.softcap and subject.module is None:
            cases.append((f"{sizes}, softcap 20", {"softcap": 20.0}))
        for label, options in cases:
            yield _pair(label, subject.attend, half.attend, options, heads)
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
    label: str, call: Any, half: Any, options: dict[str, Any], given: dict[str, Tensor]
) -> tuple[Call, Call]:
    rounded = {name: x.bfloat16() for name, x in given.items()}
    whole = {name: x.float() for name, x in rounded.items()}
    return Call(label, partial(call, **options), whole), Call(
        label, partial(half, **options), rounded
    )


@law("exact", "heads|layer")
def autocast_dtype(subject: Subject, trial: Trial) -> None:
    """Under autocast the output has one dtype: masked or not, with gradients or without, in pieces
    or at once.
    """
    calls = calls_on_tokens(subject, trial)
    if subject.module is None:
        calls += calls_on_heads(subject, trial)
    found: dict[str, torch.dtype] = {}
    for call, _ in _that_run(calls):
        with torch.autocast("cpu", dtype=torch.bfloat16), suppress(SubjectError):  # it may refuse
            found[call.label] = call().dtype
            found[f"{call.label}, with gradients"] = call.with_gradients()[0].dtype
    if not found:
        raise NotApplicable("it could not be called under autocast")
    first, dtype = next(iter(found.items()))
    for label, other in found.items():
        if other != dtype:
            fail(label, "", f"{dtype}, as of {first}", str(other),
                 "the dtype under autocast depends on the path through the code")  # fmt: skip
