"""One cell of the matrix, run in this process: a caller, a call, a verdict."""

import warnings
import zlib
from dataclasses import dataclass

import torch

from callers import (
    callers_in_context,
    callers_with_gradients,
    callers_with_graphs,
    callers_with_masks,
    callers_with_objects,
    calls_of_attend,
    calls_of_layers,
    judging,
)
from callers.definition import Leaves
from callers.programs import Program
from callers.table import CALLERS, Caller, Found, Row

MODULES = (  # which enter their callers into the table
    callers_in_context,
    callers_with_gradients,
    callers_with_graphs,
    callers_with_masks,
    callers_with_objects,
)
CALLS: dict[str, Row] = {**calls_of_attend.rows(), **calls_of_layers.rows()}


@dataclass
class Verdict:
    """`kind` is "equal", "refused" or "wrong"; `words` say how."""

    kind: str
    words: str = ""


def run_cell(caller_name: str, call_name: str) -> Verdict:
    """Run a call under a caller and compare the result; global state is restored afterwards."""
    caller, program = CALLERS[caller_name], CALLS[call_name].build()
    torch.manual_seed(zlib.crc32(f"{caller_name}/{call_name}".encode()))
    before, world = _copies(program), _world()
    answer = _ask(caller, program)
    after = _world()
    _restore()
    wrong = _wrong(caller, program, answer)
    if world != after:
        wrong.append(f"the world is changed from {world} to {after}")
    if changed := _changed(program, before):
        wrong.append(f"changed in place: {changed}")
    if wrong:
        return Verdict("wrong", "; ".join(wrong))
    return Verdict("refused", str(answer)) if isinstance(answer, Exception) else Verdict("equal")


def _ask(caller: Caller, program: Program) -> list[Found] | Exception:
    """What the caller found, or what was raised."""
    try:
        with warnings.catch_warnings():
            if caller.plain:
                warnings.simplefilter("error")
            found = caller.run(program)
    except Exception as error:
        return error
    return found if isinstance(found, list) else [found]


def _wrong(caller: Caller, program: Program, answer: list[Found] | Exception) -> list[str]:
    """What is wrong with the answer, and with the cache after it."""
    if isinstance(answer, Exception):
        words = [judging.judge_error(caller, program, answer)]
    else:
        words = [each for found in answer for each in judging.judge(program, found)]
    return [each for each in (*words, _unsettled(program)) if each]


def _unsettled(program: Program) -> str | None:
    """Whether a cache holds more or fewer tokens than calls that succeeded have given it."""
    length = getattr(program.cache, "length", 0)
    if program.settled is None or length == program.settled:
        return None
    return f"the cache holds {length} tokens, {program.settled} were given in calls that succeeded"


def _copies(program: Program) -> Leaves:
    return {name: leaf.detach().clone() for name, leaf in program.leaves().items()}


def _changed(program: Program, before: Leaves) -> list[str]:
    """Inputs and parameters that are no longer what they were."""
    leaves = program.leaves().items()
    return [n for n, x in leaves if n in before and not x.is_meta and not _same(x, before[n])]


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and bool((x == y).all())


def _world() -> dict[str, object]:
    """What a call must leave as it was."""
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _restore() -> None:
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
