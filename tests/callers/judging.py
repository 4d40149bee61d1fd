"""The verdict on one cell: what was found equals the definition, or was refused in a sentence."""

import math
import re
import traceback
from pathlib import Path

import torch
from torch import Tensor

import regard
from callers.definition import Leaves
from callers.programs import Program
from callers.table import Caller, Found, cotangent, directions

SOURCES = str(Path(regard.__file__).parent)
POINTS = 32  # around the leaves, at which the error of a plain implementation is measured
FACTORS = {torch.float32: 5.0, torch.bfloat16: 3.0, torch.float16: 3.0}  # for derivatives
LAYERS = 2.0  # for the outputs of layers
CODES = 0.05  # of the largest output: what eight bits for eight numbers lose
EXACT = 1e-11  # float64, as in the tests of layers


def answers(program: Program, leaves: Leaves, kind: str, names: list[str]) -> Leaves:
    """What is right, in the dtype of the leaves: the output or all derivatives of a kind."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    if kind == "tangent":
        steps = directions(leaves)
        steps = {n: x if n in names else torch.zeros_like(x) for n, x in steps.items()}
        tangent = torch.func.jvp(program.define, (leaves,), (steps,))[1]
        return {" ".join(["tangent", *names]): tangent.detach()}
    out = program.define(leaves)
    if kind == "out":
        return {"out": out.detach()}
    flows = torch.ones_like(out) if kind == "ones" else cotangent(out)
    found = _gradients(out, leaves, flows, create_graph=kind == "double")
    if kind == "double":
        steps = directions(leaves).values()
        found = _gradients(sum((x * s).sum() for x, s in zip(found, steps, strict=True)), leaves)
    return {f"{kind} {n}": x.detach() for n, x in zip(leaves, found, strict=True)}


def _gradients(
    out: Tensor, leaves: Leaves, flows: Tensor | None = None, **options: bool
) -> tuple[Tensor, ...]:
    of = list(leaves.values())
    return torch.autograd.grad(out, of, flows, materialize_grads=True, **options)


def wide(leaves: Leaves) -> Leaves:
    return {name: x.detach().double() for name, x in leaves.items()}


def narrow(leaves: Leaves, dtype: torch.dtype) -> Leaves:
    return {name: x.detach().to(dtype) for name, x in leaves.items()}


_USUAL: dict[tuple[object, ...], list[dict[str, float]]] = {}


def usual_error(
    program: Program, leaves: Leaves, what: str, dtype: torch.dtype, enough: float
) -> float:
    """The largest error of the plain definition in `dtype` at points around these leaves, or the
    first that is `enough`.

    How sensitive a layer is depends on its numbers, so the points lie a rounding unit or none away.
    At one point alone, the order of sums decides whether rounding errors add or cancel.
    """
    kind, *names = what.split()
    numbers = tuple(x.detach().double().numpy().tobytes() for x in leaves.values())
    keep = program.keep.numpy().tobytes()
    key = (id(program.row), kind, tuple(names) if kind == "tangent" else (), dtype, keep, numbers)
    known, usual = _USUAL.setdefault(key, []), 0.0
    for seed in range(POINTS):
        if seed == len(known):
            point = _near(narrow(leaves, dtype), seed)
            right = answers(program, wide(point), kind, names)
            rounded = answers(program, point, kind, names)
            known.append({n: largest(rounded[n].double() - each) for n, each in right.items()})
        usual = max(usual, known[seed][what])
        if usual >= enough:
            break
    return usual


def _near(leaves: Leaves, seed: int) -> Leaves:
    """Every number moved by one rounding unit up, down or not at all."""
    generator = torch.Generator("cpu").manual_seed(seed)
    steps = {n: torch.randint(-1, 2, x.shape, generator=generator) for n, x in leaves.items()}
    return {n: x * (1 + steps[n].to(x.dtype) * torch.finfo(x.dtype).eps) for n, x in leaves.items()}


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def allowed(
    program: Program, found: Found, what: str, right: Tensor, error: float = math.inf
) -> float:
    """The numeric contract for this program, its derivatives, and the dtype it was rounded in; or
    less than that, but more than `error`."""
    if not program.exact:
        return CODES * (1 + largest(right))
    dtype = narrowest(found.rounding or program.dtype, program.dtype)
    leaves = wide(program.leaves() if found.leaves is None else found.leaves)
    bound = program.bound(leaves, dtype) if what == "out" else None
    if bound is not None:
        return bound
    dtype = narrowest(dtype, found.values[what].dtype)
    if dtype == torch.float64:
        return EXACT * (1 + largest(right))
    factor = LAYERS if what == "out" else FACTORS[dtype]
    return factor * usual_error(program, leaves, what, dtype, error / factor)


def narrowest(*dtypes: torch.dtype) -> torch.dtype:
    """The one that rounds most: a leaf of another dtype has a gradient of its own."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def judge(program: Program, found: Found) -> list[str]:
    """What is wrong with what was found, in words; nothing if all is right."""
    assert found.values, "a caller that finds nothing is no caller"
    if found.data is not None:
        program = program.row.build()
        program.keep = program.keep_of(found.data)
    wrong: list[str] = []
    right: Leaves = {}
    leaves = wide(program.leaves() if found.leaves is None else found.leaves)
    for what, value in found.values.items():
        kind, *names = what.split()
        if kind == "like":
            wrong += _compare_shapes(program, value, program.define(leaves))
            continue
        if what not in right:
            right.update(answers(program, leaves, kind, names))
        wrong += _compare(program, found, what, value, right[what])
    return wrong


