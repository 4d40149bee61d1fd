"""Laws of torch.compile: the same values, and no compilation at every call."""

import warnings
from typing import Any

import torch
from torch import Tensor

from regard_verify.law import NotApplicable, Sizes, Trial, fail, law, require, tolerance
from regard_verify.subject.functions import FunctionCall, laid_out
from regard_verify.subject.subject import Subject

CALLS = 6  # with the same shapes: enough to tell a compilation at every call from a few at first
SIZES = Sizes(2, 4, 4, 4, 4, 4, 4)


@law("bounded", "heads|layer", quick=False)
def compile_agree(subject: Subject, trial: Trial) -> None:
    """torch.compile changes nothing, not even where the length equals the number of heads."""
    subject.inputs(subject.fit(SIZES), trial)
    for target, given in _compilable(subject, trial):
        torch.compiler.reset()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base = target(*given)
            try:
                compiled: Any = torch.compile(target, dynamic=False)
                got = compiled(*given)
            except Exception as error:
                raise NotApplicable(f"it was not compiled: {type(error).__name__}") from error
        cause = "torch.compile gives other values for this code"
        require(f"{SIZES}, compiled", got, base, tolerance(base), cause)


@law("resource", "heads|layer", quick=False)
def compile_count(subject: Subject, trial: Trial) -> None:
    """It is compiled once for calls of the same shapes, and not again for each call."""
    for target, given in _compilable(subject, trial):
        graphs: list[int] = []

        def counting(graph: Any, inputs: Any, graphs: list[int] = graphs) -> Any:
            graphs.append(1)
            return graph.forward

        torch.compiler.reset()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled: Any = torch.compile(target, backend=counting)
            counts = []
            for _ in range(CALLS):
                try:
                    compiled(*given)
                except Exception as error:
                    raise NotApplicable(f"it was not compiled: {type(error).__name__}") from error
                counts.append(len(graphs))
        if counts[-1] > 2 * counts[0]:
            fail(SIZES, f"graphs compiled in {CALLS} calls", f"at most {2 * counts[0]}", counts[-1],
                 "something that the compiler guards on changes at every call")  # fmt: skip


def _compilable(subject: Subject, trial: Trial) -> list[tuple[Any, tuple[Any, ...]]]:
    if isinstance(subject.attend, FunctionCall):
        call = subject.attend
        if call.requires_a_mask():
            raise NotApplicable("it requires a mask")
        given = subject.inputs(subject.fit(SIZES), trial)
        options = call.arguments(given[0], given[1], {})
        heads = tuple(laid_out(x, call.layout) for x in given)

        def target(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _first(call.target(q, k, v, **options))

        return [(target, heads)]
    assert subject.layer is not None
    return [(subject.layer, (subject.tokens(2, 4, trial),))]


def _first(result: Any) -> Tensor:
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found
