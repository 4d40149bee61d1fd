"""Calling a layer piece by piece, with a cache: an object, a returned tuple, or in the layer."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.verify.law import Trial
from regard.verify.subject.adapters import Adapter
from regard.verify.subject.lookup import named_beside
from regard.verify.subject.mask_forms import parameters_of
from regard.verify.subject.modules import ModuleCall
from regard.verify.subject.subject import Stepper, Subject, SubjectError, called

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
        style: `object`, `tuple` or `internal`, as in `Conventions.cache_style`.
        new_cache: makes an empty cache, where it is an object.
    """

    call: ModuleCall
    subject: Subject
    argument: str
    style: str
    new_cache: Any = None

    def new(self) -> CacheState:
        """An empty cache."""
        if self.style == "internal":
            reset = next(n for n in RESETS if hasattr(self.call.module, n))
            called(getattr(self.call.module, reset))
            return CacheState(None, 0)
        return CacheState(called(self.new_cache) if self.style == "object" else None, 0)

    def step(self, x: Tensor, state: CacheState) -> tuple[Tensor, CacheState]:
        """The output for x, whose tokens follow those in `state`, and the cache after it."""
        with torch.no_grad():
            return self.follow(x.clone(), state)

    def follow(
        self, x: Tensor, state: CacheState, *, columns: int = 0
    ) -> tuple[Tensor, CacheState]:
        """`step` with gradients and without a copy; the mask is `columns` keys too wide."""
        length = state.length + x.shape[1]
        given = self._positions(state.length, x.shape[1])
        if self.argument:
            given[self.argument] = state.held
        if "use_cache" in parameters_of(self.call.module.forward):
            given["use_cache"] = True
        keep = self.keep(state.length, x.shape[1])
        if columns:
            keep = self.subject.visible(x.shape[1], length + columns, causal=True)[None, None]
        result = self.call.result(x, keep=keep, before=state.length, **given)
        held = state.held if self.style != "tuple" else _returned_cache(result)
        return self.call.out(result, x), CacheState(held, length)

    def stepper(self) -> Stepper:
        """The same for the laws, without what it is made of."""
        return Stepper(self.new, self.step, self.style, self.follow, self.of)

    def of(self, module: nn.Module) -> Stepper:
        """The same way of passing a cache, with another module of the same kind."""
        return replace(self, call=replace(self.call, module=module)).stepper()

    def keep(self, before: int, new: int) -> Tensor | None:
        """The causal mask of a step, where the layer is not causal by itself."""
        if self.subject.conventions.causal or not self.subject.has.mask:
            return None
        return self.subject.visible(new, before + new, causal=True)[None, None]

    def _positions(self, before: int, new: int) -> dict[str, Any]:
        names = parameters_of(self.call.module.forward)
        given: dict[str, Any] = {name: before for name in STARTS if name in names}
        given.update({n: torch.arange(before, before + new) for n in POSITIONS if n in names})
        return given


def _returned_cache(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        for each in result[1:][::-1]:
            if isinstance(each, (tuple, list, dict)) or not isinstance(each, (Tensor, type(None))):
                return each
    raise SubjectError("it returned no cache beside its output")


def find_stepper(subject: Subject, beside: Any, trial: Trial) -> None:
    """Find out how a cache is passed; if there is a way, the subject gets a stepper."""
    call = subject.layer
    assert isinstance(call, ModuleCall)
    own = subject.conventions
    for steps in _ways(call, subject, beside):
        try:
            state = steps.new()
            for x in subject.tokens(1, 3, trial).split([2, 1], dim=1):
                _, state = steps.step(x, state)
        except (SubjectError, StopIteration) as error:
            if own.cache or own.new_cache or own.cache_style:
                subject.has.unusable_cache = True
                subject.inferred["cache"] = f"{steps.argument} could not be used: {error}"
            continue
        subject.conventions = own.found(cache=steps.argument, cache_style=steps.style)
        subject.stepper = steps.stepper()
        subject.has.unusable_cache, subject.has.cache = False, True
        subject.inferred["cache"] = f"{steps.argument or 'in the layer'}, {steps.style}"
        return
    subject.inferred.setdefault("cache", "none")


def _ways(call: ModuleCall, subject: Subject, beside: Any) -> list[Steps]:
    own = subject.conventions
    module = call.module
    if own.cache == "":
        return []
    factory = _factory(module, own.new_cache, beside)
    names = [
        name
        for name in parameters_of(module.forward)
        if ("cache" in name or "past" in name) and name not in ("use_cache", *POSITIONS, *STARTS)
    ]
    found = []
    for name in [own.cache] if own.cache else names:
        if factory is not None:
            found.append(Steps(call, subject, name, "object", factory))
        found.append(Steps(call, subject, name, "tuple"))
    if any(hasattr(module, name) for name in RESETS):
        found.append(Steps(call, subject, "", "internal"))
    return [each for each in found if own.cache_style in (None, each.style)]


def _factory(module: Any, declared: Any, beside: Any) -> Any:
    if callable(declared):
        return declared
    if declared:
        return named_beside(beside, declared)
    return module.new_cache if isinstance(module, Adapter) else None


def in_steps(subject: Subject, x: Tensor, cuts: list[int]) -> Tensor:
    """The output for x, computed in pieces of these lengths with a cache."""
    assert subject.stepper is not None
    state, pieces = subject.stepper.new(), []
    for piece in x.split(cuts, dim=1):
        out, state = subject.stepper.step(piece, state)
        pieces.append(out)
    return torch.cat(pieces, dim=1)


def at_once(subject: Subject, x: Tensor) -> Tensor:
    """The output for x in one call with the same masks, without a cache."""
    causal = subject.conventions.causal
    if causal or not subject.has.mask:
        return subject.run_layer(x)
    length = x.shape[1]
    keep = subject.visible(length, length, causal=True)[None, None]
    return subject.run_layer(x, keep=keep)