def _compare_shapes(program: Program, value: Tensor, right: Tensor) -> list[str]:
    alike = value.shape == right.shape and value.dtype == program.dtype
    return [] if alike else [f"like: {value.dtype} {tuple(value.shape)}"]


def _compare(program: Program, found: Found, what: str, value: Tensor, right: Tensor) -> list[str]:
    if value is None:
        return [f"{what}: None"] if largest(right) else []
    if value.shape != right.shape:
        return [f"{what}: shape {tuple(value.shape)}, not {tuple(right.shape)}"]
    if what == "out" and found.rounding is None and value.dtype != program.dtype:
        return [f"{what}: {value.dtype}, not {program.dtype}"]
    error = largest(value.double() - right)
    limit = allowed(program, found, what, right, error)
    return [] if error <= limit else [f"{what}: off by {error:.2e}, {limit:.2e} is allowed"]


def judge_error(caller: Caller, program: Program, error: BaseException) -> str | None:
    """What is wrong with an error; None if it is a sentence of ours that this caller allows."""
    last = "".join(traceback.format_exception(error)[-14:])
    if caller.torch_refuses and caller.torch_refuses in str(error):
        return None
    sentence = sentence_of(error)
    if sentence is None:
        return f"an error that is not ours: {last}"
    if not caller.allows(sentence, program):
        return f"refused, and should not be: {sentence}\n{last}"
    return None


def sentence_of(error: BaseException) -> str | None:
    """What the library says, itself or inside what the compiler makes of it; None if torch says it.

    Ours are errors of value and type, raised in a frame of ours.
    """
    if isinstance(error, torch._dynamo.exc.Unsupported):
        raised = re.search(r"raised exception (?:ValueError|TypeError)\((.*)\)\n", str(error))
        places = re.findall(r'File "(.*)", line', str(error))
        return raised[1] if raised and places and places[-1].startswith(SOURCES) else None
    frames, kind = traceback.extract_tb(error.__traceback__), type(error)
    ours = bool(frames) and frames[-1].filename.startswith(SOURCES)
    mendable = kind in (ValueError, TypeError) or kind.__module__.startswith("regard")
    return str(error) if ours and mendable else None
