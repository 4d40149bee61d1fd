"""The table of callers: what is done with a program, and what the program may answer."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from callers.definition import Leaves
from callers.programs import Attend, AttendProgram, Layer, Program, drawn


@dataclass
class Found:
    """What a caller got: by what it is, "out", "grad x", "tangent", "double x" or "like".

    `leaves` are those it was computed of, the program's own if None. `rounding` is the dtype whose
    error is allowed, the program's own if None; `data` that of the call's mask. "like" is a tensor
    without numbers.
    """

    values: dict[str, Tensor | None]
    leaves: Leaves | None = None
    rounding: torch.dtype | None = None
    data: Tensor | None = None


Run = Callable[[Program], "Found | list[Found]"]
Row = Attend | Layer


NEEDS: dict[str, Callable[[Row], bool]] = {
    "": lambda row: True,
    "attend": lambda row: isinstance(row, Attend),
    "attend whole": lambda row: isinstance(row, Attend) and not row.parts,
    "a batch": lambda row: row.numbers > 0,
    "no bfloat16": lambda row: row.dtype != torch.bfloat16,
    "layer": lambda row: isinstance(row, Layer),
    "cache": lambda row: isinstance(row, Layer) and row.cache is not None,
    "mask with data": lambda row: row.rule.data is not None,
    "small float64": lambda row: all_float64(row) and row.numbers < 3000,
    "small": lambda row: 0 < row.numbers < 3000,
    "parameters": lambda row: isinstance(row, Layer) or row.bias_rule == "relative",
}


def all_float64(row: Row) -> bool:
    return row.dtype == torch.float64 and getattr(row, "bias_dtype", None) is None


@dataclass(frozen=True)
class Caller:
    """`run` gives what it found of a program; `needs` says of which programs.

    A `plain` caller asks for nothing that a backend may lack, so that nothing else may be refused.
    `refusals` are the sentences that are right answers to this one, `torch_refuses` a part of a
    sentence of torch's own that is one too. A `dear` caller takes a second a call: in an ordinary
    run it meets one call, or none if `only_long`. `process` is what it wants to run in.
    """

    name: str
    run: Run
    needs: str = ""
    plain: bool = False
    dear: bool = False
    only_long: bool = False
    refusals: tuple[str, ...] = ()
    torch_refuses: str = ""
    process: str = "usual"

    def fits(self, row: Row) -> bool:
        return NEEDS[self.needs](row)

    def allows(self, sentence: str, program: Program) -> bool:
        """Whether the program may be refused with this sentence."""
        if any(re.search(each, sentence) for each in self.refusals):
            return True
        if self.plain:
            return False
        named = isinstance(program, AttendProgram) and program.row.backend
        asked = named not in (False, "auto", "eager")
        return asked and f"backend={named!r} cannot run this call" in sentence


CALLERS: dict[str, Caller] = {}
ABSORBED = "form='absorbed' reads kv_b_proj.weight"
NO_GRADIENTS = "gradients do not flow"  # StaticCache and QuantizedCache


def caller(name: str, **options: object) -> Callable[[Run], Run]:
    """Enter a function into the table."""

    def enter(run: Run) -> Run:
        assert name not in CALLERS, name
        CALLERS[name] = Caller(name, run, **options)
        return run

    return enter


def in_context(
    name: str, make: Callable[[], AbstractContextManager], *, rebuilt: bool = False, **options
) -> None:
    """Two callers inside a context: without gradients, and trained."""

    def inside(run: Run) -> Run:
        def entered(program: Program) -> Found:
            with make():
                return run(program.row.build() if rebuilt else program)

        return entered

    CALLERS[name] = Caller(name, inside(forward), **{"plain": True, **options})
    refusals = (NO_GRADIENTS, *options.get("refusals", ()))
    trained_name = f"{name}, trained"
    CALLERS[trained_name] = Caller(
        trained_name, inside(trained), **{**options, "plain": False, "refusals": refusals}
    )


def forward(program: Program) -> Found:
    """The output. Nothing here is random, so that no random number may be drawn."""
    before = torch.get_rng_state()
    with torch.no_grad():
        found = Found({"out": program(*program.inputs)})
    assert torch.get_rng_state().equal(before), "random numbers were drawn"
    return found


def trained(program: Program) -> Found:
    """The output, and the gradient of every leaf."""
    return gradients(program, program, list(program.leaves()))


def gradients(program: Program, call: Callable[..., Tensor], names: list[str]) -> Found:
    """The same of `call(*inputs)`, with gradients of these leaves alone."""
    wanted = {
        name: leaf.requires_grad_() for name, leaf in program.leaves().items() if name in names
    }
    out = call(*program.inputs)
    return Found({"out": out.detach(), **backward(out, wanted)})


def backward(out: Tensor, leaves: Leaves, **options: bool) -> dict[str, Tensor | None]:
    """The gradients of the leaves; None of each if the output has no graph."""
    if not out.requires_grad:
        return {f"grad {name}": None for name in leaves}
    found = torch.autograd.grad(
        out, list(leaves.values()), cotangent(out), materialize_grads=True, **options
    )
    return {f"grad {name}": each for name, each in zip(leaves, found, strict=True)}


def cotangent(out: Tensor) -> Tensor:
    """What flows back into the output: the same numbers for everybody."""
    return drawn(*out.shape, seed=4321, dtype=out.dtype)


def directions(leaves: Leaves) -> Leaves:
    """A tangent for each leaf: the same numbers for everybody."""
    named = enumerate(leaves.items())
    return {name: drawn(*x.shape, seed=1000 + i, dtype=x.dtype) for i, (name, x) in named}


def detached(program: Program) -> Leaves:
    return {name: leaf.detach().clone() for name, leaf in program.leaves().items()}


def others(program: Program, seed: int) -> Leaves:
    """Leaves of the same shapes and other numbers."""
    return detached(program.row.build(seed))


def has_cache(program: Program) -> bool:
    return NEEDS["cache"](program.row)
