"""Callers that copy, store, wrap or lay out what the call is made of."""

import copy
import io
import pickle
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from callers.definition import Leaves
from callers.programs import AttendProgram, LayerProgram, Program
from callers.table import (
    ABSORBED,
    NO_GRADIENTS,
    Found,
    caller,
    detached,
    forward,
    trained,
)


def saved(value: object) -> object:
    """Through torch.save and torch.load."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def pickled(value: object) -> object:
    return pickle.loads(pickle.dumps(value))


def copying(name: str, copied: Callable[[object], object]) -> None:
    """Two callers: the layer (or rule) copied after a call, and the cache after each chunk."""

    def run(program: Program) -> Found:
        if isinstance(program, AttendProgram):
            program.bias_rule = copied(program.bias_rule)
            if program.rule.data is not None:  # a function in a mask is the caller's own
                program.mask = copied(program.mask)
            return forward(program)
        forward(program)
        program.layer = copied(program.layer)
        program.call_by(program.layer)
        return forward(program)

    def run_chunks(program: Program) -> Found:
        program.between = copied
        return forward(program)

    caller(name, plain=True)(run)
    caller(f"{name}, of the cache", needs="cache", plain=True)(run_chunks)


copying("copy.deepcopy", copy.deepcopy)
copying("pickle", pickled)
copying("torch.save", saved)


@caller("state_dict into a new layer", needs="layer", plain=True)
def state_dict(program: Program) -> Found:
    fresh = program.row.make().to(program.dtype).eval()
    fresh.load_state_dict(program.layer.state_dict())
    program.layer = fresh
    program.call_by(fresh)
    return forward(program)


def heads_last(x: Tensor) -> Tensor:
    return x.transpose(1, -2).contiguous().transpose(1, -2)


def columns_first(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def every_other(x: Tensor) -> Tensor:
    """Every other number of a wider tensor, the rest of which is NaN."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def with_offset(x: Tensor) -> Tensor:
    """Inside a larger tensor of NaN, starting somewhere."""
    shape = (*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 1)
    wide = torch.full(shape, torch.nan, dtype=x.dtype)
    wide[..., 2:-1, 1:] = x
    return wide[..., 2:-1, 1:]


def first_row(x: Tensor) -> Tensor:
    """The first row of the batch for all of them, without a copy."""
    return x[:1].expand_as(x)


def first_head(x: Tensor) -> Tensor:
    """The first head for all of them, without a copy; hidden states have none."""
    return x[:, :1].expand_as(x) if x.dim() == 4 else x


def negated(x: Tensor) -> Tensor:
    """A view with the negative bit: its memory holds the negated values."""
    return torch._neg_view((-x).contiguous())


LAYOUTS = (heads_last, columns_first, every_other, with_offset, first_row, first_head, negated)


def laid_out(how: Callable[[Tensor], Tensor]) -> None:
    """Two callers: inputs in an unusual order in memory, or with repeated numbers."""

    def given(leaves: Leaves) -> Leaves:
        return {n: x if "." in n or x.dim() < 3 else how(x) for n, x in leaves.items()}

    def arranged(program: Program) -> tuple[Program, Leaves]:
        twin = program.row.build()
        twin.named_inputs = given(twin.named_inputs)
        return twin, detached(twin)

    def run(program: Program) -> Found:
        twin, leaves = arranged(program)
        return Found(forward(twin).values, leaves)

    def run_trained(program: Program) -> Found:
        twin, leaves = arranged(program)
        return Found(trained(twin).values, leaves)

    name = how.__name__.replace("_", " ")
    caller(f"inputs {name}", plain=True)(run)
    caller(f"inputs {name}, trained", refusals=(NO_GRADIENTS,))(run_trained)


for layout in LAYOUTS:
    laid_out(layout)


@caller("weights columns first", needs="layer", plain=True)
def weights_columns_first(program: Program) -> Found:
    matrices = [p for p in program.parameters() if p.dim() == 2]
    for parameter in matrices:
        parameter.data = columns_first(parameter.data)
    return forward(program)


class Named(torch.Tensor):
    """A subclass that changes nothing."""


