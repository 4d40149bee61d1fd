"""Callers that change the world around a call: defaults, modes, threads, processes."""

import contextlib
import io
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from callers.programs import LayerProgram, Program
from callers.table import (
    CALLERS,
    NO_GRADIENTS,
    Caller,
    Found,
    caller,
    forward,
    gradients,
    in_context,
    trained,
)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Which also fills memory that is not written with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def anomaly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it announces itself
        with torch.autograd.detect_anomaly():
            yield


class Passing(TorchDispatchMode):
    """A mode that intercepts every operator and changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Watching(TorchFunctionMode):
    """A mode that intercepts every function and changes nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def under_autocast(dtype: torch.dtype) -> None:
    """Three callers: without gradients, and with the backward pass outside and inside.

    `attend` answers in the dtype of its queries; layers in that of their projections.
    """
    name = f"autocast {dtype}".replace("torch.", "")

    def rounded(program: Program, found: Found) -> Found:
        found.rounding = dtype if isinstance(program, LayerProgram) else None
        return found

    def call(program: Program) -> Callable[..., Tensor]:
        def entered(*inputs: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype):
                return program(*inputs)

        return entered

    def run(program: Program) -> Found:
        with torch.no_grad():
            return rounded(program, Found({"out": call(program)(*program.inputs)}))

    def run_trained(program: Program) -> Found:
        return rounded(program, gradients(program, call(program), list(program.leaves())))

    def run_inside(program: Program) -> Found:
        """Which rounds the products of the backward pass, as autocast does everywhere."""
        with torch.autocast("cpu", dtype):
            found = trained(program)
        found.values.pop("out")
        found.rounding = dtype
        return found

    caller(name, plain=True)(run)
    caller(f"{name}, trained", refusals=(NO_GRADIENTS,))(run_trained)
    # there torch.cat takes no bfloat16, and torch's own backward of split calls it
    needs = "no bfloat16" if dtype == torch.float16 else ""
    caller(f"{name}, backward inside", needs=needs, refusals=(NO_GRADIENTS,))(run_inside)


def saved_elsewhere() -> contextlib.AbstractContextManager:
    """What autograd saves is copied away and back."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)


in_context("plain", contextlib.nullcontext)
for dtype in (torch.float64, torch.bfloat16, torch.float16):
    short = str(dtype).removeprefix("torch.")
    in_context(f"default dtype {short}", lambda dtype=dtype: default_dtype(dtype), rebuilt=True)
in_context("default device meta", lambda: default_device("meta"))
in_context("default device meta, built there", lambda: default_device("meta"), rebuilt=True)
in_context("device context meta", lambda: torch.device("meta"))
for dtype in (torch.bfloat16, torch.float16):
    under_autocast(dtype)
in_context("autocast off", lambda: torch.autocast("cpu", torch.bfloat16, enabled=False))
in_context("deterministic algorithms", deterministic)
in_context("anomaly mode", anomaly)
in_context("dispatch mode", Passing, plain=False)
in_context("function mode", Watching)
in_context("three threads", lambda: threads(3))
in_context("math kernel alone", lambda: sdpa_kernel(SDPBackend.MATH))
in_context(
    "profiler", lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
)
in_context("saved tensors copied", saved_elsewhere)
in_context(
    "saved tensors may change",
    torch.autograd.graph.allow_mutation_on_saved_tensors,
    plain=False,  # it is a dispatch mode
    needs="a batch",  # it tells tensors apart by their address, which empty ones share
)
in_context("one backward thread", lambda: torch.autograd.set_multithreading_enabled(False))


@caller("inference mode", plain=True)
def inference_mode(program: Program) -> Found:
    with torch.inference_mode():
        return Found({"out": program(*program.inputs).clone()})


@caller("inference mode, built there", plain=True)
def built_in_inference_mode(program: Program) -> Found:
    with torch.inference_mode():
        program = program.row.build()
        return Found({"out": program(*program.inputs).clone()})


@caller("inference tensors outside", plain=True)
def inference_tensors(program: Program) -> Found:
    """Inputs of inference mode met by a call without gradients."""
    with torch.inference_mode():
        inputs = [each.clone() for each in program.inputs]
    with torch.no_grad():
        return Found({"out": program(*inputs)})


@caller("modes change between chunks", needs="cache", refusals=(NO_GRADIENTS,))
def changing_modes(program: Program) -> Found:
    """A past of inference mode, continued without gradients, then with them."""
    modes = iter((torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad))

    def step(*args: object, **options: object) -> Tensor:
        with next(modes)():
            return program.layer(*args, **options)

    program.call_by(step)
    with torch.no_grad():
        return Found({"out": program(*program.inputs).detach()})


@caller("number of threads changes between chunks", needs="cache", plain=True)
def changing_threads(program: Program) -> Found:
    counts = iter((2, 3, 1, 2))

    def between(cache: object) -> object:
        torch.set_num_threads(next(counts))
        return cache

    program.between = between
    with threads(1):
        return forward(program)


@caller("four threads at once", plain=True)
def at_once(program: Program) -> list[Found]:
    """One layer, called by four threads; caches are each caller's own."""
    return _threaded([_twin(program) for _ in range(4)], forward)


@caller("four threads train at once", refusals=(NO_GRADIENTS,))
def train_at_once(program: Program) -> list[Found]:
    return _threaded([_twin(program) for _ in range(4)], trained)


def _twin(program: Program) -> Program:
    """Another program around the same layer, so that caches are apart."""
    twin = program.row.build()
    if hasattr(program, "layer"):
        twin.layer = program.layer
        twin.call_by(program.layer)
        twin.named_inputs = program.named_inputs
    return twin


def _threaded(programs: list[Program], run) -> list[Found]:
    found, errors = [], []

    def work(program: Program) -> None:
        try:
            for _ in range(3):
                found.append(run(program))
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(program,)) for program in programs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return found


@caller("forked child", plain=True)
def forked(program: Program) -> list[Found]:
    """A child that computes after its parent did, with more threads than it had."""
    before = forward(program)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _answer(program.row.build(), writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"
    return [before, Found({"out": torch.load(io.BytesIO(data))})]


def _answer(program: Program, writing: int) -> None:
    """Compute, write and end, within 30 seconds."""
    signal.alarm(30)
    status = 1
    try:
        torch.set_num_threads(1)  # torch's own threads do not survive a fork
        buffer = io.BytesIO()
        torch.save(forward(program).values["out"], buffer)
        with os.fdopen(writing, "wb") as stream:
            stream.write(buffer.getvalue())
        status = 0
    finally:
        os._exit(status)


for process in (
    "read-only disk",
    "python -OO",
    "narrow vectors",
    "without numba",
    "no threads of GNU",
):
    CALLERS[process] = Caller(
        process,
        forward,
        plain=process != "without numba",
        refusals=("sdpa.* raises in bfloat16 on this",) if process == "narrow vectors" else (),
        process=process,
        dear=process == "read-only disk",  # each kernel is compiled there anew
    )
