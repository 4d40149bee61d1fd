"""Laws of unusual callers: another default dtype, autocast."""

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard_verify.blame import line_of
from regard_verify.law import NotApplicable, Sizes, Trial, fail, law, require, where_finite, worst
from regard_verify.laws.cases import calls_on_heads, calls_on_tokens, modes, refused
from regard_verify.subject.decoding import in_steps
from regard_verify.subject.subject import Call, Subject, SubjectError

HALF = torch.finfo(torch.bfloat16).eps / 2  # unit roundoff of bfloat16


def _working_calls(calls: list[Call]) -> list[tuple[Call, Tensor]]:
    """The calls that work in the usual setting, each with its output."""
    found = []
    for call in calls:
        with suppress(SubjectError):  # other laws report it
            found.append((call, call()))
    if not found:
        raise NotApplicable("it could not be called in the usual way")
    return found


@law("bounded", "heads|layer")
def default_dtype(subject: Subject, trial: Trial) -> None:
    """torch's default dtype changes nothing: under a bfloat16 or float64 default, float32 inputs
    give the same, or are refused.
    """
    usual = _working_calls([*calls_on_heads(subject, trial), *calls_on_tokens(subject, trial)])
    rounding = _rounded_scale(subject, usual)

    answers = 0
    # The wider dtype first: compiled code that assumes float32 then gives wrong values, and does
    # not write beyond what was allocated.
    for dtype, share in ((torch.float64, 1e-5), (torch.bfloat16, 1e-3 + rounding)):
        for call, base in usual:
            label = f"{call.label}, default dtype {dtype}"
            got = _under(dtype, call, label)
            if got is not None:
                answers += 1
                _unchanged(label, got, base, share)
    if not answers:
        raise NotApplicable("it refuses to run under another default dtype")


def _under(dtype: torch.dtype, call: Call, label: str) -> Tensor | None:
    """The output under a default dtype; None if that is refused."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return call()
    except SubjectError as error:
        code = line_of(error.__cause__ or error).partition(": ")[2]
        own = code.startswith(("raise", "assert"))  # the subject raises it, and torch does not
        if _MIXED.search(str(error)) and not own:
            fail(label, "", "the same output", "an error", f"a constant has that dtype: {error}")
        if refused(error):
            return None
        raise
    finally:
        torch.set_default_dtype(before)


_MIXED = re.compile(r"scalar type|same dtype|dtype")  # in the errors of torch for such products


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


@law("bounded", "heads|layer")
def autocast_precision(subject: Subject, trial: Trial) -> None:
    """Under autocast the error is at most that of the same code in bfloat16.

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
    found: list[tuple[str, Any, Any, dict[str, Tensor]]] = []
    if subject.attend is not None:
        sizes = subject.fit(Sizes(2, 4, 2, 33, 65, 16, 16))
        heads = dict(zip("qkv", subject.inputs(sizes, trial, peak=8.0), strict=True))
        cases = list(modes(subject, sizes, trial))
        if subject.has.softcap and subject.module is None:
            cases.append((f"{sizes}, softcap 20", {"softcap": 20.0}))
        for label, options in cases:
            run, other = partial(subject.attend, **options), partial(half.attend, **options)
            found.append((label, run, other, heads))
    if subject.layer is not None:
        x = {"x": 2.0 * subject.tokens(2, 17, trial)}
        found.append(("B=2 L=17", subject.layer, half.layer, x))
    if subject.stepper is not None and half.stepper is not None:
        run, other = (partial(in_steps, each, cuts=[12, 4, 1]) for each in (subject, half))
        found.append(("B=2 L=17 in pieces", run, other, x))
    for label, run, other, given in found:
        rounded = {name: each.bfloat16() for name, each in given.items()}
        whole = {name: each.float() for name, each in rounded.items()}
        yield Call(label, run, whole), Call(label, other, rounded)


def _in_half(subject: Subject) -> Any:
    """The subject with its weights in bfloat16; itself, if it has none."""
    if subject.module is None:
        return subject
    half: Any = copy.copy(subject)
    try:
        half.attend, half.layer = copy.deepcopy((subject.attend, subject.layer))
        half.layer.module.bfloat16()
        if half.attend is not None:
            half.attend.call.module.bfloat16()
    except Exception as error:
        raise NotApplicable(f"it cannot be copied: {type(error).__name__}") from error
    half.stepper = subject.stepper and subject.stepper.of(half.layer.module)
    return half


@law("exact", "heads|layer")
def autocast_dtype(subject: Subject, trial: Trial) -> None:
    """Under autocast the output has one dtype: masked or not, with gradients or without, in pieces
    or at once.
    """
    calls = calls_on_tokens(subject, trial)
    if subject.module is None:
        calls += calls_on_heads(subject, trial)
    found: dict[str, torch.dtype] = {}
    for call, _ in _working_calls(calls):
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
