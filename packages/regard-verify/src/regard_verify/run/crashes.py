"""A subject that raises on every input that it documents: that is a broken law, and no riddle.

It is told apart from a subject that this suite does not know how to call: its forward takes x
alone, or q, k and v, everything else has a default, and no shape is free of an error in its code.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from regard_verify.blame import line_of
from regard_verify.law import Counterexample
from regard_verify.laws import LAWS
from regard_verify.report.report import Outcome, outcome
from regard_verify.run.in_process import defect_in, located
from regard_verify.subject.adapters import is_of
from regard_verify.subject.construct import build
from regard_verify.subject.conventions import Conventions
from regard_verify.subject.guesses import role_of
from regard_verify.subject.lookup import find, is_function
from regard_verify.subject.modules import inputs_of
from regard_verify.subject.signatures import parameters_of, required_of
from regard_verify.subject.subject import SubjectError, called

_OWN = (NameError, AttributeError, TypeError)  # they are raised whatever the shapes are
_WIDTHS = (4, 8, 16, 32, 64)
_LENGTHS = (3, 5, 7, 9, 13, 49, 196, 197)  # of windows and of images as well
LARGEST = 1024  # sizes of buffers and attributes that are tried as lengths


def crash(subject: Any, own: Conventions, error: Exception) -> Outcome | None:
    """The broken law `runs`, if the subject raises on every input; None if that is not known."""
    if not isinstance(error, SubjectError) or defect_in(error):
        return None
    try:
        target = _made(subject, own)
        raised = None if target is None else _on_every_input(target, own)
    except Exception:  # it could not even be built
        return None
    if raised is None:
        return None
    shape, first = raised
    example = Counterexample(
        shape, "", "an output", "an error, as for all other shapes", str(first)
    )
    return located(outcome(LAWS["runs"], "failed", example=example), first)


def _made(subject: Any, own: Conventions) -> Any:
    """The function or module; None if another kind is declared, or a library's adapter calls it."""
    target = find(subject).thing if isinstance(subject, str) else subject
    if own.kind not in (None, "module", "function") or is_of("transformers", target):
        return None
    return build(target, own).made.eval() if isinstance(target, type) else target


def _on_every_input(target: Any, own: Conventions) -> tuple[str, SubjectError] | None:
    """The first shape and error, if there is an error for all; None if one input works."""
    module = isinstance(target, nn.Module)
    count = 1 if module and inputs_of(target).order == "x" else 3
    if not (module or is_function(target)) or not _takes_only(target, count):
        return None
    found: list[tuple[str, SubjectError]] = []
    accepted = False
    for shape in _shapes(target, own, count):
        try:
            with torch.no_grad(), ExitStack() as stack:
                runs: list[str] = []
                for name, each in target.named_modules() if module else ():
                    if name and any(p.ndim > 1 for p in each.parameters(recurse=False)):
                        stack.callback(each.register_forward_hook(_note(runs, name)).remove)
                x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
                called(target, *(x.clone() for _ in range(count)))
            return None
        except SubjectError as error:
            if not _accidental(error):
                continue
            found.append((f"inputs of shape {list(shape)}", error))
            if runs and not accepted:
                accepted, found = True, [found[-1]]
    shapeless = bool(found) and all(isinstance(e.__cause__, _OWN) for _, e in found)
    return found[0] if found and (accepted or shapeless or not module) else None


def _accidental(error: SubjectError) -> bool:
    """Whether the subject's own code raised an error that is no refusal."""
    cause = error.__cause__
    kinds = (RuntimeError, *_OWN)
    accident = isinstance(cause, kinds) and not isinstance(cause, NotImplementedError)
    return accident and "NoneType" not in str(cause) and bool(line_of(error))


def _note(runs: list[str], name: str) -> Any:
    """A hook that notes that a submodule took its input."""
    return lambda module, given, out: runs.append(name)


def _takes_only(target: Any, count: int) -> bool:
    """Whether all arguments after the first `count` have a default."""
    forward = getattr(target, "forward", target)
    names = list(parameters_of(forward))
    return bool(names) and set(required_of(forward)) <= set(names[:count])


def _shapes(target: Any, own: Conventions, count: int) -> Iterator[tuple[int, ...]]:
    """Shapes of inputs, the usual ones first; where L = E wrong products exist as well."""
    widths, lengths = list(_WIDTHS), list(_LENGTHS)
    if isinstance(target, nn.Module):
        weights = [size for p in target.parameters() for size in p.shape[:2]]
        widths = list(dict.fromkeys([own.width or 0, *weights, *_WIDTHS]))[1 - bool(own.width) :]
        lengths += _stored_lengths(target)
    for width, length in itertools.product(widths[:12], dict.fromkeys(lengths)):
        if length != width:
            yield 2, length, width
    for width in widths[:12]:
        yield from ((9, width), (2, width, 9), (2, 4, 9, width), (2, 9, 5, width))
        if isinstance(target, nn.Module):
            yield from ((2, width, 5, 5), (2, 5, 5, width))  # images


def _stored_lengths(module: nn.Module) -> list[int]:
    """Lengths that a module may be made for: sizes of its tables, windows and their squares."""
    tables = list(module.buffers())
    for each in module.modules():
        if not isinstance(each, nn.Linear):
            tables += each.parameters(recurse=False)
    held = [size for table in tables for size in table.shape]
    for name, value in vars(module).items():
        if type(value) is int and (role_of(name) == "length" or "window" in name):
            held += [value, value * value]
    return [size for size in dict.fromkeys(held) if 1 < size <= LARGEST][:16]
