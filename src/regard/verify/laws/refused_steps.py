"""Laws of pasts in wrong hands: one for two layers, and steps that are refused or interrupted."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.verify.law import NotApplicable, Trial, compare, insist, law
from regard.verify.laws.caches import same
from regard.verify.subject.adapters import HostedModel
from regard.verify.subject.caches import DIM, HEADS, new_store
from regard.verify.subject.decoding import Past
from regard.verify.subject.subject import Stepper, Subject, SubjectError

Wrong = Callable[[Past], bool]  # does something wrong; whether that ended in an error
INDICES = ("layer_idx", "layer_id", "layer_index", "layer_num", "idx")


@law(
    "A past that two layers are given is refused by the second, or each reads its own tokens.",
    "exact",
    "one cache for all layers of a model, a past kept by the class and not by the layer",
    "cache",
)
def one_past_two_layers(subject: Subject, trial: Trial) -> None:
    assert subject.stepper is not None
    if subject.stepper.style == "tuple":
        raise NotApplicable("its past is a value that it gives back: there is nothing to share")
    steppers = [subject.stepper, subject.stepper.of(_another_layer(subject))]
    inputs = [subject.tokens(2, 6, trial) for _ in steppers]
    alone = [
        _in_turns([each], [x], [each.new()])[0] for each, x in zip(steppers, inputs, strict=True)
    ]
    if min(x.shape[1] for x in alone) < 6:
        raise NotApplicable("it could not be run in pieces of 3")
    pasts = [each.new() for each in steppers]
    if subject.stepper.style == "object":
        pasts[1] = pasts[0]
    together = _in_turns(steppers, inputs, pasts)
    for said, mine, right in zip(("first", "second"), together, alone, strict=True):
        insist(compare(
            f"B=2, two layers in turns, pieces of 3, the {said} layer",
            mine, right[:, : mine.shape[1]], 1e-4 * float(1 + right.abs().max()),
            "two layers share one past without an error: each reads the other's tokens",
        ))  # fmt: skip


def _in_turns(steppers: list[Stepper], inputs: list[Tensor], pasts: list[Past]) -> list[Tensor]:
    """The output of each layer in pieces of 3, in turns; one that refuses is asked no more."""
    pasts, outs, over = list(pasts), [[x[:, :0]] for x in inputs], set[int]()
    for piece in range(2):
        for layer, stepper in enumerate(steppers):
            if layer in over:
                continue
            try:
                x = inputs[layer].split(3, 1)[piece]
                out, pasts[layer] = stepper.step(x, pasts[layer])
                outs[layer].append(out)
            except SubjectError:
                over.add(layer)
    return [torch.cat(each, 1) for each in outs]


def _another_layer(subject: Subject) -> nn.Module:
    """A second layer as a model holds it: made anew where that is known, with its own index."""
    module = subject.module
    assert module is not None
    indices = [value for each in module.modules() for value in _indices(each).values()]
    if isinstance(module, HostedModel) or len(set(indices)) > 1:
        raise NotApplicable("it is several layers, which share a past by their indices")
    try:
        twin: nn.Module = subject.other["another"]() if "another" in subject.other else module
        twin = copy.deepcopy(module) if twin is module else twin
    except Exception as error:
        raise NotApplicable(f"there is no second one: {type(error).__name__}") from error
    for each in twin.modules():
        for name, value in _indices(each).items():
            setattr(each, name, value + (value in indices))
    return twin.eval()


def _indices(module: nn.Module) -> dict[str, int]:
    """What a module says of its place in a model."""
    given = {name: getattr(module, name, None) for name in INDICES}
    return {n: v for n, v in given.items() if isinstance(v, int) and not isinstance(v, bool)}


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "of another width": lambda x: torch.cat([x, x[..., :1]], -1),
    "with a row too many": lambda x: torch.cat([x, x[:1]]),
    "in float64": lambda x: x.double(),
}


@law(
    "A step that is refused leaves the past as it was: the right token then gives what it always "
    "gives.",
    "exact",
    "a token that is counted or kept before it is checked",
    "cache|store",
)
def refused_step(subject: Subject, trial: Trial) -> None:
    if subject.stepper is None:
        _refused_update(subject, trial)
        return
    stepper, x = subject.stepper, subject.tokens(2, 6, trial)
    tries: dict[str, Wrong] = {
        f"a token {said}": partial(_try_token, stepper, change(x[:, 4:5]))
        for said, change in WRONG.items()
    }
    if "mask" in subject.has:
        tries["a mask for 2 keys too many"] = partial(_try_mask, stepper, x[:, 4:5])
    _leave_the_past(stepper, x, tries)


@law(
    "A step that ends in an error leaves the past as it was, or the past is refused from then on.",
    "exact",
    "a past that has grown by a token whose output was never given: a retry reads it twice",
    "cache",
    advised=True,
)
def interrupted_step(subject: Subject, trial: Trial) -> None:
    if subject.stepper is None or subject.module is None:
        raise NotApplicable("it has no past that was found")
    stepper, x = subject.stepper, subject.tokens(2, 6, trial)
    points: list[str] = []
    _, past = stepper.step(x[:, :4], stepper.new())
    with _interrupted(subject.module, points, None):
        stepper.step(x[:, 4:5], past)
    last = list(enumerate(points))[-6 if trial.quick else -30 :]
    _leave_the_past(stepper, x, {
        f"an error in {said}": partial(_try_interrupted, stepper, subject.module, x[:, 4:5], at)
        for at, said in last
    })  # fmt: skip


def _two_more(stepper: Stepper, x: Tensor, wrong: Wrong | None) -> Tensor | None:
    """The output of tokens 4 and 5, after `wrong` was tried; None if that was no error."""
    _, past = stepper.step(x[:, :4], stepper.new())
    if wrong is not None and not wrong(past):
        return None
    pieces = [x[:, :0]]
    for token in x[:, 4:].split(1, 1):
        try:
            out, past = stepper.step(token, past)
        except SubjectError:
            if wrong is None:
                raise
            break  # it says that its past cannot be used
        pieces.append(out)
    return torch.cat(pieces, 1)


def _leave_the_past(stepper: Stepper, x: Tensor, tries: dict[str, Wrong]) -> None:
    """After each try that ends in an error, two more tokens give what they give without it."""
    right = _two_more(stepper, x, None)
    assert right is not None
    judged = 0
    for said, wrong in tries.items():
        got = _two_more(stepper, x, wrong)
        if got is None:
            continue
        judged += 1
        insist(compare(
            f"B=2, 4 tokens, {said}, 2 tokens", got, right[:, : got.shape[1]],
            1e-4 * float(1 + right.abs().max()),
            "the step ended in an error and has changed the past: a retry is silently wrong",
        ))  # fmt: skip
    if not judged:
        raise NotApplicable("none of its steps ends in an error")


def _try_token(stepper: Stepper, token: Tensor, past: Past) -> bool:
    """Whether the subject ended in an error of any kind."""
    try:
        stepper.step(token, past)
    except SubjectError as error:
        return error.__cause__ is not None
    return False


def _try_mask(stepper: Stepper, token: Tensor, past: Past) -> bool:
    """Whether the subject refused: an error of torch's is an accident, see `interrupted_step`."""
    try:
        with torch.no_grad():
            stepper.follow(token, past, columns=2)
    except SubjectError as error:
        return isinstance(error.__cause__, (ValueError, TypeError, AssertionError))
    return False


