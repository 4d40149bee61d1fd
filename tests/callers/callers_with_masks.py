"""Callers that change what a mask holds, map over it, or break off a call before it ends."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from callers.programs import Program
from callers.table import NO_GRADIENTS, Found, caller, forward, gradients, trained

CHANGED = "written in place"


def changing_data(name: str, run: Callable[[Program], Found]) -> None:
    """A caller that writes into a mask's tensor between two calls.

    The mask stays what it was made of, or the second call is refused: never something in between.
    """

    def changed(program: Program) -> list[Found]:
        program.mask_by(program.data.clone())
        first = run(program)
        program.data.copy_(other_data(program))
        return [first, run(program)]

    caller(name, needs="mask with data", refusals=(CHANGED, NO_GRADIENTS))(changed)


def other_data(program: Program) -> Tensor:
    """Data of the same shape that hides other keys."""
    return program.data.roll(2, dims=-1)


changing_data("mask written in place", forward)
changing_data("mask written in place, trained", trained)


@caller(
    "mask written in place before backward",
    needs="mask with data",
    refusals=(CHANGED, NO_GRADIENTS),
)
def changed_before_backward(program: Program) -> Found:
    program.mask_by(program.data.clone())

    def call(*inputs: Tensor) -> Tensor:
        out = program(*inputs)
        program.data.copy_(other_data(program))
        return out

    return gradients(program, call, list(program.leaves()))


@caller("func.vmap over masks", needs="mask with data", refusals=(NO_GRADIENTS,))
def vmapped_masks(program: Program) -> list[Found]:
    """Inputs stay, the data of the mask is mapped over; masks are made inside."""
    several = [program.data, other_data(program), program.data.roll(5, dims=-1)]

    def call(data: Tensor) -> Tensor:
        program.mask_by(data)
        return program(*program.inputs)

    with torch.no_grad():
        outs = torch.func.vmap(call)(torch.stack(several))
    return [Found({"out": out}, data=data) for out, data in zip(outs, several, strict=True)]


class Broken(Exception):
    """What interrupts a call: memory that is full, a user at the keyboard."""


class BreakingAt(TorchFunctionMode):
    """Raises at the function of this number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise Broken
        return func(*args, **(kwargs or {}))


@caller("broken off and called again", needs="cache", plain=True)
def broken_off(program: Program) -> list[Found]:
    """Each chunk is broken off once, later and later in its course; then it is given again."""
    found, at, breaks = [], 1, 1
    while breaks:
        fresh = program.row.build()
        step = Retried(fresh, at)
        fresh.call_by(step)
        found.append(forward(fresh))
        at, breaks = at * 4 // 3 + 1, step.breaks
    return found


class Retried:
    """A layer whose call is broken off at some function, and then made again."""

    def __init__(self, program: Program, at: int) -> None:
        self.program, self.at, self.breaks = program, at, 0

    def __call__(self, *args: object, **options: object) -> Tensor:
        cache, layer = self.program.cache, self.program.layer
        held = cache.length
        try:
            with BreakingAt(self.at):
                return layer(*args, **options)
        except Broken:
            self.breaks += 1
        assert cache.length == held, f"{held} tokens became {cache.length}"
        return layer(*args, **options)


def strange(name: str, make: Callable[[Tensor], Tensor], expected: str) -> None:
    """A caller whose inputs are tensors of a kind that `attend` does not take."""

    def run(program: Program) -> list[Found]:
        q, k, v, *extra = program.inputs
        with torch.no_grad():
            out = program(make(q), make(k), make(v), *extra)
        raise AssertionError(f"{name} inputs gave {type(out).__name__} {out.dtype}")

    caller(f"{name} inputs", needs="attend whole", refusals=(expected,))(run)  # not all are sliced


strange("integer", lambda x: x.int(), "floating point")
strange("complex", lambda x: x.to(torch.complex64), "floating point")
strange("sparse", lambda x: x.to_sparse(), "strided|dense|layout")
strange("mkldnn", lambda x: x.float().to_mkldnn(), "strided|dense|layout")
