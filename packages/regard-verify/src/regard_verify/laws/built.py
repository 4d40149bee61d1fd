"""Laws of how a subject is built: it runs, it is a module, dropout runs in training only."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from regard_verify.law import NotApplicable, Sizes, Trial, fail, law, require, tolerance
from regard_verify.laws.cases import ODD, random_mask
from regard_verify.oracle import pattern
from regard_verify.subject.modules import set_dropout
from regard_verify.subject.subject import Subject

HALF = 0.5  # the probability with which dropout cannot be overlooked


@law("exact", "heads|layer")
def runs(subject: Subject, trial: Trial) -> None:
    """It runs on the inputs that it documents."""
    for sizes in (Sizes(1, 1, 1, 2, 2, 4, 4), ODD):
        for call in subject.calls(sizes, trial):
            call()


@law("exact", "heads|layer")
def super_init(subject: Subject, trial: Trial) -> None:
    """Its __init__ calls super().__init__() before it stores anything."""
    if subject.another is None and not subject.forgot_super:
        raise NotApplicable("it is no class of modules, or was given as an object")
    if subject.forgot_super:
        cause = (
            "its __init__ does not call super().__init__(), so that it cannot be built at all; all "
            "other laws were checked on one for which it was called"
        )
        fail("building it", "", "a module", "an AttributeError of nn.Module", cause)


@law("exact", "heads|layer")
def dropout_in_eval(subject: Subject, trial: Trial) -> None:
    """Dropout runs in training only: in eval mode a module with dropout gives the output of the
    same weights without dropout.
    """
    module = subject.module
    if module is None and isinstance(subject.thing, nn.Module):
        module = subject.thing  # of q, k and v, without weights
    if module is None:
        raise NotApplicable("it is a function: its dropout is an argument of the call")
    none, half = (with_dropout(module, p) for p in (0.0, HALF))
    for label, given in _inputs(subject, trial):
        right, first, second = (_run(subject, twin, given) for twin in (none, half, half))
        if not torch.equal(torch.nan_to_num(right), torch.nan_to_num(_run(subject, module, given))):
            raise NotApplicable("a copy of it differs from it")
        label = f"{label}, every probability of dropout {HALF:g}, eval mode"
        cause = "dropout runs in eval mode"
        require(f"{label}, two calls", second, first, 0.0, cause)
        allowed = tolerance(torch.nan_to_num(right), 1e-5)
        cause = "in eval mode the probability of dropout changes the output"
        require(f"{label}, and without dropout", first, right, allowed, cause)


def with_dropout(module: nn.Module, p: float) -> nn.Module:
    """A module with the same weights, in which every probability of dropout is `p`."""
    try:
        twin = copy.deepcopy(module)
    except Exception as error:
        raise NotApplicable(f"it cannot be copied: {type(error).__name__}") from error
    if not set_dropout(twin, p):
        raise NotApplicable("it has no dropout")
    return twin.eval()


def _inputs(subject: Subject, trial: Trial) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Inputs without a mask, and with one."""
    if subject.module is None:
        sizes = subject.fit(ODD)
        given = dict(zip("qkv", subject.inputs(sizes, trial), strict=True))
        masked, keep = subject.has.padding, random_mask(subject, sizes, trial)
    else:
        sizes = ODD
        given = {"x": subject.tokens(sizes.B, sizes.L, trial)}
        length = subject.length(sizes.L)
        masked, keep = subject.has.mask, pattern(length, length, causal=True)[None, None]
    yield str(sizes), given
    if masked:
        yield f"{sizes}, a mask", {**given, "keep": keep}


def _run(subject: Subject, twin: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """The output of `twin`, another module of the subject's class, for these inputs."""
    ours = {name: x.clone() for name, x in given.items()}
    with torch.no_grad():
        if subject.module is not None:
            return subject.layer_of(twin)(ours.pop("x"), **ours)
        q, k, v = (ours.pop(name) for name in "qkv")
        call = copy.copy(subject.attend)
        call.target = twin
        return call(q, k, v, **ours)
