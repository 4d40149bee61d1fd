"""Probing a function of (q, k, v): what was not declared is found out by small calls.

What is declared is not probed. What is found goes into conventions, abilities and report.
The probes of masks, patterns, rotation and scale also serve modules, once they have heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from regard_verify.blame import line_of, with_line
from regard_verify.law import Sizes, Trial
from regard_verify.oracle import pattern
from regard_verify.subject.conventions import pattern_length, probe_length
from regard_verify.subject.functions import (
    LAYOUTS,
    ONE_HEAD,
    FunctionCall,
    canonical,
    laid_out,
    options_of,
    shape_in,
)
from regard_verify.subject.mask_forms import MaskForm, forms, mask_arguments
from regard_verify.subject.probe_weights import probe_scores
from regard_verify.subject.signatures import parameters_of, required_of
from regard_verify.subject.subject import Subject, SubjectError, output_of
from regard_verify.visibility import nearest_pattern

MULTIPLES = (None, 2, 3, 4, 8, 16, 32, 64, 128)  # of which lengths may have to be multiples


def probe_function(target: Callable[..., Any], subject: Subject, trial: Trial) -> None:
    """Find out what a function of (q, k, v) takes and returns; the subject is changed."""
    own = subject.conventions
    names = options_of(target, own)
    call = _first_call(target, subject, names, trial)
    layout, returns = call.layout, call.returns
    default = parameters_of(target)[names["scale"]].default if "scale" in names else None
    scale = default if type(default) is float and default > 0 else None
    own = call.own.found(layout=layout, returns=returns, scale=scale)
    call = replace(call, own=own)
    subject.fixed = {"BLD": {"H": 1, "G": 1}, "LD": {"B": 1, "H": 1, "G": 1}}.get(layout, {})
    subject.conventions = own
    say_multiple(subject)
    has = subject.has
    has.heads = True
    has.causal, has.window, has.scale = "causal" in names, "window" in names, "scale" in names
    has.softcap, has.bias, has.weights = "softcap" in names, "bias" in names, "weights" in names
    subject.inferred["layout"] = layout if layout == returns else f"{layout}, returns {returns}"
    subject.attend = call
    few = Sizes(1, 1, 1, 3, 3, 2, 2)
    has.dropout = "dropout" in names and not _refusal(subject, few, trial, dropout=0.5)
    _probe_sizes(subject, trial)
    probe_pattern(subject, trial)
    has.window &= not subject.conventions.block  # blocks have sizes of another kind
    if has.window and (reason := _refusal(subject, Sizes(1, 1, 1, 4, 4, 4, 4), trial, window=2)):
        has.window = False
        subject.notes.append(f"A window is refused: {reason}.")
    form = _probe_mask(subject, _mask_names(own.mask, target), trial)
    if form is not None:
        subject.attend = replace(call, own=subject.conventions, form=form)
        subject.form = form
    probe_alignment(subject, trial)
    probe_scores(subject, trial)


def _refusal(subject: Subject, sizes: Sizes, trial: Trial, **options: Any) -> str:
    """Why a call on inputs of these sizes, with these options, is refused; "" if it is not."""
    try:
        subject.run(*subject.inputs(subject.fit(sizes), trial), **options)
    except SubjectError as error:
        return str(error)
    return ""


def _mask_names(declared: str | None, target: Any) -> list[str]:
    if declared is not None:
        return [declared] if declared else []
    return mask_arguments(target)


def _first_call(target: Any, subject: Subject, names: dict[str, str], trial: Trial) -> FunctionCall:
    """The call in the first layout that the function accepts and in which heads do not mix."""
    own = subject.conventions
    if own.layout not in (None, *LAYOUTS):
        raise SubjectError(
            f"the layout of a function is {', '.join(LAYOUTS)}; {own.layout} is declared: name a "
            "function of q, k and v [B, H, L, D] that calls it"
        )
    failures: list[str] = []
    errors: list[SubjectError] = []
    mixed: list[FunctionCall] = []
    layouts = [own.layout] if own.layout else LAYOUTS
    required = [each for each in _mask_names(own.mask, target) if each in required_of(target)]
    multiples = [own.multiple] if own.multiple else MULTIPLES
    for multiple, layout, form in product(multiples, layouts, _first_masks(required)):
        if mixed and multiple != mixed[0].own.multiple:
            break
        tried, spare = replace(own, multiple=multiple), tuple({*required} - {form.argument})
        call = FunctionCall(target, tried, form, layout, layout, names, spare=spare)
        try:
            found = replace(call, returns=own.returns or _returns(call, trial))
            if own.layout or layout in ONE_HEAD or _heads_are_apart(found, trial):
                return found
        except SubjectError as error:
            failures.append(f"{layout}: {with_line(error)}")
            errors.append(error)
            continue
        mixed.append(found)
    if mixed:  # in every layout: take the most common one, and the laws report what is wrong
        return mixed[0]
    raise refusal(
        f"it could not be called with (q, k, v): {summary(failures)}; if it takes other inputs "
        "(packed, or heads side by side), name a function of q, k and v [B, H, L, D] that calls "
        "it, or declare options; if layout is declared, an error is a broken law",
        errors,
        own.layout,
    )


def _first_masks(required: Sequence[str]) -> list[MaskForm]:
    """None, and all keys visible in each polarity: masks to call a function with at first."""
    shown = (MaskForm(""), MaskForm("", "drop"), MaskForm("", "additive", dtype="float"))
    return [MaskForm(""), *(form._replace(argument=name) for name in required for form in shown)]


def refusal(text: str, errors: Sequence[SubjectError], declared: object) -> SubjectError:
    """The error for a subject that accepts no input, with the cause of the likeliest's.

    Errors of shapes tell that the code fails only if the shape of inputs is `declared`, and
    otherwise that it takes other inputs.
    """
    error = SubjectError(text)
    error.__cause__, error.line = errors[0].__cause__, line_of(errors[0])
    causes = [each.__cause__ for each in errors if not isinstance(each.__cause__, RecursionError)]
    of_shapes = any(isinstance(cause, RuntimeError) for cause in causes)  # of einops, too
    error.crashes = declared is not None or not of_shapes
    return error


def say_multiple(subject: Subject) -> None:
    """Say which lengths the subject takes."""
    if subject.conventions.multiple:
        subject.inferred["lengths"] = f"multiples of {subject.conventions.multiple}"


def summary(failures: list[str]) -> str:
    """The failures in all layouts, without the layout if they are the same."""
    reasons = dict.fromkeys(failure.split(": ", 1)[1] for failure in failures)
    return next(iter(reasons)) if len(reasons) == 1 else "; ".join(dict.fromkeys(failures))


def _returns(call: FunctionCall, trial: Trial) -> str:
    """The layout of the function's output."""
    sizes = _sizes_for(call, Sizes(2, 3, 3, 5, 5, 4, 4))
    q, k, v = Subject("", "function", call.own).inputs(sizes, trial)
    with torch.no_grad():
        out = output_of(call.result(q, k, v), q.numel())
    shape = tuple(q.shape)
    if call.layout in ONE_HEAD:
        canonical(out, call.layout, shape)
        return call.layout
    for returns in ("BHLD", "BLHD", "BLE"):
        if tuple(out.shape) == shape_in(returns, shape):
            return returns
    raise SubjectError(f"from q, k and v of shape {list(laid_out(q, call.layout).shape)} it "
                       f"returned shape {list(out.shape)}")  # fmt: skip


