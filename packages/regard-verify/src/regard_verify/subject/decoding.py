"""Calling a layer piece by piece, with a cache: an object, a returned tuple, or in the layer."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard_verify.law import Trial
from regard_verify.subject.adapters import inner_of
from regard_verify.subject.caches import UNFOUND, cache_classes, content_of, makers_of
from regard_verify.subject.modules import ModuleCall
from regard_verify.subject.signatures import parameters_of
from regard_verify.subject.subject import Subject, SubjectError, called

STARTS = ("start_pos", "offset", "past_length", "past", "position_offset")
POSITIONS = ("input_pos", "positions", "position_ids", "cache_position")
RESETS = ("reset_cache", "reset_kv_cache", "clear_cache", "reset")


class CacheState(NamedTuple):
    """The cache of a layer, and how many tokens it holds."""

    held: Any
    length: int


@dataclass
class Steps:
    """One way of passing a cache to a layer.

    Attributes:
        argument: the name of the cache argument.
        style: `object`, `single`, `tuple` or `internal`, as in `Conventions.cache_style`.
        new_cache: makes an empty cache, where it is an object.
        empty: the tensors, numbers and None that the module held before the first call.
        hidden: a token that its masks hide.
    """

    call: ModuleCall
    subject: Subject
    argument: str
    style: str
    new_cache: Any = None
    empty: dict[str, Any] = field(default_factory=dict)
    hidden: int | None = None

    def new(self) -> CacheState:
        """An empty cache."""
        if self.style == "internal":
            inner = inner_of(self.call.module)
            reset = next((getattr(inner, name) for name in RESETS if hasattr(inner, name)), None)
            if reset is not None:
                called(reset)
            for name, value in self.empty.items() if reset is None else ():
                setattr(inner, name, value.clone() if isinstance(value, Tensor) else value)
            return CacheState(None, 0)
        return CacheState(called(self.new_cache) if self.new_cache is not None else None, 0)

    def step(self, x: Tensor, state: CacheState, columns: int = 0) -> tuple[Tensor, CacheState]:
        """The output for x, whose tokens follow those in `state`, and the cache after it.

        `columns` is how many keys its mask has too many.
        """
        x = x.clone()
        length = state.length + x.shape[1]
        names = parameters_of(self.call.module.forward)
        given: dict[str, Any] = dict.fromkeys(_starts(names), state.length)
        given |= {n: torch.arange(state.length, length) for n in POSITIONS if n in names}
        if self.argument:
            given[self.argument] = state.held
        if "use_cache" in names:
            given["use_cache"] = True
        keep = None
        if columns or (not self.subject.conventions.causal and self.subject.has.mask):
            keep = self.subject.visible(x.shape[1], length + columns, causal=True)[None, None]
        if self.hidden is not None:
            others = (torch.arange(length) != self.hidden).expand(1, 1, x.shape[1], length)
            keep = others if keep is None else others & keep
        with torch.no_grad():
            result = self.call.result(x, keep=keep, before=state.length, **given)
        held = state.held if self.style != "tuple" else _returned_cache(result)
        return self.call.out(result, x), CacheState(held, length)

    def pieces(self, x: Tensor, cuts: list[int]) -> tuple[Tensor, CacheState]:
        """The output for x in pieces of these lengths, from an empty cache, and the cache after."""
        state, outs = self.new(), []
        for piece in x.split(cuts, dim=1):
            out, state = self.step(piece, state)
            outs.append(out)
        return torch.cat(outs, dim=1), state

    def of(self, module: nn.Module) -> "Steps":
        """The same way of passing a cache, with another module of the same kind."""
        return replace(self, call=replace(self.call, module=module))


def _returned_cache(result: Any) -> Any:
    """The cache among the returned values: a tuple, a list, an object, or one tensor of keys
    and values.
    """
    if isinstance(result, (tuple, list)):
        for each in result[1:][::-1]:
            if each is not None and getattr(each, "ndim", 5) == 5:  # a tensor is [2, B, G, S, D]
                return each
    raise SubjectError("it returned no cache beside its output")


def _held(module: Any) -> dict[str, Any]:
    """The tensors, numbers and None that a layer holds beside its weights."""
    inner = inner_of(module)
    held = {**inner._buffers, **{n: x for n, x in vars(inner).items() if not n.startswith("_")}}
    return {
        name: x.detach().clone() if isinstance(x, Tensor) else x
        for name, x in held.items()
        if (x is None or isinstance(x, (Tensor, int))) and name != "training"
    }


def find_stepper(subject: Subject, beside: Any, trial: Trial) -> None:
    """Find out how a cache is passed; if there is a way, the subject gets a stepper.

    Of several ways that work, it is the first that gives what one call on all tokens gives.
    """
    call, own = subject.layer, subject.conventions
    declared = bool(own.cache or own.new_cache or own.cache_style)
    working: list[Steps] = []
    unknown = ""  # an argument that is read, and is no dictionary
    for steps in ways_of(call, subject, beside):
        state, before = None, None
        try:
            state = steps.new()
            before = content_of(state.held)
            for x in subject.tokens(1, 3, trial).split([2, 1], dim=1):
                _, state = steps.step(x, state)
        except (SubjectError, StopIteration) as error:
            own_class = steps.new_cache not in (None, dict)
            filled = own_class and state and content_of(state.held) != before
            if declared or filled:  # a class of its own file, in which the first tokens were put
                subject.has.unusable_cache = True
                subject.inferred["cache"] = f"{steps.argument} could not be used: {error}"
            if steps.new_cache is dict and isinstance(error.__cause__, _OF_ANOTHER_KIND):
                unknown = steps.argument
            continue
        unused = steps.new_cache is not None and content_of(state.held) == before
        if not declared and unused:
            continue  # it takes the argument and does not use it
        if _agrees(steps, subject, trial):
            return _use(steps, subject)
        working.append(steps)
    working = [each for each in working if declared or _is_certain(each)]
    if working:
        return _use(working[0], subject)
    subject.inferred.setdefault("cache", f"{UNFOUND} {unknown}=" if unknown else "none")
    return None


def _use(steps: Steps, subject: Subject) -> None:
    found = {"cache": steps.argument, "cache_style": steps.style}
    subject.conventions = subject.conventions.found(**found)
    subject.stepper = steps
    subject.has.unusable_cache, subject.has.cache = False, True
    subject.inferred["cache"] = f"{steps.argument or 'in the layer'}, {steps.style}"


def _agrees(steps: Steps, subject: Subject, trial: Trial) -> bool:
    """Whether a sequence in pieces gives what one call gives, where the two can be compared."""
    if not subject.conventions.causal and not subject.has.mask:
        return steps.style != "internal" or _is_certain(steps)
    x = subject.tokens(2, 5, trial)
    try:
        whole, (got, _) = at_once(subject, x), steps.pieces(x, [3, 1, 1])
    except SubjectError:
        return False
    return bool(torch.allclose(got, whole, atol=1e-3))


def _is_certain(steps: Steps) -> bool:
    """Whether a way that gives other outputs is a fault of the cache, and not a wrong guess."""
    if steps.style != "internal":
        return True
    inner = inner_of(steps.call.module)
    stored = any(_STORED.search(name) for name in steps.empty)
    return stored or any(hasattr(inner, name) for name in RESETS)


_OF_ANOTHER_KIND = (AttributeError, KeyError, TypeError)  # errors where a dictionary is none
_STORED = re.compile(r"^_?(cache_?[kv]|[kv]_?cache|kv_?cache|past_?[kv])(ey|alue)?s?$", re.I)
_ARGUMENTS = re.compile(r"cache|past|prev_?k|^kvs?$|incremental_state|^memory$|^state$", re.I)


def ways_of(call: ModuleCall, subject: Subject, beside: Any) -> list[Steps]:
    """The ways in which its cache may be passed, the likeliest first."""
    own = subject.conventions
    module = call.module
    if own.cache == "":
        return []
    taken = parameters_of(module.forward)
    names = [
        name
        for name, each in taken.items()
        if (_ARGUMENTS.search(name) or cache_classes(module, name))
        and not isinstance(each.default, (bool, int))
        and name not in ("use_cache", call.context, *POSITIONS, *_starts(taken))
    ]
    found = []
    for name in [own.cache] if own.cache else names:
        makers = makers_of(module, name, own.new_cache, beside)
        shared = own.cache_style == "object"  # as declared
        for each, of_layers in makers:
            style = "object" if of_layers or shared else "single"
            found.append(Steps(call, subject, name, style, each))
        plain = [Steps(call, subject, name, "single", dict)] if own.new_cache is None else []
        found += [Steps(call, subject, name, "tuple"), *plain]
    either = {**parameters_of(inner_of(module).forward), **taken}
    started = either.keys() & {*_starts(either), *POSITIONS, "use_cache"}
    if any(hasattr(inner_of(module), name) for name in RESETS) or started:
        found.append(Steps(call, subject, "", "internal", empty=_held(module)))
    alike = {"object": ("object", "single")}.get(own.cache_style or "", (own.cache_style,))
    return [each for each in found if own.cache_style is None or each.style in alike]


def _starts(taken: Mapping[str, inspect.Parameter]) -> list[str]:
    """The arguments that count earlier tokens. `past` is one of them unless it may be None: then it
    is a cache."""
    return [n for n in STARTS if n in taken and (n != "past" or taken[n].default is not None)]


def in_steps(subject: Subject, x: Tensor, cuts: list[int]) -> Tensor:
    """The output for x, computed in pieces of these lengths with a cache."""
    return subject.stepper.pieces(x, cuts)[0]


def at_once(subject: Subject, x: Tensor) -> Tensor:
    """The output for x in one call with the same masks, without a cache."""
    causal = subject.conventions.causal
    if causal or not subject.has.mask:
        return subject.run_layer(x)
    length = x.shape[1]
    keep = subject.visible(length, length, causal=True)[None, None]
    return subject.run_layer(x, keep=keep)
