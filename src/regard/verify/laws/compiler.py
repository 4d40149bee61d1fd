"""Laws of the compiler: it changes nothing, and it has done when it has done."""

import warnings
from typing import Any

import torch
from torch import Tensor

from regard.verify.law import NotApplicable, Sizes, Trial, compare, fail, insist, law
from regard.verify.subject.subject import Subject

CALLS = 6


@law(
    "The compiler changes nothing, least of all where the length is the number of heads.",
    "bounded",
    "a fusion that is wrong for one shape, recompilation without end",
    "heads|layer",
    quick=False,
)
def compile_agree(subject: Subject, trial: Trial) -> None:
    sizes = Sizes(2, 4, 4, 4, 4, 4, 4)
    subject.inputs(subject.fit(sizes), trial)
    for target, given in _compilable(subject, sizes, trial):
        torch.compiler.reset()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base = target(*given)
            try:
                compiled: Any = torch.compile(target, dynamic=False)
                got = compiled(*given)
            except Exception as error:
                raise NotApplicable(f"it was not compiled: {type(error).__name__}") from error
        insist(compare(f"{sizes}, compiled", got, base, 1e-4 * float(1 + base.abs().max()),
                       "torch.compile gives other numbers for this code"))  # fmt: skip


@law(
    "Compiled once, it is not compiled again for every call of the same shapes.",
    "resource",
    "a count or a history that the compiler has to look at, a step that recompiles",
    "heads|layer",
    quick=False,
)
def compile_count(subject: Subject, trial: Trial) -> None:
    sizes = Sizes(2, 4, 4, 4, 4, 4, 4)
    for target, given in _compilable(subject, sizes, trial):
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
            fail(sizes, f"graphs compiled in {CALLS} calls", f"at most {2 * counts[0]}", counts[-1],
                 "something changes at every call that the compiler has to look at")  # fmt: skip


def _compilable(subject: Subject, sizes: Sizes, trial: Trial) -> list[tuple[Any, tuple[Any, ...]]]:
    from regard.verify.subject.functions import FunctionCall, laid_out

    if isinstance(subject.attend, FunctionCall):
        call = subject.attend
        if call._mask_is_required():
            raise NotApplicable("it must be given a mask")
        given = subject.inputs(subject.fit(sizes), trial)
        options = call._options(given[0], given[1], {})
        heads = tuple(laid_out(x, call.layout) for x in given)

        def target(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _first(call.target(q, k, v, **options))

        return [(target, heads)]
    assert subject.layer is not None
    return [(subject.layer, (subject.tokens(2, 4, trial),))]


def _first(result: Any) -> Tensor:
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


LAWS = (
    compile_agree,
    compile_count,
)
