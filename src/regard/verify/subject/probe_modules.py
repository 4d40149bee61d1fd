"""Probing a module from x to output: its layout, mask, pattern and heads."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.verify.law import Sizes, Trial
from regard.verify.subject.adapters import Adapter, neutral
from regard.verify.subject.mask_forms import MaskForm, forms, parameters_of
from regard.verify.subject.modules import (
    HookedHeads,
    IdentityHeads,
    ModuleCall,
    Projections,
    find_projections,
    inputs_of,
    made_identity,
    masks_of,
    size_of,
)
from regard.verify.subject.probe_functions import (
    LENGTH,
    choose_form,
    hides_one_key,
    probe_alignment,
    probe_pattern,
    probe_scores,
    summary,
)
from regard.verify.subject.subject import Subject, SubjectError
from regard.verify.visibility import nearest_pattern, read_dependence

OPTIONS = {  # by ability, the usual names of the argument
    "weights": ("need_weights", "output_attentions", "return_weights", "return_attention"),
    "causal": ("is_causal", "causal"),
}


def probe_module(module: nn.Module, subject: Subject, trial: Trial) -> None:
    """Find out what a module takes and returns; the subject is changed."""
    subject.module = module
    _sizes(module, subject)
    call = _layout(_call(module, subject), subject, trial)
    subject.layer = call
    subject.has.layer = subject.has.module = True
    _pattern_of_layer(subject, trial)
    call = _mask_of_layer(call, subject, trial)
    subject.layer = call
    _heads(call, subject, trial)
    subject.has.dropout = _drops(module)


def _sizes(module: nn.Module, subject: Subject) -> None:
    own = subject.conventions
    heads = size_of(module, "heads")
    found = {
        "width": size_of(module, "width") or _first_width(module),
        "heads": heads,
        "kv_heads": size_of(module, "kv_heads") or heads,
        "head_dim": size_of(module, "head_dim"),
    }
    own = own.found(**found)
    if own.width is None:
        raise SubjectError("the width of its input could not be found out; declare width=")
    subject.conventions = own


def _first_width(module: nn.Module) -> int | None:
    for each in module.parameters():
        if each.ndim == 2:
            return int(each.shape[1])
    return None


def _call(module: nn.Module, subject: Subject) -> ModuleCall:
    inputs, context = inputs_of(module)
    heads = subject.conventions.heads or 1
    names = parameters_of(module.forward)
    options = {option: name for option, usual in OPTIONS.items() for name in usual if name in names}
    has, masks = subject.has, masks_of(module)
    has.context, has.weights = bool(context), "weights" in options
    has.causal = "causal" in options
    form = MaskForm(masks[0] if masks else "")
    return ModuleCall(
        module, subject.conventions, form, inputs=inputs, context=context, heads=heads,
        names=options,
    )  # fmt: skip


def _layout(call: ModuleCall, subject: Subject, trial: Trial) -> ModuleCall:
    """Whether batch or length comes first: rows of the batch do not mix."""
    declared = subject.conventions.layout
    failures = []
    width = subject.conventions.width or 1
    for layout in [declared] if declared else ["BLE", "LBE"]:
        for tried in _first_forms(call, subject):
            found = replace(tried, layout=layout, own=subject.conventions)
            try:
                x = trial.randn(2, 3, width)
                with torch.no_grad():
                    base = found(x)
                    other = x.clone()
                    other[0, 0] += 1.0
                    moved = (found(other) != base).any(-1)
            except SubjectError as error:
                failures.append(f"{layout}: {error}")
                continue
            if declared or (not bool(moved[1].any()) and int(moved.sum()) > 1):
                return _with_layout(found, layout, subject)
            failures.append(f"{layout}: rows of the batch are mixed")
    if any(failure.endswith("mixed") for failure in failures):
        return _with_layout(replace(call, layout="BLE", own=subject.conventions), "BLE", subject)
    raise SubjectError(f"it could not be called: {summary(failures)}")


def _with_layout(call: ModuleCall, layout: str, subject: Subject) -> ModuleCall:
    subject.conventions = subject.conventions.found(layout=layout)
    subject.inferred["layout"] = layout
    return replace(call, own=subject.conventions)


def _first_forms(call: ModuleCall, subject: Subject) -> list[ModuleCall]:
    """The call without a mask; where a mask is required, then with each form of mask."""
    names = masks_of(call.module)
    if not names or not call.requires_a_mask():
        return [replace(call, form=MaskForm(names[0] if names else ""))]
    made = [replace(call, form=form) for form in forms(names, subject.conventions)]
    return [_without_a_mask(call), *made]


def _without_a_mask(call: ModuleCall) -> ModuleCall:
    """A required mask is None: most code tests `if mask is not None`."""
    own = replace(call.own, options={**call.own.options, call.form.argument: None})
    return replace(call, own=own, form=MaskForm(""))


def _pattern_of_layer(subject: Subject, trial: Trial) -> None:
    own = subject.conventions
    if own.causal is not None and own.window is not None:
        return
    depends = read_dependence(subject.run_layer, subject.tokens(1, LENGTH, trial))
    pattern, subject.inferred["attends to"] = nearest_pattern(depends, diagonal=False)
    subject.conventions = own.found(**pattern)


def _mask_of_layer(call: ModuleCall, subject: Subject, trial: Trial) -> ModuleCall:
    declared = subject.conventions.mask
    names = ([declared] if declared else []) if declared is not None else masks_of(call.module)

    def hides(form: MaskForm) -> bool:
        keep = Sizes(L=5, S=5).mask(1)
        masked = partial(replace(call, own=subject.conventions, form=form), keep=keep)
        with torch.no_grad():
            depends = read_dependence(masked, subject.tokens(2, 5, trial))
        expected = subject.visible(5, 5) & keep[0, 0] | torch.eye(5).bool()
        return torch.equal(depends, expected)

    hidden = call.module.hidden if isinstance(call.module, Adapter) else "-inf"
    tried = [form._replace(hidden=hidden) for form in forms(names, subject.conventions)]
    form = choose_form(subject, tried, hides, names)
    if form is None:
        return replace(call, own=subject.conventions)
    subject.layer_form = form
    options = {n: v for n, v in call.own.options.items() if n != form.argument}
    return replace(call, own=replace(subject.conventions, options=options), form=form)


def _heads(call: ModuleCall, subject: Subject, trial: Trial) -> None:
    """Make it a function of heads as well, if its projections can be found."""
    own = subject.conventions
    if call.inputs == 3:
        _identity_heads(call, subject, trial)
        return
    try:
        at = find_projections(call, subject.tokens(2, 3, trial))
    except SubjectError:
        return
    if at is None:
        subject.notes.append("Its projections were not found: laws of heads do not apply.")
        return
    if own.heads is None:
        _count_heads(call, at, subject, trial)
    sizes = _head_sizes(at, subject)
    if sizes is None:
        subject.notes.append("Its projections do not divide into its heads.")
        return
    heads, kv_heads, dim = sizes
    subject.fixed = {"H": heads, "G": kv_heads, "D": dim, "V": dim}
    hooked = HookedHeads(replace(call, module=neutral(call.module)), at, kv_heads)
    if heads == kv_heads > 1 and _is_one_head(hooked, subject, trial):
        subject.fixed = {"H": 1, "G": 1, "D": heads * dim, "V": heads * dim}
        subject.notes.append(f"It declares {heads} heads, and computes one of the whole width.")
    if at.fused is not None:
        hooked = replace(hooked, by_head=_by_head(hooked, subject, trial))
    _use_heads(hooked, subject, trial)


def _count_heads(call: ModuleCall, at: Projections, subject: Subject, trial: Trial) -> None:
    """The number of heads for which the definition holds; 1 if there is none."""
    own = subject.conventions
    hooked = HookedHeads(replace(call, module=neutral(call.module)), at, 1)
    for heads in (1, 2, 3, 4, 6, 8, 12, 16, 32):
        subject.conventions = own.found(heads=heads)
        if at.fused is not None:
            subject.conventions = subject.conventions.found(kv_heads=heads)
        found = _head_sizes(at, subject)
        if found is None:
            continue
        q_heads, k_heads, dim = found
        given = subject.inputs(Sizes(1, q_heads, k_heads, 4, 4, dim, dim), trial)
        if _error(hooked, subject, given) < 1e-3:
            subject.inferred["number of heads"] = f"{heads}, for which the definition holds"
            return
    subject.conventions = own.found(heads=1)


def _error(attend: Any, subject: Subject, given: tuple[Tensor, ...]) -> float:
    """The largest difference from the definition with this call; infinite if it raises."""
    subject.attend = attend
    try:
        return float((subject.run(*given).double() - subject.expected(*given).out).abs().max())
    except SubjectError:
        return float("inf")


def _is_one_head(hooked: HookedHeads, subject: Subject, trial: Trial) -> bool:
    """Whether the definition holds for one head of the whole width, and not for several."""
    width = subject.fixed["H"] * subject.fixed["D"]
    several, one = (
        _error(hooked, subject, subject.inputs(Sizes(1, L=4, S=4)._replace(**fixed), trial))
        for fixed in (subject.fixed, {"H": 1, "G": 1, "D": width, "V": width})
    )
    return one < 1e-3 < several < float("inf")


def _head_sizes(at: Projections, subject: Subject) -> tuple[int, int, int] | None:
    own = subject.conventions
    heads = own.heads or 1
    if at.fused is not None:
        rows = _rows(at.fused)
        kv_heads = own.kv_heads or heads
        dim, rest = divmod(rows, heads + 2 * kv_heads)
        return None if rest else (heads, kv_heads, dim)
    assert at.query is not None
    assert at.key is not None
    dim, rest = divmod(_rows(at.query), heads)
    kv_heads, left = divmod(_rows(at.key), dim)
    return None if rest or left or heads % kv_heads else (heads, kv_heads, dim)


def _rows(module: nn.Module) -> int:
    features = getattr(module, "out_features", None) or getattr(module, "nf", None)
    weight = module.weight
    return int(features) if features else int(weight.shape[0] if isinstance(weight, Tensor) else 0)


def _by_head(hooked: HookedHeads, subject: Subject, trial: Trial) -> bool:
    """Whether a fused projection is sorted by head: q, k and v of each head together."""
    if subject.conventions.fused is not None:
        return subject.conventions.fused == "by head"
    given = subject.inputs(Sizes(1, L=4, S=4)._replace(**subject.fixed), trial)
    blocked, sorted_by_head = (
        _error(replace(hooked, by_head=by_head), subject, given) for by_head in (False, True)
    )
    best = sorted_by_head < 1e-3 < blocked
    subject.inferred["fused projection"] = "by head" if best else "blocked"
    return best


def _identity_heads(call: ModuleCall, subject: Subject, trial: Trial) -> None:
    own = subject.conventions
    if own.heads is None or (own.width or 1) % own.heads:
        return
    twin = copy.deepcopy(call.module)
    if not made_identity(twin, own.width or 1):
        return
    dim = (own.width or 1) // own.heads
    subject.fixed = {"H": own.heads, "G": own.heads, "D": dim, "V": dim}
    _use_heads(IdentityHeads(replace(call, module=twin)), subject, trial)
    try:
        subject.has.cross = True
        subject.run(*subject.inputs(Sizes(2, L=2, S=5)._replace(**subject.fixed), trial))
    except SubjectError:
        subject.has.cross = False


def _use_heads(attend: Any, subject: Subject, trial: Trial) -> None:
    subject.attend = attend
    try:
        subject.run(*subject.inputs(Sizes(2, L=3, S=3)._replace(**subject.fixed), trial))
    except SubjectError as error:
        subject.attend = None
        subject.fixed = {}
        subject.notes.append(f"Its heads could not be reached: {error}.")
        return
    subject.form = subject.layer_form
    if subject.form.argument and not _mask_reaches_heads(subject, trial):
        subject.notes.append("Its mask hides other keys when its heads are called directly.")
    subject.has.heads = True
    subject.has.several_heads = subject.fixed["H"] > 1
    subject.has.gqa = subject.fixed["G"] != subject.fixed["H"]
    subject.inferred["heads"] = "{H} query heads, {G} key heads, {D} channels each".format(
        **subject.fixed
    )
    probe_pattern(subject, trial)
    probe_alignment(subject, trial)
    probe_scores(subject, trial)


def _mask_reaches_heads(subject: Subject, trial: Trial) -> bool:
    try:
        return hides_one_key(subject, trial)
    except SubjectError:
        return False


def _drops(module: nn.Module) -> bool:
    """Whether it has any dropout."""
    return any(isinstance(each, nn.Dropout) and each.p > 0 for each in module.modules()) or any(
        isinstance(getattr(module, name, None), float) and getattr(module, name) > 0
        for name in ("dropout", "attention_dropout", "attn_dropout", "dropout_p")
    )
