"""Callers that differentiate: backward, forward, twice, partly, recomputed, by torch.func."""

import re
import threading
from collections.abc import Callable

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from callers.definition import Leaves
from callers.programs import Program
from callers.table import (
    NO_GRADIENTS,
    Found,
    backward,
    caller,
    cotangent,
    detached,
    directions,
    gradients,
    others,
)

ROLES = {  # leaves by the part they play
    "q": ("q", "q_proj", "q_a_proj", "q_b_proj", "q_a_layernorm", "q_norm"),
    "k": ("k", "k_proj", "k_norm", "kv_a_proj", "kv_a_proj_with_mqa", "kv_a_layernorm"),
    "v": ("v", "v_proj", "kv_b_proj"),
    "the rest": ("bias", "sinks", "relative_attention_bias", "gate_proj", "o_proj"),
}


def role_of(leaf: str) -> str:
    words = leaf.split(".")
    return next((role for role, names in ROLES.items() if any(w in names for w in words)), None)


def training_alone(*roles: str) -> None:
    """A caller for which all leaves but those of some roles are frozen."""

    def run(program: Program) -> Found:
        names = [name for name in program.leaves() if role_of(name) in roles]
        return gradients(program, program, names)

    caller(f"training {' and '.join(roles)} alone", refusals=(NO_GRADIENTS,))(run)


for chosen in (("q",), ("k",), ("v",), ("q", "k"), ("q", "v"), ("k", "v"), ("v", "the rest")):
    training_alone(*chosen)


@caller("training one matrix at a time", refusals=(NO_GRADIENTS,))
def one_at_a_time(program: Program) -> list[Found]:
    found = []
    for name in program.leaves():
        fresh = program.row.build()
        fresh.requires_grad_(False)
        found.append(gradients(fresh, fresh, [name]))
    return found


@caller("backward twice", refusals=(NO_GRADIENTS,))
def backward_twice(program: Program) -> list[Found]:
    leaves = {name: leaf.requires_grad_() for name, leaf in program.leaves().items()}
    out = program(*program.inputs)
    return [Found(backward(out, leaves, retain_graph=True)) for _ in range(2)]


@caller("backward in another thread", refusals=(NO_GRADIENTS,))
def backward_elsewhere(program: Program) -> Found:
    leaves = {name: leaf.requires_grad_() for name, leaf in program.leaves().items()}
    out, found = program(*program.inputs), []
    worker = threading.Thread(target=lambda: found.append(Found(backward(out, leaves))))
    worker.start()
    worker.join()
    return found[0]


@caller(
    "gradients of gradients",
    refusals=(NO_GRADIENTS, "no second derivative"),
    torch_refuses="_backward is not impl",
)
def twice_differentiated(program: Program) -> Found:
    leaves = {name: leaf.requires_grad_() for name, leaf in program.leaves().items()}
    out = program(*program.inputs)
    once = torch.autograd.grad(
        out, list(leaves.values()), cotangent(out), create_graph=True, materialize_grads=True
    )
    return Found(along(once, leaves))


def along(once: tuple[Tensor, ...], leaves: Leaves) -> dict[str, Tensor]:
    """The gradient of what the gradients are along fixed directions."""
    steps = directions(leaves).values()
    total = sum((each * step).sum() for each, step in zip(once, steps, strict=True))
    twice = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {f"double {name}": each for name, each in zip(leaves, twice, strict=True)}


@caller("finite differences", needs="small float64", refusals=(NO_GRADIENTS,))
def finite_differences(program: Program) -> Found:
    """gradcheck of all leaves in float64, and of its forward mode."""
    leaves = {name: leaf.requires_grad_() for name, leaf in detached(program).items()}

    def call(*values: Tensor) -> Tensor:
        return program.functional(dict(zip(leaves, values, strict=True)))

    options = {"fast_mode": True, "check_forward_ad": True}
    assert torch.autograd.gradcheck(call, tuple(leaves.values()), **options)
    return Found({"out": call(*leaves.values()).detach()})


@caller("dual inputs", refusals=(NO_GRADIENTS,))
def dual_inputs(program: Program) -> Found:
    """Forward mode by hand: inputs have tangents, parameters none."""
    return _dual(program, list(program.named_inputs))


@caller("dual inputs without gradients", refusals=(NO_GRADIENTS,))
def dual_inputs_without_gradients(program: Program) -> Found:
    with torch.no_grad():
        return _dual(program, list(program.named_inputs))


@caller("dual parameters", needs="parameters", refusals=(NO_GRADIENTS,))
def dual_parameters(program: Program) -> Found:
    return _dual(program, [name for name, _ in program.named_parameters()])


