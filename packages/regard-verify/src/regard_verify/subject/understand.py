"""From an object and declared conventions to a subject: found, built, called and probed."""

import copy
import inspect
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from regard_verify.law import Trial
from regard_verify.subject.adapters import Adapter, adapted
from regard_verify.subject.caches import update_of
from regard_verify.subject.construct import Built, build
from regard_verify.subject.conventions import DECLARED, Conventions, conventions_from
from regard_verify.subject.decoding import find_stepper
from regard_verify.subject.functions import OfModule, OnPages, takes_module
from regard_verify.subject.guesses import role_of
from regard_verify.subject.lookup import find, named_beside, scaled_dot_product_attention
from regard_verify.subject.modules import set_dropout
from regard_verify.subject.positions import moved, positioned
from regard_verify.subject.probe_functions import probe_function
from regard_verify.subject.probe_modules import probe_module
from regard_verify.subject.probe_weights import read_scale
from regard_verify.subject.ranks import OnRanks
from regard_verify.subject.signatures import order_of, parameters_of, required_of
from regard_verify.subject.subject import Subject, SubjectError


def understand(
    target: Any, own: Conventions | None = None, *, seed: int = 0, name: str | None = None
) -> Subject:
    """The subject behind a name or an object: found, built, called, and its conventions probed.

    Args:
        target: `PATH:NAME`, `package.module:NAME`, or the object itself.
        own: what is declared.
        seed: of the random inputs.
        name: of the subject in the report.

    Raises:
        SubjectError: if it cannot be found, built, called or understood.

    Examples:
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> from regard_verify import understand
        >>> understand(scaled_dot_product_attention).inferred["mask"]
        'attn_mask= bool BHLS, true or 1 may attend'
    """
    own = Conventions() if own is None else own
    trial = Trial("probe", seed=seed)
    beside = None
    if isinstance(target, str):
        name = name or target
        target, beside = find(target)
        own = _declared_beside(own, beside)
    if target is torch.nn.functional.scaled_dot_product_attention:  # which has no signature
        target = scaled_dot_product_attention
    name = str(name or getattr(target, "__name__", type(target).__name__))
    if beside is None:
        owner = target if hasattr(target, "__module__") else type(target)
        beside = sys.modules.get(getattr(owner, "__module__", "") or "")
    torch.manual_seed(seed)
    subject = _understood(target, own, name, beside, trial)
    if own.reference is not None:
        subject.reference = named_beside(beside, own.reference)
        subject.has.reference = True
    return subject


def _declared_beside(own: Conventions, beside: Any) -> Conventions:
    """The conventions of the caller, completed by those in the subject's file."""
    given = getattr(beside, DECLARED, None)
    if not isinstance(given, dict):
        return own
    try:
        return replace(conventions_from(given), **own.declared())
    except ValueError as error:
        raise SubjectError(f"{DECLARED}: {error}") from error


def _understood(target: Any, own: Conventions, name: str, beside: Any, trial: Trial) -> Subject:
    if isinstance(target, type) and update_of(target) and not hasattr(target, "forward"):
        raise SubjectError(
            f"{name} is a cache, which is judged in the layer that it serves: name a module whose "
            "forward(x, cache=None) updates it, and declare new_cache, the name of its class"
        )
    if isinstance(target, nn.Module):
        return _object(adapted(target), own, name, beside, trial)
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        target = target.apply
    if takes_module(target):
        target = OfModule(target)
    if isinstance(target, type):
        return _from_class(target, own, name, beside, trial)
    if not callable(target):
        raise SubjectError(f"it is of type {type(target).__name__}, which cannot be called")
    taken = parameters_of(target).values()
    by_place = any(each.kind is each.VAR_POSITIONAL for each in taken) or order_of(target)
    builds = inspect.isroutine(target) and not by_place and not required_of(target)
    if builds and own.kind not in ("function", "paged"):
        built = build(target, own)
        subject = _understood(built.made, replace(own, arguments={}), name, beside, trial)
        _remember(subject, built, target, own)
        return subject
    return _function(target, own, name, trial)