def _sizes_for(call: FunctionCall, sizes: Sizes) -> Sizes:
    """These sizes, with the heads and lengths that the layout and the function allow."""
    if call.own.multiple:
        sizes = sizes._replace(L=probe_length(call.own), S=probe_length(call.own))
    if call.layout in ONE_HEAD:
        return sizes._replace(H=1, G=1, B=sizes.B if call.layout == "BLD" else 1)
    return sizes


def _heads_are_apart(call: FunctionCall, trial: Trial) -> bool:
    """Whether a value of one head changes that head alone, and more than one of its rows."""
    sizes = _sizes_for(call, Sizes(1, 3, 3, 5, 5, 4, 4))
    q, k, v = Subject("", "function", call.own).inputs(sizes, trial)
    with torch.no_grad():
        base = call(q, k, v)
        other = v.clone()
        other[:, 1 % sizes.G, 0] += 1.0
        moved = (call(q, k, other) != base).any(-1)[0]
    rows = moved.any(-1)
    share = sizes.H // sizes.G
    return bool(rows.any()) and int(rows.sum()) <= share and int(moved.sum()) > share


def _probe_sizes(subject: Subject, trial: Trial) -> None:
    """Whether it accepts fewer key heads, values of other width, other numbers of keys."""
    has = subject.has
    if not subject.fixed:
        has.gqa = True  # or `fit` would change the sizes
        has.gqa = not _refusal(subject, Sizes(2, 6, 2, 5, 5, 4, 4), trial)
    has.even_width = bool(_refusal(subject, Sizes(2, 2, 2, 5, 5, 1, 1), trial))
    has.wide = True
    has.wide = not _refusal(subject, Sizes(2, 2, 2, 5, 5, 4, 3), trial)
    has.cross = True
    has.cross = not _refusal(subject, Sizes(2, 2, 2, 3, 5, 4, 4), trial)
    heads = subject.fixed.get("H", 2)
    has.several_heads = heads > 1
    has.gqa |= subject.fixed.get("G", heads) != heads
    if heads == 1:
        subject.notes.append("It has one head: laws of several heads do not apply.")