def _dual(program: Program, names: list[str]) -> Found:
    leaves = detached(program)
    steps = directions(leaves)
    with forward_ad.dual_level():
        given = {
            name: forward_ad.make_dual(leaf, steps[name]) if name in names else leaf
            for name, leaf in leaves.items()
        }
        out, tangent = forward_ad.unpack_dual(program.functional(given))
        return Found({"out": out.detach(), f"tangent {' '.join(names)}": tangent})


@caller("func.jvp", refusals=(NO_GRADIENTS,))
def func_jvp(program: Program) -> Found:
    leaves = detached(program)
    out, tangent = torch.func.jvp(program.functional, (leaves,), (directions(leaves),))
    return Found({"out": out, f"tangent {' '.join(leaves)}": tangent})


@caller("func.grad", refusals=(NO_GRADIENTS,))
def func_grad(program: Program) -> Found:
    def loss(leaves: Leaves) -> tuple[Tensor, Tensor]:
        out = program.functional(leaves)
        return (out * cotangent(out)).sum(), out.detach()

    found, out = torch.func.grad(loss, has_aux=True)(detached(program))
    return Found({"out": out, **{f"grad {name}": each for name, each in found.items()}})


@caller("func.vjp", refusals=(NO_GRADIENTS,))
def func_vjp(program: Program) -> Found:
    out, back = torch.func.vjp(program.functional, detached(program))
    (found,) = back(cotangent(out))
    return Found({"out": out, **{f"grad {name}": each for name, each in found.items()}})


@caller("func.jvp of func.grad", refusals=(NO_GRADIENTS,))
def forward_over_reverse(program: Program) -> Found:
    def loss(leaves: Leaves) -> Tensor:
        out = program.functional(leaves)
        return (out * cotangent(out)).sum()

    leaves = detached(program)
    _, found = torch.func.jvp(torch.func.grad(loss), (leaves,), (directions(leaves),))
    return Found({f"double {name}": each for name, each in found.items()})


@caller("func.functional_call of other weights", plain=True)
def functional_call(program: Program) -> Found:
    leaves = others(program, 1)
    with torch.no_grad():
        return Found({"out": program.functional(leaves)}, leaves)


@caller("func.functionalize", refusals=(NO_GRADIENTS,))
def functionalized(program: Program) -> Found:
    with torch.no_grad():
        return Found({"out": torch.func.functionalize(program.functional)(detached(program))})


def _three(program: Program, names: list[str]) -> tuple[list[Leaves], Leaves]:
    """Three sets of leaves that differ in these names, and the three stacked."""
    own = detached(program)
    sets = [{**own, **{n: others(program, i)[n] for n in names}} for i in range(3)]
    return sets, {n: torch.stack([each[n] for each in sets]) for n in names}


def _mapped(program: Program, names: list[str], run: Callable[[Leaves], Tensor]) -> list[Tensor]:
    """`run` under vmap over these leaves, the others given to all."""
    own = detached(program)
    _, stacked = _three(program, names)
    return torch.func.vmap(lambda some: run({**own, **some}))(stacked)


@caller("func.vmap", refusals=(NO_GRADIENTS,))
def func_vmap(program: Program) -> list[Found]:
    with torch.no_grad():
        return _vmapped(program)


@caller("func.vmap with gradients", refusals=(NO_GRADIENTS,))
def func_vmap_trained(program: Program) -> list[Found]:
    """Backward through what vmap gave."""
    return _vmapped(program)


def _vmapped(program: Program) -> list[Found]:
    names = list(program.named_inputs)
    outs = _mapped(program, names, program.functional)
    sets, _ = _three(program, names)
    return [Found({"out": out.detach()}, leaves) for out, leaves in zip(outs, sets, strict=True)]


@caller("func.vmap of func.grad", refusals=(NO_GRADIENTS,))
def per_sample_gradients(program: Program) -> list[Found]:
    names = list(program.named_inputs)
    flows = cotangent(program.define(detached(program)))

    def loss(leaves: Leaves) -> Tensor:
        return (program.functional(leaves) * flows).sum()

    found = _mapped(program, names, torch.func.grad(loss))
    sets, _ = _three(program, names)
    return [
        Found({f"grad {name}": each[i] for name, each in found.items()}, sets[i]) for i in range(3)
    ]


