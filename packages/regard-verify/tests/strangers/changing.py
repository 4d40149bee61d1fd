"""Whether a fault changes what an attention does: if not, it is none."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from strangers.calls import Case, build, call, cases, load
from strangers.draw import Drawing
from strangers.write import write


def faults_of(drawing: Drawing) -> list[str]:
    """Names of the faults that can be put into it and that change what it does."""
    return [name for name in write(drawing).offered if changes(drawing, name)]


def changes(drawing: Drawing, name: str) -> bool:
    """Whether a fault changes an output, a gradient, an input, or raises an error."""
    right, wrong = write(drawing), write(drawing, name)
    if right.text == wrong.text:
        return False
    return _behaviour(drawing, right) != _behaviour(drawing, wrong)


@dataclass
class Behaviour:
    """Outputs and gradients of calls, whether inputs changed, and errors."""

    outputs: list[Tensor]
    changed: list[bool]
    errors: list[str]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Behaviour)
        if self.errors != other.errors or self.changed != other.changed:
            return False
        if len(self.outputs) != len(other.outputs):
            return False
        return all(
            a.shape == b.shape and torch.allclose(a, b, rtol=1e-7, atol=1e-7)
            for a, b in zip(self.outputs, other.outputs, strict=True)
        )


def _behaviour(drawing: Drawing, source: Any) -> Behaviour:
    found = Behaviour([], [], [])
    try:
        attention = _seeded(drawing, source, 0.5)
    except (AttributeError, RuntimeError, TypeError) as error:
        found.errors += [type(error).__name__]
        return found
    for case in [*cases(drawing), *large(drawing)]:
        try:
            torch.manual_seed(0)
            out, given = call(drawing, attention, case)
            found.outputs += [out.detach(), *_gradients(drawing, attention, case, out)]
            found.changed += [not torch.equal(now, before) for now, before in given]
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            found.errors += [type(error).__name__]
    return found


def large(drawing: Drawing) -> list[Case]:
    """A call whose scores exceed what exp can represent."""
    first = cases(drawing)[0]
    inputs = tuple(1000 * each for each in first.inputs)
    if first.inputs[0] is first.inputs[1]:
        inputs = (inputs[0],) * 3
    return [replace(first, inputs=inputs)]


def _seeded(drawing: Drawing, source: Any, rate: float) -> Any:
    torch.manual_seed(1)
    attention = build(drawing, load(source), rate=rate)
    if isinstance(attention, nn.Module):
        attention.double().eval()
    return attention


def _gradients(drawing: Drawing, attention: Any, case: Case, out: Tensor) -> list[Tensor]:
    """Of the inputs."""
    inputs = tuple(each.clone().requires_grad_() for each in case.inputs)
    if case.inputs[1] is case.inputs[0]:
        inputs = (inputs[0],) * 3
    elif case.inputs[2] is case.inputs[1]:
        inputs = (inputs[0], inputs[1], inputs[1])
    torch.manual_seed(0)
    again, _ = call(drawing, attention, replace(case, inputs=inputs))
    wanted = list({id(each): each for each in inputs}.values())
    found = torch.autograd.grad(again.square().sum(), wanted, allow_unused=True)
    return [torch.zeros(()) if each is None else each for each in found]
