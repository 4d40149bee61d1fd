"""From an object and declared conventions to a subject: found, built, called and probed."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.verify.law import Trial
from regard.verify.subject.adapters import (
    Adapter,
    adapted,
    is_of,
    model_folder,
    transformers_module,
)
from regard.verify.subject.caches import probe_store
from regard.verify.subject.construct import build
from regard.verify.subject.conventions import Conventions, conventions_from
from regard.verify.subject.decoding import find_stepper
from regard.verify.subject.lookup import find, is_function, named_beside
from regard.verify.subject.mask_forms import parameters_of
from regard.verify.subject.probe_functions import probe_function
from regard.verify.subject.probe_modules import probe_module
from regard.verify.subject.subject import Abilities, Subject, SubjectError, called

DECLARED = "regard_conventions"  # a dictionary in the subject's file


def understand(
    target: Any, own: Conventions | None = None, *, seed: int = 0, name: str | None = None
) -> Subject:
    """The subject behind a name or an object.

    Args:
        target: `PATH:NAME`, a dotted name, a folder with a model, or the object itself.
        own: what is declared.
        seed: of the random inputs.
        name: of the subject in the report.

    Raises:
        SubjectError: if it cannot be found, built, called or understood.

    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> understand(scaled_dot_product_attention).inferred["mask"]
    'attn_mask= bool BHLS, true or 1 may attend'
    """
    own = Conventions() if own is None else own
    trial = Trial("probe", seed=seed)
    if isinstance(target, str) and Path(target).is_dir():
        return _module(model_folder(Path(target)), own, name or target, None, trial)
    beside = None
    if isinstance(target, str):
        name = name or target
        target, beside = find(target)
        own = _declared_beside(own, beside)
    elif target is torch.nn.functional.scaled_dot_product_attention:
        target = find("torch.nn.functional:scaled_dot_product_attention")[0]
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
    if own.kind in ("cache", "paged", "allocator", "prefix", "rope") or _is_cache(target):
        return _thing(target, own, name)
    if isinstance(target, nn.Module):
        return _module(adapted(target, own.arguments), own, name, beside, trial)
    if isinstance(target, type):
        return _from_class(target, own, name, beside, trial)
    if not is_function(target):
        raise SubjectError(f"it is of type {type(target).__name__}, which cannot be called")
    if own.kind != "function" and _is_factory(target):
        made, _, _ = build(target, own)
        subject = _understood(made, replace(own, arguments={}), name, beside, trial)
        if isinstance(made, nn.Module):
            subject.another = lambda: adapted(build(target, own)[0], own.arguments)
        return subject
    subject = Subject(name, "function", replace(own, kind="function"), thing=target)
    probe_function(target, subject, trial)
    return subject


def _from_class(target: type, own: Conventions, name: str, beside: Any, trial: Trial) -> Subject:
    if is_of("transformers", target):
        subject = _module(transformers_module(target, own.arguments), own, name, beside, trial)
        subject.another = lambda: transformers_module(target, own.arguments)
        return subject
    made, arguments, remarks = build(target, own)
    if isinstance(made, nn.Module):
        subject = _module(adapted(made, own.arguments), own, name, beside, trial)
        subject.another = lambda: adapted(build(target, own)[0], own.arguments)
    elif callable(made):
        subject = _understood(made, replace(own, kind="function"), name, beside, trial)
    else:
        raise SubjectError(f"a {target.__name__} is not a module and cannot be called")
    subject.notes += remarks
    if arguments:
        subject.inferred["built with"] = ", ".join(f"{n}={v!r}" for n, v in arguments.items())
    return subject


def _module(module: nn.Module, own: Conventions, name: str, beside: Any, trial: Trial) -> Subject:
    """A module in eval mode."""
    module.eval()
    own = replace(own, kind="module", arguments={})
    own = own.found(**module.known) if isinstance(module, Adapter) else own
    subject = Subject(name, "module", own, thing=module)
    sinks = getattr(module, "sinks", None)
    subject.sinks = sinks if isinstance(sinks, torch.Tensor) else None
    probe_module(module, subject, trial)
    find_stepper(subject, beside, trial)
    return subject


def _thing(target: Any, own: Conventions, name: str) -> Subject:
    """A cache, paged function, allocator, prefix cache or rotation; each law makes it anew."""
    kind = own.kind or "cache"
    make: Callable[[], Any] = target
    plain = kind in ("paged", "rope")
    if not plain and not isinstance(target, type) and not _is_factory(target):
        raise SubjectError(
            f"each law needs a new {kind}; name its class or a function that makes one"
        )
    if isinstance(target, type) or own.arguments:
        make = _maker(target, own)
    subject = Subject(name, kind, replace(own, kind=kind), thing=make)
    subject.has = Abilities(
        cache_object=kind == "cache",
        paged=kind == "paged",
        allocator=kind == "allocator",
        prefix=kind == "prefix",
        rotation=kind == "rope",
    )
    if kind == "cache":
        probe_store(subject)
    elif not plain:
        called(make)
    return subject


def _maker(target: Any, own: Conventions) -> Callable[[], Any]:
    return lambda: build(target, own)[0]


def _is_cache(target: Any) -> bool:
    return isinstance(target, type) and hasattr(target, "update") and "Cache" in target.__name__


def _is_factory(target: Any) -> bool:
    required = [
        each
        for each in parameters_of(target).values()
        if each.default is inspect.Parameter.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    return not required and bool(inspect.isroutine(target)) and not _takes_heads(target)


def _takes_heads(target: Any) -> bool:
    return [name[:1].lower() for name in list(parameters_of(target))[:3]] == ["q", "k", "v"]