@caller("func.vmap over layers", needs="parameters", refusals=(NO_GRADIENTS,))
def ensemble(program: Program) -> list[Found]:
    """stack_module_state of three layers, one input."""
    programs = [program.row.build(seed) for seed in range(3)]
    parameters, buffers = torch.func.stack_module_state(programs)

    def call(parameters: Leaves, buffers: Leaves) -> Tensor:
        return torch.func.functional_call(program, (parameters, buffers), program.inputs)

    outs, found = torch.func.vmap(call)(parameters, buffers), []
    for out, each in zip(outs, programs, strict=True):
        leaves = {**dict(each.named_parameters()), **program.named_inputs}
        found.append(Found({"out": out.detach()}, leaves))
    return found


@caller("func.jacfwd", needs="small", refusals=(NO_GRADIENTS,))
def forward_jacobian(program: Program) -> Found:
    """vmap of jvp over every number of an input; small calls only."""
    leaves, name = detached(program), next(iter(program.named_inputs))
    jacobian = torch.func.jacfwd(lambda x: program.functional({**leaves, name: x}))(leaves[name])
    found = (jacobian * directions(leaves)[name]).flatten(-leaves[name].dim()).sum(-1)
    return Found({f"tangent {name}": found})


@caller("func.jacrev", needs="small", refusals=(NO_GRADIENTS,))
def reverse_jacobian(program: Program) -> Found:
    leaves, name = detached(program), next(iter(program.named_inputs))
    jacobian = torch.func.jacrev(lambda x: program.functional({**leaves, name: x}))(leaves[name])
    found = (jacobian * directions(leaves)[name]).flatten(-leaves[name].dim()).sum(-1)
    return Found({f"tangent {name}": found})


def checkpointed(reentrant: bool) -> None:
    """Two callers: the whole call recomputed in the backward pass, and its chunks alone."""

    def run(program: Program) -> Found:
        def call(*inputs: Tensor) -> Tensor:
            return checkpoint(program, *inputs, use_reentrant=reentrant)

        found = accumulated(program, call)
        program.settled = None  # the recomputation ends as soon as it has what was asked for
        return found

    def run_chunks(program: Program) -> Found:
        def step(x: Tensor, **options: object) -> Tensor:
            again = lambda x: program.layer(x, **options)  # noqa: E731
            return checkpoint(again, x, use_reentrant=reentrant)

        program.call_by(step)
        return accumulated(program, program)

    how = "reentrant" if reentrant else "not reentrant"
    caller(f"checkpoint, {how}", refusals=(NO_GRADIENTS, "checkpoint"))(run)
    caller(f"checkpoint of chunks, {how}", needs="cache", refusals=(NO_GRADIENTS, "checkpoint"))(
        run_chunks
    )


def accumulated(program: Program, call: Callable[..., Tensor]) -> Found:
    """The gradients that `backward()` leaves at the leaves."""
    leaves = {name: leaf.requires_grad_() for name, leaf in program.leaves().items()}
    out = call(*program.inputs)
    out.backward(cotangent(out))
    values = {f"grad {name}": leaf.grad for name, leaf in leaves.items()}
    return Found({"out": out.detach(), **values})


@caller("backward into .grad", refusals=(NO_GRADIENTS,))
def into_grad(program: Program) -> Found:
    return accumulated(program, program)


checkpointed(True)
checkpointed(False)


@caller("leaves changed before backward", refusals=(NO_GRADIENTS,))
def changed_before_backward(program: Program) -> list[Found]:
    """In place, one after the other: torch refuses, or the gradients are those of the old ones."""
    found, own = [], detached(program)
    for name in own:
        fresh = program.row.build()
        leaves = {n: leaf.requires_grad_() for n, leaf in fresh.leaves().items()}
        out = fresh(*fresh.inputs)
        with torch.no_grad():
            leaves[name].mul_(0.5)
        found += _unless_refused(out, leaves)
    return found


@caller("cache reused before backward", needs="cache", refusals=(NO_GRADIENTS,))
def reused_before_backward(program: Program) -> list[Found]:
    """The cache is emptied and filled with another text, then the gradients are asked for."""
    named = program.leaves().items()
    leaves = {name: leaf.requires_grad_() for name, leaf in named if role_of(name) == "q"}
    out = program(*program.inputs)
    with torch.no_grad():
        program.cache.truncate(0)
        other = others(program, 3)["x"]
        program.layer(other, mask=program.mask, cache=program.cache)
    return _unless_refused(out, leaves)


def _unless_refused(out: Tensor, leaves: Leaves) -> list[Found]:
    """The gradients, or none if autograd saw that what it needs has changed."""
    try:
        return [Found(backward(out, leaves))]
    except RuntimeError as error:
        if not re.search("modified by an inplace|modified inplace|written in place", str(error)):
            raise
        return []
