"""Finding out what nobody declared: each question is a small call whose answer cannot be mistaken.

What was declared is not asked. What is found goes into the conventions, and into the report.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.verify.law import Sizes, Trial
from regard.verify.oracle import attention, pattern, rotated
from regard.verify.subject.functions import FunctionCall, brought_back, laid_out, options_of
from regard.verify.subject.mask_forms import MaskForm, forms, mask_arguments
from regard.verify.subject.subject import Subject, SubjectError, called, output_of
from regard.verify.visibility import nearest_pattern, read_weights

LENGTH = 6  # of a probe: longer than any slip by one or two


def probe_function(target: Callable[..., Any], subject: Subject, trial: Trial) -> None:
    """Fill in what a function of (q, k, v) is; the subject is changed."""
    own = subject.conventions
    names = options_of(target, own)
    layout, returns = _layouts(target, subject, names, trial)
    own = own.found(layout=layout, returns=returns)
    call = FunctionCall(target, own, layout=layout, returns=returns, names=names)
    subject.fixed = {"BLD": {"H": 1, "G": 1}, "LD": {"B": 1, "H": 1, "G": 1}}.get(layout, {})
    subject.attend, subject.conventions = call, own
    subject.has |= {"heads", *(n for n in names if n not in ("gqa", "training"))}
    subject.inferred["layout"] = layout if layout == returns else f"{layout}, gives {returns}"
    call = subject.attend = _dropout(call, subject, trial)
    _abilities(subject, trial)
    probe_pattern(subject, trial)
    form = probe_mask(subject, _mask_names(own.mask, target), trial)
    if form is not None:
        subject.attend = replace(call, own=subject.conventions, form=form)
        subject.form = form
    probe_alignment(subject, trial)
    probe_numbers(subject, trial)


def _dropout(call: FunctionCall, subject: Subject, trial: Trial) -> FunctionCall:
    """Whether dropout is asked for by a number, or by a module that drops."""
    if "dropout" not in subject.has:
        return call
    given = subject.inputs(subject.fit(Sizes(1, 1, 1, 3, 3, 2, 2)), trial)
    for tried in (call, replace(call, dropout_is_a_module=True)):
        try:
            tried(*given, dropout=0.5)
        except SubjectError:
            continue
        return tried
    subject.has.discard("dropout")
    return call


def _mask_names(declared: str | None, target: Any) -> list[str]:
    if declared is not None:
        return [declared] if declared else []
    return mask_arguments(target)


def _layouts(target: Any, subject: Subject, names: dict[str, str], trial: Trial) -> tuple[str, str]:
    """The layout whose heads keep to themselves, out of those the function accepts."""
    declared = subject.conventions.layout
    heard: list[str] = []
    for layout in [declared] if declared else ["BHLD", "BLHD", "BLD", "LD"]:
        for form in _trial_masks(target, subject):
            call = FunctionCall(target, subject.conventions, form, layout, layout, names)
            try:
                returns = _returns(call, trial)
            except SubjectError as error:
                heard.append(f"{layout}: {error}")
                continue
            found = replace(call, returns=subject.conventions.returns or returns)
            if declared or layout in ("BLD", "LD") or _heads_are_apart(found, trial):
                return layout, found.returns
            heard.append(f"{layout}: heads are mixed")
    mixed = [said for said in heard if said.endswith("mixed")]
    if mixed:  # every layout mixes them: the commonest, and the checks say what is wrong
        return mixed[0].split(":")[0], subject.conventions.returns or "BHLD"
    raise SubjectError(f"it could not be called with (q, k, v): {gathered(heard)}")


def gathered(heard: list[str]) -> str:
    """What was heard in each layout, said once where it is the same in all."""
    reasons = dict.fromkeys(said.split(": ", 1)[1] for said in heard)
    return next(iter(reasons)) if len(reasons) == 1 else "; ".join(dict.fromkeys(heard))


def _trial_masks(target: Any, subject: Subject) -> list[MaskForm]:
    """Forms to try where a mask must be given."""
    names = _mask_names(subject.conventions.mask, target)
    return [MaskForm(""), *(MaskForm(name) for name in names)] if names else [MaskForm("")]


def _returns(call: FunctionCall, trial: Trial) -> str:
    sizes = Sizes(*(2, 3, 3, 5, 5, 4, 4) if call.layout[0] == "B" else (1, 1, 1, 5, 5, 4, 4))
    if call.layout in ("BLD", "LD"):
        sizes = sizes._replace(H=1, G=1)
    q, k, v = Subject("", "function", call.own).inputs(sizes, trial)
    given = call._options(q, k, {})
    if call._mask_is_required():
        everything = torch.ones(1, 1, sizes.L, sizes.S, dtype=torch.bool)
        given[call.form.argument] = call.form.encode(everything, (sizes.B, sizes.H), q.dtype)
    with torch.no_grad():
        result = called(call.target, *(laid_out(x, call.layout) for x in (q, k, v)), **given)
    out = output_of(result, q.numel())
    if call.layout in ("BLD", "LD"):
        brought_back(out, call.layout, tuple(q.shape))
        return call.layout
    for returns in ("BHLD", "BLHD", "BLE"):
        shape = tuple(q.shape)
        if tuple(out.shape) == tuple(_shape_in(returns, shape)):
            return returns
    raise SubjectError(f"from q, k and v of shape {list(laid_out(q, call.layout).shape)} it gave "
                       f"back shape {list(out.shape)}")  # fmt: skip


def _shape_in(layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    batch, heads, length, dim = shape
    return {
        "BHLD": shape,
        "BLHD": (batch, length, heads, dim),
        "BLE": (batch, length, heads * dim),
    }[layout]


def _heads_are_apart(call: FunctionCall, trial: Trial) -> bool:
    """Whether a value of one head moves that head alone, and more than its own row of it."""
    q, k, v = Subject("", "function", call.own).inputs(Sizes(1, 3, 3, 5, 5, 4, 4), trial)
    with torch.no_grad():
        base = call(q, k, v)
        other = v.clone()
        other[:, 1, 0] += 1.0
        moved = (call(q, k, other) != base).any(-1)[0]
    return bool(moved[1].any()) and not bool(moved[[0, 2]].any()) and int(moved.sum()) > 1


def _abilities(subject: Subject, trial: Trial) -> None:
    """Fewer key heads, other numbers of keys, wider values: what it takes without complaint."""
    for name, sizes in (
        ("gqa", Sizes(2, 6, 2, 5, 5, 4, 4)),
        ("wide", Sizes(2, 2, 2, 5, 5, 4, 3)),
        ("cross", Sizes(2, 2, 2, 3, 5, 4, 4)),
    ):
        if name == "gqa" and subject.fixed:
            continue
        try:
            subject.has.add(name)
            subject.run(*subject.inputs(subject.fit(sizes), trial))
        except SubjectError:
            subject.has.discard(name)
    if subject.fixed:
        subject.notes.append("It has one head: laws of several heads do not apply.")
    else:
        subject.has.add("several heads")


def probe_pattern(subject: Subject, trial: Trial) -> None:
    """What it hides without being asked."""
    own = subject.conventions
    if own.causal is not None and own.window is not None:
        return
    sizes = subject.fit(Sizes(1, 1, 1, LENGTH, LENGTH, 4, LENGTH))
    q, k, _ = subject.inputs(sizes, trial)
    weights = read_weights(subject.run, q, k, width=_width(subject, sizes))
    best, wrong = nearest_pattern((weights[0] != 0).any(0))
    subject.conventions = own.found(**best)
    said = "everything" if not best["causal"] else "the past and its own key"
    said = f"a window of {best['window']} keys" if best["window"] else said
    subject.inferred["sees"] = said if not wrong else f"nearly {said}: {wrong} cells are not"


def _width(subject: Subject, sizes: Sizes) -> int | None:
    return None if "wide" in subject.has else sizes.V


def probe_mask(subject: Subject, names: list[str], trial: Trial) -> MaskForm | None:
    """The form of mask that hides the key it is meant to hide, and no other."""
    call, own = subject.attend, subject.conventions
    assert isinstance(call, FunctionCall)

    def hides(form: MaskForm) -> bool:
        subject.attend = replace(call, own=subject.conventions, form=form)
        return hides_one_key(subject, form, trial)

    try:
        return choose_form(subject, list(forms(names, own)), hides, names)
    finally:
        subject.attend = call


def choose_form(
    subject: Subject, tried: list[MaskForm], hides: Callable[[MaskForm], bool], names: list[str]
) -> MaskForm | None:
    """The first that works; what is declared in full is believed, so that it can be judged."""
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
        subject.has |= {"mask"} if form.shape not in ("BS", "B11S") else {"padding"}
        subject.has.add("padding")
        subject.inferred["mask"] = str(form)
        return form
    if names:
        subject.inferred["mask"] = f"{', '.join(names)}: no form hides a key and nothing else"
        subject.has.add("unusable mask")
    else:
        subject.inferred["mask"] = "none"
    return None


def hides_one_key(subject: Subject, form: MaskForm, trial: Trial) -> bool:
    """Whether hiding key 1 hides key 1; in its own pattern or a causal one."""
    sizes = subject.fit(Sizes(1, 2, 2, 4, 4, 4, 4))
    keep = torch.ones(sizes.B, 1, sizes.L, sizes.S, dtype=torch.bool)
    keep[..., 1] = False
    q, k, _ = subject.inputs(sizes, trial)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return subject.run(q, k, v, keep=keep)

    seen = read_weights(attend, q, k, width=_width(subject, sizes)) != 0
    expected = subject.visible(sizes.L, sizes.S) & keep
    return bool((seen == expected).all())


def probe_alignment(subject: Subject, trial: Trial) -> None:
    """From which corner a causal rule is counted where keys are more than queries."""
    own = subject.conventions
    if own.alignment is not None or "cross" not in subject.has:
        return
    if not own.causal and "causal" not in subject.has:
        return
    sizes = subject.fit(Sizes(1, 1, 1, 2, 5, 4, 5))
    q, k, _ = subject.inputs(sizes, trial)
    asked = {"causal": True} if not own.causal else {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return subject.run(q, k, v, **asked)

    try:
        seen = (read_weights(attend, q, k, width=_width(subject, sizes)) != 0)[0, 0]
    except SubjectError:
        return
    wrong = {
        corner: int((seen != pattern(2, 5, causal=True, alignment=corner)).sum())
        for corner in ("bottom-right", "top-left")
    }
    corner = min(wrong, key=lambda each: wrong[each])
    subject.conventions = own.found(alignment=corner)
    subject.inferred["causal alignment"] = f"{corner} corner"


def probe_numbers(subject: Subject, trial: Trial) -> None:
    """Rotation, scale, order of the heads, and what a query that sees nothing reads."""
    probe_rotation(subject, trial)
    _probe_scale(subject, trial)
    _probe_head_order(subject, trial)
    _probe_nothing_seen(subject, trial)


def probe_rotation(subject: Subject, trial: Trial) -> None:
    """Whether positions matter, and which channels are turned together."""
    own = subject.conventions
    if own.pairing is not None:
        subject.has |= {"rope"} if own.pairing != "none" else set()
        return
    sizes = subject.fit(Sizes(1, 1, 1, 5, 5, 8, 5))
    q, k, _ = subject.inputs(sizes._replace(L=1, S=1), trial, peak=2.0)
    q, k = q.expand(-1, -1, sizes.L, -1), k.expand(-1, -1, sizes.L, -1)
    try:
        weights = read_weights(subject.run, q, k, width=_width(subject, sizes)).double()
    except SubjectError:
        return
    row = weights[0, 0, -1]
    if float((row[row > 0] - row[row > 0].mean()).abs().max()) < 1e-3:
        subject.conventions = own.found(pairing="none")
        return
    positions = torch.arange(sizes.L)
    keep = subject.visible(sizes.L, sizes.L)[None, None]
    for pairing in ("halves", "pairs"):
        queries, keys = (rotated(x, positions, pairing, own.theta) for x in (q, k))
        would = attention(queries, keys, k.double(), keep=keep, scale=own.scale).weights
        if float((would[:, :1] - weights[:, :1]).abs().max()) < 1e-3:
            subject.conventions = own.found(pairing=pairing)
            subject.inferred["RoPE"] = f"{pairing}, theta {own.theta:g}"
            subject.has.add("rope")
            return
    subject.inferred["RoPE"] = "positions matter, in no way that is known"
    subject.has.add("unknown positions")


def _probe_scale(subject: Subject, trial: Trial) -> None:
    if subject.conventions.pairing == "none" and not subject.has & {"unknown positions"}:
        scale = read_scale(subject, trial)
        if scale is not None:
            dim = subject.fit(Sizes(D=4)).D
            subject.inferred["scale"] = f"{scale:.6g} where 1/sqrt(D) is {dim**-0.5:.6g}"


def read_scale(subject: Subject, trial: Trial, dim: int = 4) -> float | None:
    """The scale, from the odds of two keys that differ by a known score."""
    sizes = subject.fit(Sizes(1, 1, 1, 2, 2, dim, 2))
    q, k, _ = subject.inputs(sizes, trial)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[:, :, 1, 0] = 1.0, 1.0
    row = read_weights(subject.run, q, k, width=_width(subject, sizes)).double()[0, 0, 1]
    if not bool((row > 0).all()):
        return None
    return float(torch.log(row[1] / row[0]))


def _probe_head_order(subject: Subject, trial: Trial) -> None:
    if subject.conventions.head_order is not None or "gqa" not in subject.has:
        return
    groups = read_head_order(subject, trial)
    sizes = subject.fit(Sizes(1, 6, 2))
    right = [h * sizes.G // sizes.H for h in range(sizes.H)]
    said = {True: "neighbours share a key head"}.get(groups == right, f"reads key heads {groups}")
    subject.inferred["head order"] = said


def read_head_order(subject: Subject, trial: Trial) -> list[int]:
    """Which key head each query head reads: each carries its number as its value."""
    sizes = subject.fit(Sizes(1, 6, 2, 3, 3, 4, 4))
    q, k, v = subject.inputs(sizes, trial)
    for group in range(sizes.G):
        v[:, group] = float(group)
    read = subject.run(q, k, v)[0, :, -1, 0]
    return [int(x) for x in read.nan_to_num(-1.0).round()]


def _probe_nothing_seen(subject: Subject, trial: Trial) -> None:
    """Zeros, the mean of all values, or NaN."""
    if not subject.has & {"mask", "padding"} or subject.conventions.fully_masked is not None:
        return
    sizes = subject.fit(Sizes(1, 1, 1, 3, 3, 2, 2))
    q, k, v = subject.inputs(sizes, trial)
    keep = torch.zeros(sizes.B, 1, sizes.L, sizes.S, dtype=torch.bool)
    try:
        out = subject.run(q, k, v, keep=keep).double()
    except SubjectError:
        return
    mean = v.double().mean(2, keepdim=True)[:, :1]
    if not bool(out.isfinite().all()):
        subject.inferred["a query that sees nothing"] = "reads NaN"
    elif float((out[:, :1] - mean).abs().max()) < 1e-3:
        subject.conventions = subject.conventions.found(fully_masked="mean")
        subject.inferred["a query that sees nothing"] = "reads the mean of all values"
    else:
        subject.inferred["a query that sees nothing"] = "reads zeros"