def _function(target: Any, own: Conventions, name: str, trial: Trial) -> Subject:
    if own.kind == "paged":
        corner = {"causal": True, "window": 0, "alignment": "bottom-right"}
        own = own.found(layout="BHLD", mask="", **corner)
        target = OnPages(target)
    if own.ranks:
        own = own.found(layout="BHLD", multiple=own.ranks, mask="")
        target = OnRanks(target, own.ranks or 1, own.layout or "BHLD")
    subject = Subject(name, "function", replace(own, kind="function", arguments={}), thing=target)
    probe_function(target, subject, trial)
    return subject


def _object(module: nn.Module, own: Conventions, name: str, beside: Any, trial: Trial) -> Subject:
    """A module from x, or one of (q, k, v) without weights, which is a function of these."""
    weights = any(each.numel() for each in module.parameters())
    plain = order_of(module) and not weights and not isinstance(module, Adapter)
    if own.kind == "function" or (own.kind is None and plain):
        return _function(module.eval(), own, name, trial)
    return _module(positioned(module.eval(), own), own, name, beside, trial)


def _from_class(target: type, own: Conventions, name: str, beside: Any, trial: Trial) -> Subject:
    built = build(target, own)
    if isinstance(built.made, nn.Module):
        module = adapted(built.made)
        set_dropout(module, 0.0)  # a law sets another
        subject = _object(module, own, name, beside, trial)
    elif callable(built.made):
        subject = _understood(built.made, replace(own, kind="function"), name, beside, trial)
    else:
        raise SubjectError(f"a {target.__name__} is not a module and cannot be called")
    _remember(subject, built, target, own)
    if subject.kind == "function":
        _given_scale(subject, built, trial)
    return subject


def _given_scale(subject: Subject, built: Built, trial: Trial) -> None:
    """Its scale, where that follows from an argument of its class, as a temperature."""
    for name, value in built.arguments.items():
        if role_of(name) == "scale" and subject.conventions.scale is None and value:
            found = read_scale(subject, trial) or 0.0
            likely = [x for x in (value, 1 / value) if abs(found - x) < 1e-3 * x]
            subject.conventions = subject.conventions.found(scale=next(iter(likely), None))


def _remember(subject: Subject, built: Built, made_by: Any, own: Conventions) -> None:
    """Record how the subject was built, and how to build another."""
    if isinstance(built.made, nn.Module):
        like = subject.thing

        def another(**changes: Any) -> nn.Module:
            module = adapted(build(made_by, own, **changes).made)
            set_dropout(module, 0.0)
            return moved(like, module)

        subject.another = another
    subject.switches = built.switches
    subject.forgot_super = built.forgot_super
    if built.forgot_super:
        subject.notes.append(
            f"{subject.name}.__init__ does not call super().__init__(); it was called for it."
        )
    if built.arguments:
        subject.inferred["built with"] = ", ".join(f"{n}={v!r}" for n, v in built.arguments.items())


def _in_float32(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """The module, or a copy in float32 if its weights have another dtype, and a remark on it."""
    kinds = {x.dtype for x in module.parameters() if x.is_floating_point()}
    if not kinds or kinds == {torch.float32}:
        return module, []
    try:
        twin = copy.deepcopy(module).float()
    except Exception:
        return module, []
    names = ", ".join(sorted(str(kind) for kind in kinds))
    return twin, [f"Its weights are {names}: a copy of it in float32 is judged."]


def _module(module: nn.Module, own: Conventions, name: str, beside: Any, trial: Trial) -> Subject:
    """The subject of a module, which is judged in eval mode and float32."""
    if own.ranks:
        raise SubjectError(
            "ranks are declared, and only a function of (q, k, v) is called on ranks"
        )
    module, remark = _in_float32(module)
    module.eval()
    own = replace(own, kind="module", arguments={})
    own = own.found(**module.known) if isinstance(module, Adapter) else own
    subject = Subject(name, "module", own, thing=module)
    subject.notes += remark
    sinks = getattr(module, "sinks", None)
    subject.sinks = sinks if isinstance(sinks, torch.Tensor) else None
    probe_module(module, subject, trial)
    find_stepper(subject, beside, trial)
    return subject
