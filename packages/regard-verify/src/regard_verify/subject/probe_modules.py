"""Probing a module from x to output: its layout, mask, pattern and heads."""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import nn

from regard_verify.blame import with_line
from regard_verify.law import Sizes, Trial
from regard_verify.subject.adapters import Adapter, TransformersModel
from regard_verify.subject.conventions import Conventions, pattern_length, probe_length
from regard_verify.subject.mask_forms import MaskForm, forms
from regard_verify.subject.modules import (
    ModuleCall,
    context_mask_of,
    inputs_of,
    masks_of,
    size_of,
    softcap_of,
    widths_of,
)
from regard_verify.subject.other_masks import causal_works, hides_in_output
from regard_verify.subject.probe_functions import (
    MULTIPLES,
    choose_form,
    hides_one_key,
    probe_alignment,
    probe_pattern,
    refusal,
    say_multiple,
    summary,
)
from regard_verify.subject.probe_weights import probe_scores
from regard_verify.subject.reach import ProjectedHeads, reach
from regard_verify.subject.signatures import parameters_of
from regard_verify.subject.subject import Subject, SubjectError
from regard_verify.visibility import nearest_pattern, read_dependence

UNREACHED = "Its queries, keys and values were not found in it: only laws of whole layers apply."
OPTIONS = {  # by ability, the usual names of the argument
    "weights": ("need_weights", "output_attentions", "return_weights", "return_attention"),
    "causal": ("is_causal", "causal"),
    "documents": ("document_ids", "doc_ids", "segment_ids", "seq_ids", "sequence_ids", "seq_idx",
                  "cu_seqlens", "cu_seq_lens", "cu_seqlens_q"),
}  # fmt: skip


def probe_module(module: nn.Module, subject: Subject, trial: Trial) -> None:
    """Find out what a module takes and returns; the subject is changed."""
    subject.module = module
    declared = subject.conventions
    call = _first_call(module, subject, trial)
    subject.layer = call
    subject.has.layer = subject.has.module = True
    own = subject.conventions
    if own.causal is None or own.window is None:
        x = subject.tokens(1, pattern_length(own), trial)
        visible = read_dependence(subject.run_layer, x)
        pattern, subject.inferred["attends to"] = nearest_pattern(visible, diagonal=False)
        subject.conventions = own.found(**pattern)
    heads = _heads(call, subject, declared, trial)
    if heads is None and (own := subject.conventions).block and not own.multiple:
        subject.conventions = own.found(multiple=own.block)  # no block in it is padded
        call = replace(call, own=replace(call.own, multiple=own.block))
        heads = _heads(call, subject, declared, trial)
        say_multiple(subject)
    own = replace(subject.conventions, options=call.own.options)
    call = replace(call, own=own, heads=own.heads or call.heads)
    required = call.requires_a_mask()
    call = _mask_of_layer(call, heads, subject, trial)
    subject.layer = call
    if heads is None and required:  # now its mask has the meaning that it expects
        heads = _heads(call, subject, declared, trial)
    if heads is None:
        subject.notes.append(UNREACHED)
    subject.has.causal_alone = causal_works(subject)
    if heads is not None:
        _use_heads(heads.masked(call.form, call.own), subject, trial)
    subject.has.dropout = _drops(call, subject, trial)


def _first_call(module: nn.Module, subject: Subject, trial: Trial) -> ModuleCall:
    """The call in the width and the layout that the module takes.

    Raises:
        SubjectError: if it takes none that is known; tells why it refuses the likeliest.
    """
    declared, refusals = subject.conventions, []
    multiples = [declared.multiple] if declared.multiple else MULTIPLES
    for multiple, width in product(multiples, widths_of(module, declared.width)):
        subject.conventions = declared.found(width=width, multiple=multiple)
        try:
            call = _layout(_call(module, subject), subject, trial, declared.width)
        except SubjectError as error:
            refusals.append(error)
            continue
        say_multiple(subject)
        return call
    if refusals:
        raise refusals[0]
    raise SubjectError("the width of its input is not known: declare it, --like width=NUMBER")


def _call(module: nn.Module, subject: Subject) -> ModuleCall:
    order, context = inputs_of(module)
    heads = subject.conventions.heads or size_of(module, "heads") or 1
    names = parameters_of(module.forward)
    options = {option: name for option, usual in OPTIONS.items() for name in usual if name in names}
    has, masks = subject.has, masks_of(module)
    has.context, has.weights = bool(context) or order != "x", "weights" in options
    has.causal, has.documents = "causal" in options, "documents" in options
    form = MaskForm(masks[0] if masks else "")
    if context and context_mask_of(module):
        options["context mask"] = context_mask_of(module)
    return ModuleCall(
        module, subject.conventions, form, order=order, context=context, heads=heads,
        names=options,
    )  # fmt: skip


def _layout(call: ModuleCall, subject: Subject, trial: Trial, given: int | None) -> ModuleCall:
    """Whether batch or length comes first: rows of the batch do not mix."""
    declared = subject.conventions.layout
    failures, errors = [], []
    width = subject.conventions.width or 1
    for layout in [declared] if declared else ["BLE", "LBE"]:
        for tried in _first_forms(call, subject):
            found = replace(tried, layout=layout)
            try:
                x = trial.randn(2, probe_length(subject.conventions), width)
                with torch.no_grad():
                    base = found(x)
                    other = x.clone()
                    other[0, 0] += 1.0
                    moved = (found(other) != base).any(-1)
            except SubjectError as error:
                failures.append(f"{layout}: {with_line(error)}")
                errors.append(error)
                continue
            if declared or (not bool(moved[1].any()) and int(moved.sum()) > 1):
                return _with_layout(found, layout, subject)
            failures.append(f"{layout}: rows of the batch are mixed")
    if any(failure.endswith("mixed") for failure in failures):
        return _with_layout(replace(call, layout="BLE", own=subject.conventions), "BLE", subject)
    raise refusal(
        f"it could not be called with x [B, L, {width}]: {summary(failures)}; if it takes other "
        "inputs, name a function or module that calls it with x alone; if it takes these, declare "
        f"width={width}: an error is a broken law then",
        errors,
        None if isinstance(call.module, Adapter) else given,
    )


