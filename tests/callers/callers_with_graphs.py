"""Callers that record a call and do not run it: compile, export, make_fx, fake and meta tensors.

What is recorded is run on other numbers than those it was recorded with.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from callers.definition import Leaves
from callers.programs import Program
from callers.table import (
    ABSORBED,
    NO_GRADIENTS,
    Found,
    caller,
    detached,
    forward,
    gradients,
    has_cache,
    others,
)

COMPILED = ("cannot run this call", NO_GRADIENTS, ABSORBED)


def compiled(program: Program, **options: object) -> Callable[..., Tensor]:
    """The program, its layer or all of it compiled: a layer is given its cache from outside."""
    torch._dynamo.reset()
    if not has_cache(program):
        return torch.compile(program, **options)
    program.call_by(torch.compile(program.layer, **options))
    return program


def compiling(name: str, **options: object) -> None:
    """Two callers: without gradients on two inputs, and trained."""

    def run(program: Program) -> list[Found]:
        call, found = compiled(program, **options), []
        for seed in (0, 1):
            leaves = {**detached(program), **inputs_of(program, seed)}
            with torch.no_grad():
                out = call(*(leaves[each] for each in program.named_inputs))
            found.append(Found({"out": out.clone()}, leaves))
        return found

    def run_trained(program: Program) -> Found:
        return gradients(program, compiled(program, **options), list(program.leaves()))

    # inductor takes long, and so do gradients of aot with dynamic lengths; an ordinary run has aot
    # with dynamic lengths forward, and with graph breaks
    slow = "backend" not in options or (len(options) == 2 and options["backend"] == "aot_eager")
    caller(name, dear=True, only_long=slow, refusals=COMPILED)(run)
    slow |= name == "compile, aot, dynamic"
    caller(f"{name}, trained", dear=True, only_long=slow, refusals=COMPILED)(run_trained)


def inputs_of(program: Program, seed: int) -> Leaves:
    """The inputs of another draw; parameters are left out."""
    drawn = others(program, seed)
    return {name: drawn[name] for name in program.named_inputs}


compiling("compile", backend="eager", fullgraph=True)
compiling("compile, dynamic", backend="eager", fullgraph=True, dynamic=True)
compiling("compile, aot", backend="aot_eager", fullgraph=True)
compiling("compile, aot, dynamic", backend="aot_eager", fullgraph=True, dynamic=True)
compiling("compile, graph breaks allowed", backend="aot_eager")
compiling("compile, inductor", fullgraph=True)
compiling("compile, inductor, dynamic", fullgraph=True, dynamic=True)


def exporting(name: str, strict: bool) -> None:
    def run(program: Program) -> Found:
        with torch.no_grad():
            recorded = torch.export.export(program, program.inputs, strict=strict).module()
            leaves = {**detached(program), **inputs_of(program, 1)}
            return Found(
                {"out": recorded(*(leaves[each] for each in program.named_inputs))}, leaves
            )

    caller(name, dear=True, refusals=COMPILED)(run)


exporting("export", strict=False)
exporting("export, strict", strict=True)


def recording(mode: str, trained: bool) -> None:
    """make_fx of the call, or of its gradients, run on other leaves."""

    def run(program: Program) -> Found:
        names = list(program.leaves())
        shapes = detached(program)
        grad_mode = torch.enable_grad if trained else torch.no_grad

        def call(*values: Tensor) -> tuple[Tensor, ...]:
            leaves = dict(zip(names, values, strict=True))
            if not trained:
                return (program.functional(leaves),)
            flows = torch.func.vjp(program.functional, leaves)
            found = flows[1](torch.ones_like(flows[0]))[0]
            return (flows[0], *(found[name] for name in names))

        with grad_mode():
            recorded = make_fx(call, tracing_mode=mode, _allow_non_fake_inputs=True)(
                *shapes.values()
            )
        leaves = others(program, 1)
        with torch.no_grad():
            out, *found = recorded(*(leaves[name] for name in names))
        values = {f"ones {name}": each for name, each in zip(names, found, strict=False)}
        return Found({"out": out, **values}, leaves)

    name = f"make_fx {mode}, trained" if trained else f"make_fx {mode}"
    caller(name, dear=True, refusals=(NO_GRADIENTS, ABSORBED))(run)


for mode in ("real", "fake", "symbolic"):
    recording(mode, trained=False)
    recording(mode, trained=True)


@caller("jit.trace", refusals=("torch.jit.trace", "jit"))
def jit_traced(program: Program) -> Found:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # it is old, and says so
        recorded = torch.jit.trace(program, program.inputs, check_trace=False)
    leaves = {**detached(program), **inputs_of(program, 1)}
    with torch.no_grad():
        return Found({"out": recorded(*(leaves[each] for each in program.named_inputs))}, leaves)


def faking(name: str, *, built: bool, grad: bool) -> None:
    """Under FakeTensorMode nothing is computed; shapes and dtypes are."""

    def run(program: Program) -> Found:
        mode = FakeTensorMode(allow_non_fake_inputs=not built)
        with torch.set_grad_enabled(grad):
            if built:
                with mode:
                    program = program.row.build()
                    out = program(*program.inputs)
            else:
                leaves = {n: mode.from_tensor(x) for n, x in detached(program).items()}
                with mode:
                    out = program.functional(leaves)
        return Found({"like": torch.empty(out.shape, dtype=out.dtype, device="meta")})

    needs = "attend" if built else ""  # nn.Module.to does not work there
    caller(name, needs=needs, refusals=(NO_GRADIENTS, ABSORBED))(run)


faking("fake tensors", built=False, grad=False)
faking("fake tensors, with gradients", built=False, grad=True)
faking("fake mode, built there", built=True, grad=False)


@caller("meta tensors", refusals=(NO_GRADIENTS, "score_bias is on cpu"))
def on_meta(program: Program) -> Found:
    with torch.no_grad():
        out = program.functional({n: x.to("meta") for n, x in detached(program).items()})
    assert out.is_meta
    return Found({"like": out})


@caller("made on meta, then loaded", needs="layer", plain=True)
def made_on_meta(program: Program) -> Found:
    """The usual way to load a large model: shapes first, then numbers."""
    with torch.device("meta"):
        empty = program.row.make()
    state = program.layer.state_dict()
    loaded = empty.to(program.dtype).to_empty(device="cpu").eval()
    loaded.load_state_dict(state)
    program.layer = loaded
    program.call_by(loaded)
    return forward(program)