class Counting(torch.Tensor):
    """A subclass that counts the functions called with it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Counting.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    """A tensor without memory around one that has it, as DTensor and quantised weights are."""

    @staticmethod
    def __new__(cls, inner: Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(inner_of, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, func(*args, **kwargs))


def inner_of(value: object) -> object:
    return value.inner if isinstance(value, Wrapped) else value


def as_subclass(name: str, make: Callable[[Tensor], Tensor]) -> None:
    """Three callers: inputs of another class, parameters of it, and inputs that are trained."""

    def given(program: Program, names: list[str]) -> Leaves:
        return {n: make(x) if n in names else x for n, x in detached(program).items()}

    def run(program: Program) -> Found:
        with torch.no_grad():
            out = program.functional(given(program, list(program.named_inputs)))
        return Found({"out": unwrapped(out)})

    def run_parameters(program: Program) -> Found:
        names = [n for n, _ in program.named_parameters()]
        with torch.no_grad():
            out = program.functional(given(program, names))
        return Found({"out": unwrapped(out)})

    def run_trained(program: Program) -> Found:
        leaves = given(program, list(program.named_inputs))
        wanted = {n: leaves[n].requires_grad_() for n in program.named_inputs}
        out = program.functional(leaves)
        flows = torch.ones_like(out)
        found = torch.autograd.grad(out, list(wanted.values()), flows)
        return Found({f"ones {n}": unwrapped(x) for n, x in zip(wanted, found, strict=True)})

    caller(f"{name} inputs", refusals=(NO_GRADIENTS,))(run)
    caller(f"{name} parameters", needs="parameters", refusals=(NO_GRADIENTS, ABSORBED))(
        run_parameters
    )
    caller(f"{name} inputs, trained", refusals=(NO_GRADIENTS,))(run_trained)


def unwrapped(x: Tensor) -> Tensor:
    x = inner_of(x)
    return x.detach().as_subclass(torch.Tensor)


as_subclass("subclass", lambda x: x.as_subclass(Named))
as_subclass("function subclass", lambda x: x.as_subclass(Counting))
as_subclass("wrapper subclass", Wrapped)


class Doubled(nn.Module):
    """An adapter around a projection: its output, doubled."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def by_hook(layer: nn.Module, name: str) -> None:
    getattr(layer, name).register_forward_hook(lambda module, given, out: 2 * out)


def by_pre_hook(layer: nn.Module, name: str) -> None:
    getattr(layer, name).register_forward_pre_hook(lambda module, given: (2 * given[0],))


def by_instance_forward(layer: nn.Module, name: str) -> None:
    """As accelerate's add_hook_to_module does."""
    module = getattr(layer, name)
    plain = module.forward
    module.forward = lambda x: 2 * plain(x)


def by_adapter(layer: nn.Module, name: str) -> None:
    setattr(layer, name, Doubled(getattr(layer, name)))


def by_parametrization(layer: nn.Module, name: str) -> None:
    parametrize.register_parametrization(getattr(layer, name), "weight", Twice())


def by_subclass(layer: nn.Module, name: str) -> None:
    """A Linear of another class, its numbers shared."""
    module = getattr(layer, name)
    module.__class__ = type("DoubledLinear", (nn.Linear,), {"forward": _double_linear})


def _double_linear(self: nn.Linear, x: Tensor) -> Tensor:
    return 2 * nn.functional.linear(x, self.weight, self.bias)


def changing_projections(how: Callable[[nn.Module, str], None]) -> None:
    """A caller whose projections, one after the other, give twice what their weights say."""

    def run(program: Program) -> list[Found]:
        names = [n for n, m in program.layer.named_children() if isinstance(m, nn.Linear)]
        return [_doubled(program.row.build(), name) for name in names]

    def _doubled(program: LayerProgram, name: str) -> Found:
        kept = how in (by_pre_hook, by_parametrization)  # which leave biases alone
        names = {f"layer.{name}.weight", *([] if kept else [f"layer.{name}.bias"])}
        leaves = {n: 2 * x if n in names else x for n, x in detached(program).items()}
        forward(program)  # what is memoised of the plain weights must not be used
        how(program.layer, name)
        return Found(forward(program).values, leaves)

    caller(
        f"projections changed {how.__name__.replace('_', ' ')}", needs="layer", refusals=(ABSORBED,)
    )(run)


for change in (
    by_hook,
    by_pre_hook,
    by_instance_forward,
    by_adapter,
    by_parametrization,
    by_subclass,
):
    changing_projections(change)


@caller("weights changed by an optimiser", needs="parameters", refusals=(NO_GRADIENTS,))
def after_a_step(program: Program) -> Found:
    """Nothing of the old weights may be left in the next call."""
    program = program.row.build()
    trained(program)
    with torch.no_grad():
        for parameter in program.parameters():
            parameter.mul_(0.5)
    return Found(forward(program).values, detached(program))