def _try_interrupted(
    stepper: Stepper, module: nn.Module, token: Tensor, at: int, past: Past
) -> bool:
    with _interrupted(module, [], at):
        return _try_token(stepper, token, past)


PRODUCTS = {
    torch.softmax, torch.Tensor.softmax, nn.functional.softmax, torch.matmul, torch.Tensor.matmul,
    torch.Tensor.__matmul__, torch.bmm, torch.baddbmm, torch.einsum,
    nn.functional.scaled_dot_product_attention,
}  # fmt: skip


class _Watched(TorchFunctionMode):
    """Tells when a product or a softmax is about to run."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self.tell(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def _interrupted(module: nn.Module, points: list[str], at: int | None) -> Iterator[None]:
    """Note in `points` each submodule, product and softmax that runs; raise at one of them."""

    def tell(said: str) -> None:
        points.append(said)
        if at == len(points) - 1:
            raise RuntimeError("an error in the middle of a step")

    with ExitStack() as stack:
        for name, each in module.named_modules():
            if not list(each.children()):
                handle = each.register_forward_pre_hook(lambda *_, name=name: tell(name))
                stack.callback(handle.remove)
        stack.enter_context(_Watched(tell))
        yield


def _refused_update(subject: Subject, trial: Trial) -> None:
    judged = 0
    for said, change in WRONG.items():
        store = new_store(subject)
        first, last = ([trial.randn(1, HEADS, n, DIM) for _ in "kv"] for n in (3, 1))
        store.append(*first)
        try:
            store.append(*(change(x) for x in last))
            continue
        except SubjectError:
            judged += 1
        with suppress(SubjectError):  # it may say that it cannot be used
            for got, *put in zip(store.append(*last), first, last, strict=True):
                expected = torch.cat(put, 2)
                same(subject, f"3 tokens, one {said}, one more", got[:, :, -4:], expected,
                     "it has kept something of tokens that it refused")  # fmt: skip
    if not judged:
        raise NotApplicable("it refuses nothing")


LAWS = (
    one_past_two_layers,
    refused_step,
    interrupted_step,
)
