"""Laws of caches after mistakes: one cache in two layers, steps that are refused."""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from regard_verify.law import NotApplicable, Trial, law, require, tolerance
from regard_verify.subject.adapters import TransformersModel
from regard_verify.subject.decoding import CacheState, Steps
from regard_verify.subject.subject import Subject, SubjectError

Wrong = Callable[[CacheState], bool]  # makes a mistake; returns whether that raised an error
INDICES = ("layer_idx", "layer_id", "layer_index", "layer_num", "idx")


@law("exact", "cache")
def one_past_two_layers(subject: Subject, trial: Trial) -> None:
    """If two layers are given one cache, the second refuses it, or each reads its own tokens."""
    if subject.stepper.style == "tuple":
        raise NotApplicable("its cache is a returned value, which is not shared")
    steppers = [subject.stepper, subject.stepper.of(_another_layer(subject))]
    inputs = [subject.tokens(2, 6, trial) for _ in steppers]
    alone = [
        _in_turns([each], [x], [each.new()])[0] for each, x in zip(steppers, inputs, strict=True)
    ]
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
    return [_joined(each, x) for each, x in zip(outs, inputs, strict=True)]


def _joined(pieces: list[Tensor], x: Tensor) -> Tensor:
    """The outputs one after the other; none if the first piece was refused."""
    return torch.cat(pieces, 1) if pieces else x[:, :0]


def _another_layer(subject: Subject) -> nn.Module:
    """A second layer as in a model: built anew if that is possible, with the next layer index."""
    module = subject.module
    assert module is not None
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


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "of another width": lambda x: torch.cat([x, x[..., :1]], -1),
    "with a row too many": lambda x: torch.cat([x, x[:1]]),
    "in float64": lambda x: x.double(),
}


@law("exact", "cache")
def refused_step(subject: Subject, trial: Trial) -> None:
    """A refused step leaves the cache as it was: the right token then gives its usual output."""
    stepper, x = subject.stepper, subject.tokens(2, 6, trial)
    tries: dict[str, Wrong] = {
        f"a token {mistake}": partial(_try_token, stepper, change(x[:, 4:5]))
        for mistake, change in WRONG.items()
    }
    if subject.has.mask:
        tries["a mask for 2 keys too many"] = partial(_try_mask, stepper, x[:, 4:5])
    _leave_the_cache(stepper, x, tries)


def _two_more(stepper: Steps, x: Tensor, wrong: Wrong | None) -> Tensor | None:
    """The outputs of tokens 4 and 5 after the mistake `wrong`; None if that raised no error."""
    _, state = stepper.step(x[:, :4], stepper.new())
    if wrong is not None and not wrong(state):
        return None
    pieces: list[Tensor] = []
    for token in x[:, 4:].split(1, 1):
        try:
            out, state = stepper.step(token, state)
        except SubjectError:
            if wrong is None:
                raise
            break  # the cache is refused
        pieces.append(out)
    return _joined(pieces, x)


def _leave_the_cache(stepper: Steps, x: Tensor, tries: dict[str, Wrong]) -> None:
    """After each mistake that raises an error, two more tokens give their usual outputs."""
    right = _two_more(stepper, x, None)
    assert right is not None
    checked = False
    for mistake, wrong in tries.items():
        got = _two_more(stepper, x, wrong)
        if got is None:
            continue
        checked = True
        cause = "the step raised an error and has changed the cache: a retry is silently wrong"
        label = f"B=2, 4 tokens, {mistake}, 2 tokens"
        require(label, got, right[:, : got.shape[1]], tolerance(right), cause)
    if not checked:
        raise NotApplicable("none of the steps raises an error")


def _try_token(stepper: Steps, token: Tensor, state: CacheState) -> bool:
    """Whether the subject raised an error of any kind."""
    try:
        stepper.step(token, state)
    except SubjectError as error:
        return error.__cause__ is not None
    return False


def _try_mask(stepper: Steps, token: Tensor, state: CacheState) -> bool:
    """Whether the subject refused; errors of torch are accidents."""
    try:
        with torch.no_grad():
            stepper.follow(token, state, columns=2)
    except SubjectError as error:
        return isinstance(error.__cause__, (ValueError, TypeError, AssertionError))
    return False