def _with_layout(call: ModuleCall, layout: str, subject: Subject) -> ModuleCall:
    subject.conventions = subject.conventions.found(layout=layout)
    subject.inferred["layout"] = layout
    return replace(call, own=replace(subject.conventions, options=call.own.options))


def _first_forms(call: ModuleCall, subject: Subject) -> list[ModuleCall]:
    """The call without a mask; where a mask is required, then with each form of mask."""
    names = masks_of(call.module)
    if not names or not call.requires_a_mask():
        plain = replace(call, form=MaskForm(names[0] if names else ""))
        return [plain, replace(plain, alone=False)] if call.context else [plain]
    made = [replace(call, form=form) for form in forms(names, subject.conventions)]
    own = replace(call.own, options={**call.own.options, call.form.argument: None})
    return [replace(call, own=own, form=MaskForm("")), *made]


def _mask_of_layer(
    call: ModuleCall, heads: ProjectedHeads | None, subject: Subject, trial: Trial
) -> ModuleCall:
    """The call with the form of mask that hides a key: from its head, or from its output."""
    declared = subject.conventions.mask
    names = ([declared] if declared else []) if declared is not None else masks_of(call.module)

    def hides(form: MaskForm) -> bool:
        own = replace(subject.conventions, options=call.own.options)
        if heads is not None:
            subject.attend = heads.masked(form, own)
            if _mask_reaches_heads(subject, trial):
                return True
        return hides_in_output(replace(call, own=own, form=form), subject, trial)

    hidden = call.module.hidden if isinstance(call.module, Adapter) else "-inf"
    tried = [form._replace(hidden=hidden) for form in forms(names, subject.conventions)]
    form = choose_form(subject, tried, hides, names)
    subject.attend = None
    if form is None:
        return replace(call, own=replace(subject.conventions, options=call.own.options))
    subject.form = subject.layer_form = form
    options = {n: v for n, v in call.own.options.items() if n != form.argument}
    return replace(call, own=replace(subject.conventions, options=options), form=form)


def _heads(
    call: ModuleCall, subject: Subject, declared: Conventions, trial: Trial
) -> ProjectedHeads | None:
    """The module as a function of heads: as its channels show, or as a usual layout gives it.

    None for models of several layers with windows: outputs depend on more keys than heads see.
    """
    layers = getattr(getattr(call.module, "config", None), "num_hidden_layers", 1)
    if isinstance(call.module, TransformersModel) and layers > 1 and subject.conventions.window:
        return None
    found = reach(call, trial, size_of(call.module, "heads"))
    if found is None:
        return None
    heads, groups, dim, width = found.roles.sizes
    subject.fixed = {"H": heads, "G": groups, "D": dim, "V": width}
    own = subject.conventions
    if found.roles.others:
        own = own.found(scale=(dim + found.roles.others) ** -0.5)
    known = {n: x for n, x in found.known.items() if getattr(declared, n) is None}
    softcap = softcap_of(call.module)
    own = own.found(heads=heads, kv_heads=groups, head_dim=dim, softcap=softcap)
    subject.conventions = replace(own, **known)
    return found


def _use_heads(attend: Any, subject: Subject, trial: Trial) -> None:
    subject.attend = attend
    try:
        subject.run(*subject.inputs(subject.fit(Sizes(2, L=3, S=3)), trial))
    except SubjectError as error:
        subject.attend = None
        subject.fixed = {}
        subject.notes.append(f"Its heads could not be reached: {error}.")
        return
    if subject.form.argument and not _mask_reaches_heads(subject, trial):
        subject.notes.append("Its mask hides other keys when its heads are called directly.")
    subject.has.heads = True
    subject.has.several_heads = subject.fixed["H"] > 1
    subject.has.gqa = subject.fixed["G"] != subject.fixed["H"]
    subject.has.cross = attend.attention.cross and not subject.conventions.block
    subject.inferred["heads"] = "{H} query heads, {G} key heads, {D} channels each".format(
        **subject.fixed
    )
    subject.inferred["projections"] = f"cut as ({attend.roles.cut})"
    probe_pattern(subject, trial)
    probe_alignment(subject, trial)
    probe_scores(subject, trial)


def _mask_reaches_heads(subject: Subject, trial: Trial) -> bool:
    try:
        return hides_one_key(subject, trial)
    except SubjectError:
        return False


def _drops(call: ModuleCall, subject: Subject, trial: Trial) -> bool:
    """Whether two calls in train mode differ, as under dropout."""
    x = subject.tokens(4, 9, trial)
    module = call.module
    module.train()
    try:
        with torch.no_grad():
            return not torch.equal(*(torch.nan_to_num(call(x)) for _ in range(2)))
    except SubjectError:
        return any(isinstance(each, nn.Dropout) and each.p > 0 for each in module.modules())
    finally:
        module.eval()
