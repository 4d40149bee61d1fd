"""Probing a function of (q, k, v): what was not declared is found out by small calls.

What is declared is not probed. What is found goes into conventions, abilities and report.
The probes of masks, patterns, rotation and scale also serve modules, once they have heads.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from regard.verify.law import Sizes, Trial
from regard.verify.oracle import attention, key_heads, pattern, rotated
from regard.verify.subject.functions import FunctionCall, canonical, laid_out, options_of, shape_in
from regard.verify.subject.mask_forms import MaskForm, forms, mask_arguments
from regard.verify.subject.subject import Subject, SubjectError, output_of
from regard.verify.visibility import nearest_pattern

LENGTH = 6  # tokens of a probe: enough to tell off-by-one and off-by-two patterns apart


def probe_function(target: Callable[..., Any], subject: Subject, trial: Trial) -> None:
    """Find out what a function of (q, k, v) takes and returns; the subject is changed."""
    own = subject.conventions
    names = options_of(target, own)
    layout, returns = _layouts(target, subject, names, trial)
    own = own.found(layout=layout, returns=returns)
    call = FunctionCall(target, own, layout=layout, returns=returns, names=names)
    subject.fixed = {"BLD": {"H": 1, "G": 1}, "LD": {"B": 1, "H": 1, "G": 1}}.get(layout, {})
    subject.conventions = own
    has = subject.has
    has.heads = True
    has.causal, has.window, has.scale = "causal" in names, "window" in names, "scale" in names
    has.softcap, has.bias, has.weights = "softcap" in names, "bias" in names, "weights" in names
    subject.inferred["layout"] = layout if layout == returns else f"{layout}, returns {returns}"
    call = subject.attend = _probe_dropout(call, subject, trial)
    _probe_sizes(subject, trial)
    probe_pattern(subject, trial)
    form = _probe_mask(subject, _mask_names(own.mask, target), trial)
    if form is not None:
        subject.attend = replace(call, own=subject.conventions, form=form)
        subject.form = form
    probe_alignment(subject, trial)
    probe_scores(subject, trial)


def _probe_dropout(call: FunctionCall, subject: Subject, trial: Trial) -> FunctionCall:
    """Whether its dropout argument takes a probability, or a module."""
    if "dropout" in call.names:
        given = subject.inputs(subject.fit(Sizes(1, 1, 1, 3, 3, 2, 2)), trial)
        for tried in (call, replace(call, dropout_is_a_module=True)):
            try:
                tried(*given, dropout=0.5)
            except SubjectError:
                continue
            subject.has.dropout = True
            return tried
    return call


def _mask_names(declared: str | None, target: Any) -> list[str]:
    if declared is not None:
        return [declared] if declared else []
    return mask_arguments(target)


def _layouts(target: Any, subject: Subject, names: dict[str, str], trial: Trial) -> tuple[str, str]:
    """The first layout that the function accepts and in which heads do not mix."""
    declared = subject.conventions.layout
    failures: list[str] = []
    masks = ["", *_mask_names(subject.conventions.mask, target)]
    for layout in [declared] if declared else ["BHLD", "BLHD", "BLD", "LD"]:
        for mask in masks:
            form = MaskForm(mask)
            call = FunctionCall(target, subject.conventions, form, layout, layout, names)
            try:
                returns = _returns(call, trial)
            except SubjectError as error:
                failures.append(f"{layout}: {error}")
                continue
            found = replace(call, returns=subject.conventions.returns or returns)
            if declared or layout in ("BLD", "LD") or _heads_are_apart(found, trial):
                return layout, found.returns
            failures.append(f"{layout}: heads are mixed")
    mixed = [failure for failure in failures if failure.endswith("mixed")]
    if mixed:  # in every layout: take the most common one, and the laws report what is wrong
        return mixed[0].split(":")[0], subject.conventions.returns or "BHLD"
    raise SubjectError(f"it could not be called with (q, k, v): {summary(failures)}")


def summary(failures: list[str]) -> str:
    """The failures in all layouts, without the layout if they are the same."""
    reasons = dict.fromkeys(failure.split(": ", 1)[1] for failure in failures)
    return next(iter(reasons)) if len(reasons) == 1 else "; ".join(dict.fromkeys(failures))


def _returns(call: FunctionCall, trial: Trial) -> str:
    """The layout of the output."""
    sizes = Sizes(*(2, 3, 3, 5, 5, 4, 4) if call.layout[0] == "B" else (1, 1, 1, 5, 5, 4, 4))
    if call.layout in ("BLD", "LD"):
        sizes = sizes._replace(H=1, G=1)
    q, k, v = Subject("", "function", call.own).inputs(sizes, trial)
    with torch.no_grad():
        out = output_of(call.result(q, k, v), q.numel())
    shape = tuple(q.shape)
    if call.layout in ("BLD", "LD"):
        canonical(out, call.layout, shape)
        return call.layout
    for returns in ("BHLD", "BLHD", "BLE"):
        if tuple(out.shape) == shape_in(returns, shape):
            return returns
    raise SubjectError(f"from q, k and v of shape {list(laid_out(q, call.layout).shape)} it "
                       f"returned shape {list(out.shape)}")  # fmt: skip


def _heads_are_apart(call: FunctionCall, trial: Trial) -> bool:
    """Whether a value of one head changes that head alone, and more than one of its rows."""
    q, k, v = Subject("", "function", call.own).inputs(Sizes(1, 3, 3, 5, 5, 4, 4), trial)
    with torch.no_grad():
        base = call(q, k, v)
        other = v.clone()
        other[:, 1, 0] += 1.0
        moved = (call(q, k, other) != base).any(-1)[0]
    return bool(moved[1].any()) and not bool(moved[[0, 2]].any()) and int(moved.sum()) > 1


def _probe_sizes(subject: Subject, trial: Trial) -> None:
    """Whether it accepts fewer key heads, values of other width, other numbers of keys."""

    def accepts(sizes: Sizes) -> bool:
        try:
            subject.run(*subject.inputs(subject.fit(sizes), trial))
        except SubjectError:
            return False
        return True

    has = subject.has
    if not subject.fixed:
        has.gqa = True  # or `fit` would change the sizes
        has.gqa = accepts(Sizes(2, 6, 2, 5, 5, 4, 4))
    has.wide = True
    has.wide = accepts(Sizes(2, 2, 2, 5, 5, 4, 3))
    has.cross = True
    has.cross = accepts(Sizes(2, 2, 2, 3, 5, 4, 4))
    has.several_heads = not subject.fixed
    if subject.fixed:
        subject.notes.append("It has one head: laws of several heads do not apply.")


def probe_pattern(subject: Subject, trial: Trial) -> None:
    """Which keys it hides by default."""
    own = subject.conventions
    if own.causal is not None and own.window is not None:
        return
    attended = subject.attended(subject.fit(Sizes(1, 1, 1, LENGTH, LENGTH, 4, LENGTH)), trial)
    pattern, subject.inferred["attends to"] = nearest_pattern(attended[0].any(0))
    subject.conventions = own.found(**pattern)


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
    """Whether a mask that hides key 1 hides key 1, beside what its own pattern hides."""
    sizes = subject.fit(Sizes(1, 2, 2, 4, 4, 4, 4))
    keep = sizes.mask(1)
    expected = subject.visible(sizes.L, sizes.S) & keep
    return bool((subject.attended(sizes, trial, keep=keep) == expected).all())


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
        corner: int((attended != pattern(2, 5, causal=True, alignment=corner)).sum())
        for corner in ("bottom-right", "top-left")
    }
    corner = min(wrong, key=lambda each: wrong[each])
    subject.conventions = own.found(alignment=corner)
    subject.inferred["causal alignment"] = f"{corner} corner"


def probe_scores(subject: Subject, trial: Trial) -> None:
    """Rotation, scale, order of the heads, and the output of a fully masked query."""
    _probe_rotation(subject, trial)
    if subject.conventions.pairing == "none" and not subject.has.unknown_positions:
        scale = read_scale(subject, trial)
        if scale is not None:
            dim = subject.fit(Sizes(D=4)).D
            subject.inferred["scale"] = f"{scale:.6g} where 1/sqrt(D) is {dim**-0.5:.6g}"
    if subject.conventions.head_order is None and subject.has.gqa:
        groups, sizes = read_head_order(subject, trial), subject.fit(Sizes(1, 6, 2))
        grouped = groups == key_heads(sizes.H, sizes.G)
        order = "neighbours share a key head" if grouped else f"reads key heads {groups}"
        subject.inferred["head order"] = order
    if subject.conventions.fully_masked is None and subject.has.padding:
        _probe_fully_masked(subject, trial)


def _probe_rotation(subject: Subject, trial: Trial) -> None:
    """Whether positions change the scores, and which channels are rotated together."""
    own = subject.conventions
    if own.pairing is not None:
        subject.has.rope |= own.pairing != "none"
        return
    sizes = subject.fit(Sizes(1, 1, 1, 5, 5, 8, 5))
    q, k, _ = subject.inputs(sizes._replace(L=1, S=1), trial, peak=2.0)
    q, k = q.expand(-1, -1, sizes.L, -1), k.expand(-1, -1, sizes.L, -1)
    try:
        weights = subject.read_weights(q, k).double()
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
            subject.has.rope = True
            return
    subject.inferred["RoPE"] = "positions change the scores in a way that is not known"
    subject.has.unknown_positions = True


def read_scale(subject: Subject, trial: Trial, dim: int = 4) -> float | None:
    """The scale, from the odds of two keys whose scores differ by 1; None if one is hidden."""
    sizes = subject.fit(Sizes(1, 1, 1, 2, 2, dim, 2))
    q, k, _ = subject.inputs(sizes, trial)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[:, :, 1, 0] = 1.0, 1.0
    row = subject.read_weights(q, k).double()[0, 0, 1]
    if not bool((row > 0).all()):
        return None
    return float(torch.log(row[1] / row[0]))


def read_head_order(subject: Subject, trial: Trial) -> list[int]:
    """The key head that each query head reads: the values of each key head are its index."""
    sizes = subject.fit(Sizes(1, 6, 2, 3, 3, 4, 4))
    q, k, v = subject.inputs(sizes, trial)
    for group in range(sizes.G):
        v[:, group] = float(group)
    read = subject.run(q, k, v)[0, :, -1, 0]
    return [int(x) for x in read.nan_to_num(-1.0).round()]


def _probe_fully_masked(subject: Subject, trial: Trial) -> None:
    """Whether a fully masked query gives zeros, the mean of all values, or NaN."""
    sizes = subject.fit(Sizes(1, 1, 1, 3, 3, 2, 2))
    q, k, v = subject.inputs(sizes, trial)
    try:
        out = subject.run(q, k, v, keep=sizes.mask(*range(sizes.S))).double()
    except SubjectError:
        return
    mean = v.double().mean(2, keepdim=True)[:, :1]
    if not bool(out.isfinite().all()):
        gives = "NaN"
    elif float((out[:, :1] - mean).abs().max()) < 1e-3:
        subject.conventions = subject.conventions.found(fully_masked="mean")
        gives = "the mean of all values"
    else:
        gives = "zeros"
    subject.inferred["a fully masked query"] = f"gives {gives}"
