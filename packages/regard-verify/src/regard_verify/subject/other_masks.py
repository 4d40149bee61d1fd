"""Further mask arguments of a subject, and switches for the causal rule, each tried by itself."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from regard_verify.law import Sizes, Trial
from regard_verify.oracle import pattern
from regard_verify.subject.conventions import Conventions
from regard_verify.subject.functions import FunctionCall
from regard_verify.subject.mask_forms import MaskForm, forms, mask_arguments
from regard_verify.subject.modules import ModuleCall, masks_of
from regard_verify.subject.probe_functions import hides_one_key
from regard_verify.subject.subject import Subject, SubjectError
from regard_verify.visibility import read_dependence

_OF_KEYS = re.compile(  # masks of keys for all queries and heads, by the names that say so
    r"^((attn|attention|causal|padding|pad|key|key_padding|kv|src|tgt|src_key_padding|token|valid|"
    r"seq|sequence|self_attn|local|window|sliding_window)_?)?mask$",
    re.I,
)
_CAUSAL = re.compile(r"causal|autoregressive|^masked$|^unidirectional$", re.I)
TOKENS = 4


def argument_forms(subject: Subject) -> dict[str, MaskForm | None]:
    """The arguments that are documented as masks, each with the first form that hides a key."""
    call = subject.attend if subject.module is None else subject.layer
    if subject.conventions.mask == "" or not isinstance(call, (FunctionCall, ModuleCall)):
        return {}
    known = mask_arguments(call.target) if isinstance(call, FunctionCall) else masks_of(call.module)
    names = [name for name in known if _OF_KEYS.match(name)]
    found: dict[str, MaskForm | None] = {}
    for name in names:
        tried = [form for form in [subject.form, subject.layer_form] if form.argument == name]
        tried += forms([name], Conventions())
        hidden = getattr(getattr(call, "module", None), "hidden", "-inf")
        tried = [form._replace(hidden=hidden) for form in tried]
        found[name] = None
        for form in tried:
            trial, other = Trial("other masks"), with_form(subject, form, {})
            with suppress(SubjectError):
                layer = other.layer if isinstance(other.layer, ModuleCall) else None
                if hides_in_output(layer, other, trial) if layer else hides_one_key(other, trial):
                    found[name] = form
                    break
    return found


def hides_in_output(call: ModuleCall, subject: Subject, trial: Trial) -> bool:
    """Whether outputs no longer depend on key 1 where it is hidden, and on all others as before."""
    x = subject.tokens(2, 5, trial)
    length = x.shape[1]
    keep = Sizes(L=length, S=length).mask(1)
    with torch.no_grad():
        depends = read_dependence(partial(call, keep=keep), x)
    free = torch.eye(length).bool() | subject.declared_padding(keep, call.form)[0, 0]
    own = subject.visible(length, length)
    rights = (own & keep[0, 0], keep[0, 0])  # the second switches the pattern off
    return any(torch.equal(depends | free, right | free) for right in rights)


def with_form(subject: Subject, form: MaskForm, given: Mapping[MaskForm, Tensor]) -> Subject:
    """The subject with masks in this form, and with others, of `TOKENS` keys, in every call."""
    call = subject.attend if subject.module is None else subject.layer
    sizes = subject.fit(Sizes(2, 2, 2, TOKENS, TOKENS, 4, 4))
    heads = sizes.H if subject.module is None else call.heads
    others = {x.argument: x.encode(keep, (2, heads), torch.float32) for x, keep in given.items()}
    options = {name: x for name, x in call.own.options.items() if name != form.argument}
    call = replace(call, form=form, own=replace(call.own, options={**options, **others}))
    if subject.module is None:
        return replace(subject, attend=call, form=form)
    return replace(subject, layer=call, layer_form=form, attend=None)


def causal_works(subject: Subject) -> bool:
    """Whether a module's causal argument, given alone, hides later keys and nothing else."""
    if subject.layer is None or not subject.has.causal or subject.conventions.causal:
        return False
    x = subject.tokens(1, TOKENS, Trial("causal"))
    try:
        depends = read_dependence(partial(subject.run_layer, causal=True), x)
    except SubjectError:
        return False
    return torch.equal(depends, pattern(TOKENS, TOKENS, causal=True))


def with_causal(subject: Subject) -> Iterator[tuple[str, Subject]]:
    """The module with each of its boolean causal options set to True, and that option in words."""
    own = replace(subject, conventions=replace(subject.conventions, causal=True), attend=None)
    if subject.has.causal:
        on = replace(own, layer=partial(subject.layer, causal=True))
        if _runs(on):
            yield f"{subject.layer.names['causal']}=True", on
    for name, value in subject.switches.items():
        if value or not _CAUSAL.search(name) or "conv" in name:
            continue
        module = _built(subject, name)
        if module is None:
            continue
        on = replace(own, layer=subject.layer_of(module), module=module)
        if _runs(on):
            yield f"built with {name}=True", on


def _built(subject: Subject, name: str) -> nn.Module | None:
    """A module of the same class and weights with one boolean option True; None if that raises."""
    try:
        module: nn.Module = subject.another(**{name: True})
        module.load_state_dict(subject.module.state_dict(), strict=False)
    except Exception:
        return None
    return module.eval()


def _runs(subject: Subject) -> bool:
    try:
        subject.run_layer(subject.tokens(1, TOKENS, Trial("causal")))
    except SubjectError:
        return False
    return True
