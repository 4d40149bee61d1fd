"""Laws of layers with a cache: pieces against the whole sequence, drafts, bytes, refused steps."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from regard_verify.law import Broken, NotApplicable, Trial, fail, law, require, tolerance
from regard_verify.subject.adapters import TransformersModel
from regard_verify.subject.caches import BY_AMOUNT, TRUNCATES, storage_bytes
from regard_verify.subject.decoding import CacheState, Steps, at_once, in_steps
from regard_verify.subject.subject import Subject, SubjectError, called

INDICES = ("layer_idx", "layer_id", "layer_index", "layer_num", "idx")


@law("exact", "cache")
def one_past_two_layers(subject: Subject, trial: Trial) -> None:
    """If two layers are given one cache, the second refuses it, or each reads its own tokens."""
    if subject.stepper.style == "tuple":
        raise NotApplicable("its cache is a returned value, which is not shared")
    steppers = [subject.stepper, subject.stepper.of(_another_layer(subject))]
    inputs = [subject.tokens(2, 6, trial) for _ in steppers]
    given = zip(steppers, inputs, strict=True)
    alone = [_in_turns([each], [x], [each.new()])[0] for each, x in given]
    if min(x.shape[1] for x in alone) < 6:
        raise NotApplicable("it could not be run in pieces of 3")
    states = [each.new() for each in steppers]
    if subject.stepper.style == "object":
        states[1] = states[0]
    together = _in_turns(steppers, inputs, states)
    for order, mine, right in zip(("first", "second"), together, alone, strict=True):
        label = f"B=2, two layers in turns, pieces of 3, the {order} layer"
        cause = "two layers share one cache without an error: each reads the other's tokens"
        require(label, mine, right[:, : mine.shape[1]], tolerance(right), cause)


def _in_turns(
    steppers: list[Steps], inputs: list[Tensor], caches: list[CacheState]
) -> list[Tensor]:
    """The outputs of all layers, in turns and in pieces of 3; a layer that refuses is left out."""
    states, over = list(caches), set[int]()
    outs: list[list[Tensor]] = [[] for _ in inputs]
    for piece in range(2):
        for layer, stepper in enumerate(steppers):
            if layer in over:
                continue
            try:
                x = inputs[layer].split(3, 1)[piece]
                out, states[layer] = stepper.step(x, states[layer])
                outs[layer].append(out)
            except SubjectError:
                over.add(layer)
    return [torch.cat(each, 1) if each else x[:, :0] for each, x in zip(outs, inputs, strict=True)]


def _another_layer(subject: Subject) -> nn.Module:
    """A second layer as in a model: built anew if that is possible, with the next layer index."""
    module = subject.module
    indices = [value for each in module.modules() for value in _indices(each).values()]
    if isinstance(module, TransformersModel) or len(set(indices)) > 1:
        raise NotApplicable("it has several layers, which share a cache by their indices")
    try:
        twin = subject.another() if subject.another is not None else copy.deepcopy(module)
    except Exception as error:
        raise NotApplicable(f"no second layer could be built: {type(error).__name__}") from error
    for each in twin.modules():
        for name, value in _indices(each).items():
            setattr(each, name, value + (value in indices))
    return twin.eval()


def _indices(module: nn.Module) -> dict[str, int]:
    """The attributes of a module that hold its index in a model."""
    given = {name: getattr(module, name, None) for name in INDICES}
    return {n: v for n, v in given.items() if isinstance(v, int) and not isinstance(v, bool)}


WRONG: dict[str, Callable[[Tensor], Tensor]] = {  # tokens that a layer refuses
    "of another width": lambda x: torch.cat([x, x[..., :1]], -1),
    "with a row too many": lambda x: torch.cat([x, x[:1]]),
    "in float64": lambda x: x.double(),
}


@law("exact", "cache")
def refused_step(subject: Subject, trial: Trial) -> None:
    """A refused step leaves the cache as it was: the right token then gives its usual output."""
    x = subject.tokens(2, 6, trial)
    right = _two_more(subject.stepper, x)
    assert right is not None
    tries = {f"a token {name}": (change(x[:, 4:5]), 0) for name, change in WRONG.items()}
    if subject.has.mask:
        tries["a mask for 2 keys too many"] = (x[:, 4:5], 2)
    outs = {mistake: _two_more(subject.stepper, x, *wrong) for mistake, wrong in tries.items()}
    if all(got is None for got in outs.values()):
        raise NotApplicable("none of the steps raises an error")
    for mistake, got in outs.items():
        if got is not None:
            cause = "the step raised an error and has changed the cache: a retry is silently wrong"
            label = f"B=2, 4 tokens, {mistake}, 2 tokens"
            require(label, got, right[:, : got.shape[1]], tolerance(right), cause)


def _two_more(
    stepper: Steps, x: Tensor, wrong: Tensor | None = None, columns: int = 0
) -> Tensor | None:
    """The outputs of tokens 4 and 5 after a wrong step: fewer where the cache is refused then.

    None if the step is not refused, or the cache is from then on. With a mask that is `columns` too
    wide, errors of torch are accidents.
    """
    _, state = stepper.step(x[:, :4], stepper.new())
    if wrong is not None:
        try:
            stepper.step(wrong, state, columns)
            return None
        except SubjectError as error:
            if columns and not isinstance(error.__cause__, (ValueError, TypeError, AssertionError)):
                return None
    pieces: list[Tensor] = []
    with suppress(SubjectError):
        for token in x[:, 4:].split(1, 1):
            out, state = stepper.step(token, state)
            pieces.append(out)
    return torch.cat(pieces, 1) if pieces else None


LENGTH = 9


def _whole(subject: Subject, trial: Trial) -> tuple[Tensor, Tensor]:
    """x, and its output without a cache."""
    if subject.stepper is None:
        fail("L=3 in pieces of [2, 1]", "", "an output", "an error", subject.inferred["cache"])
    if not subject.conventions.causal and not subject.has.mask:
        raise NotApplicable("it is not causal: with a cache it cannot give what it gives at once")
    x = subject.tokens(2, LENGTH, trial)
    return x, at_once(subject, x)


def _cause(got: Tensor, whole: Tensor, cuts: list[int]) -> str:
    """The likely mistake, by the first token that is wrong."""
    error = (got - whole).abs().amax(-1).amax(0)
    wrong = int((error > tolerance(whole, 1e-3)).float().argmax())
    starts = [sum(cuts[:i]) for i in range(len(cuts))]
    if wrong not in starts[1:] and cuts[-1] > 1:
        return f"first wrong at token {wrong}, inside a piece: the mask of a piece after others"
    return f"first wrong at token {wrong}: positions, mask or cache start again with each piece"


def _pieces(subject: Subject, trial: Trial, ways: list[list[int]]) -> None:
    x, whole = _whole(subject, trial)
    for cuts in ways:
        got = in_steps(subject, x, cuts)
        try:
            require(f"B=2 L={LENGTH} in pieces of {cuts}", got, whole, tolerance(whole), "")
        except Broken as broken:
            raise Broken(replace(broken.example, cause=_cause(got, whole, cuts))) from None


@law("bounded", "cache|unusable_cache")
def chunked_prefill(subject: Subject, trial: Trial) -> None:
    """A sequence in pieces gives the outputs of one call, however it is cut."""
    _pieces(subject, trial, [[LENGTH], [5, 4], [1, 5, 3], [3, 1, 1, 4]])


@law("bounded", "cache|unusable_cache")
def decode_equals_full(subject: Subject, trial: Trial) -> None:
    """Decoding token by token gives the outputs of one call on the whole sequence."""
    _pieces(subject, trial, [[1] * LENGTH, [4] + [1] * (LENGTH - 4)])


@law("bounded", "cache")
def drafts_dropped(subject: Subject, trial: Trial) -> None:
    """After drafted tokens are dropped from a cache, the next tokens give the outputs that they
    give without drafts.
    """
    x, whole = _whole(subject, trial)
    for drafts in (1, 3):
        _, after = subject.stepper.step(x[:, :5], subject.stepper.new())
        if hasattr(after.held, "activate_past_recording"):  # transformers' caches of windows
            after.held.activate_past_recording()
        for token in subject.tokens(2, drafts, trial).split(1, 1):
            _, after = subject.stepper.step(token, after)
        name = next((each for each in TRUNCATES if hasattr(after.held, each)), "")
        if not name:
            raise NotApplicable("its cache has no method that drops tokens")
        drop = getattr(after.held, name)
        try:
            try:
                called(drop, drafts if name in BY_AMOUNT else 5)
            except SubjectError:
                called(drop, -drafts)
        except SubjectError as error:
            raise NotApplicable(f"its cache refuses to drop tokens: {error}") from error
        got, _ = subject.stepper.step(x[:, 5:], after._replace(length=5))
        label = f"B=2, 5 tokens, {drafts} drafted and dropped, 4 more"
        cause = "dropped tokens leave a trace in the cache, or took other tokens with them"
        require(label, got, whole[:, 5:], tolerance(whole), cause)


@law("resource", "cache")
def cache_bytes(subject: Subject, trial: Trial) -> None:
    """A token costs at most the declared bytes."""
    declared = subject.conventions.cache_bytes
    if declared is None:
        raise NotApplicable("it declares no bytes for a token")
    tokens = 256
    _, state = subject.stepper.pieces(subject.tokens(1, tokens, trial), [64] * 4)
    held = storage_bytes(state.held)
    if held > 1.3 * declared * tokens:
        cause = "it holds more than is declared: repeated heads, or more than a latent"
        fail(f"{tokens} tokens", "bytes for each", f"{declared:g}", f"{held / tokens:.1f}", cause)