def probe_pattern(subject: Subject, trial: Trial) -> None:
    """Find the keys that the subject hides by default."""
    own = subject.conventions
    if own.causal is not None and own.window is not None:
        return
    length = pattern_length(own)
    attended = subject.attended(subject.fit(Sizes(1, 1, 1, length, length, 4, length)), trial)
    pattern, subject.inferred["attends to"] = nearest_pattern(attended[0].any(0))
    subject.conventions = own.found(**pattern)
    subject.has.cross &= not subject.conventions.block  # blocks are counted from the first token


def _probe_mask(subject: Subject, names: list[str], trial: Trial) -> MaskForm | None:
    """The form of mask that hides a key, and only that key."""
    call, own = subject.attend, subject.conventions
    assert isinstance(call, FunctionCall)

    def hides(form: MaskForm) -> bool:
        subject.attend = replace(call, own=subject.conventions, form=form)
        return hides_one_key(subject, trial)

    try:
        return choose_form(subject, list(forms(names, own)), hides, names)
    finally:
        subject.attend = call


def choose_form(
    subject: Subject, tried: list[MaskForm], hides: Callable[[MaskForm], bool], names: list[str]
) -> MaskForm | None:
    """The first form that works; a form that is declared in full is taken, so that laws test it."""
    own = subject.conventions
    working = []
    for form in tried:
        try:
            if hides(form):
                working.append(form)
                if form.shape in ("BHLS", "B1LS", "NLS", "BLS") or len(working) > 3:
                    break
        except SubjectError:
            continue
    if not working and own.mask and own.polarity:
        shape, dtype = own.mask_shape or "BHLS", own.mask_dtype
        dtype = dtype or ("float" if own.polarity == "additive" else "bool")
        working = [MaskForm(own.mask, own.polarity, shape, dtype)]
    if working:
        form = working[0]
        subject.conventions = own.found(
            mask=form.argument, polarity=form.polarity, mask_shape=form.shape, mask_dtype=form.dtype
        )
        subject.has.mask, subject.has.padding = form.shape not in ("BS", "B11S"), True
        subject.inferred["mask"] = str(form)
        return form
    subject.has.unusable_mask = bool(names)
    unusable = f"{', '.join(names)}: no form hides a key and nothing else"
    subject.inferred["mask"] = unusable if names else "none"
    return None


def hides_one_key(subject: Subject, trial: Trial) -> bool:
    """Whether a mask of key 1 hides key 1 alone, beside the keys that the own pattern hides.

    One that switches its own pattern off is a mask too: a law reports that.
    """
    sizes = subject.fit(Sizes(2, 3, 3, 5, 5, 4, 4))  # no two alike: axes cannot be confused
    keep = sizes.mask(1)
    expected = subject.visible(sizes.L, sizes.S) & keep
    attended = subject.attended(sizes, trial, keep=keep)
    if tuple(attended.shape) != (sizes.B, sizes.H, sizes.L, sizes.S):
        return False  # a form whose axes were taken for others
    free = subject.declared_padding(keep, getattr(subject.attend, "form", None))
    return any(bool(((attended == right) | free).all()) for right in (expected, keep))


def probe_alignment(subject: Subject, trial: Trial) -> None:
    """From which corner its causal rule is counted, where there are more keys than queries."""
    own, has = subject.conventions, subject.has
    if own.alignment is not None or not has.cross or not (own.causal or has.causal):
        return
    options = {} if own.causal else {"causal": True}
    sizes = subject.fit(Sizes(1, 1, 1, 2, 5, 4, 5))
    try:
        attended = subject.attended(sizes, trial, **options)[0, 0]
    except SubjectError:
        return
    wrong = {
        corner: int((attended != pattern(sizes.L, sizes.S, causal=True, alignment=corner)).sum())
        for corner in ("bottom-right", "top-left")
    }
    corner = min(wrong, key=lambda each: wrong[each])
    subject.conventions = own.found(alignment=corner)
    subject.inferred["causal alignment"] = f"{corner} corner"
