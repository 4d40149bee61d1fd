"""Where the subject does what: the lines of its softmax, scale, mask, dropout and cache.

One call of it is watched. What it computes in compiled code, or in files that are not its own,
has no line.
"""

import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard_verify.blame import files_of, shown
from regard_verify.law import Sizes, Trial
from regard_verify.oracle import pattern
from regard_verify.subject.subject import Subject, SubjectError

PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum", "__rmatmul__")
SCALINGS = ("mul", "__mul__", "__rmul__", "__imul__", "mul_", "div", "__truediv__", "__itruediv__",
            "div_", "true_divide", "divide", "multiply")  # fmt: skip
FILLS = ("masked_fill", "masked_fill_", "where")
SUMS = ("add", "__add__", "__radd__", "__iadd__", "add_")
TRIANGLES = ("tril", "triu", "tril_", "triu_")
REPEATS = ("repeat_interleave", "repeat", "expand")
IDLE = "dropout that drops nothing"
FUSED = ("scaled_dot_product_attention", "multi_head_attention_forward")


@dataclass
class Step:
    """One operation: its name, the line, and its arguments in short.

    Attributes:
        plain: whether an argument is a number, or a tensor of one.
    """

    name: str
    line: str
    plain: bool


class Watch(TorchFunctionMode):
    """Records each torch operation that is called from a line of these files, also indirectly."""

    def __init__(self, files: Collection[str]) -> None:
        super().__init__()
        self.files, self.steps = files, list[Step]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in self.files:
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            line = shown(frame.f_code.co_filename, frame.f_lineno)
            plain = any(_is_number(x) for x in args)
            name = getattr(func, "__name__", "")
            if name == "dropout" and not _drops(*args, **(kwargs or {})):
                name = IDLE
            self.steps.append(Step(name, line, plain))
        return func(*args, **(kwargs or {}))


def _drops(_: Any = None, p: float = 0.5, training: bool = True, *rest: Any, **named: Any) -> bool:
    """Whether a call of dropout drops anything: of a module in eval mode it does not."""
    return bool(named.get("train", training)) and p > 0  # torch.dropout calls it train


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.ndim == 0)


def lines_of(subject: Subject) -> dict[str, str]:
    """By topic the line of the subject, as `FILE:NUMBER: CODE`, where it can be told."""
    files = files_of(subject.thing, subject.module)
    if not files:
        return {}
    plain, masked = (_watched(subject, files, mask) for mask in (False, True))
    return _topics(plain, masked, _cached(subject, files))


def _watched(subject: Subject, files: Collection[str], masked: bool) -> list[Step]:
    """The operations of a call, with a mask or causal if that is possible."""
    trial, length = Trial("lines"), 5
    keep = pattern(length, length, causal=True)[None, None]
    options: dict[str, Any] = {}
    if masked and subject.has.mask:
        options = {"keep": keep}
    elif masked:
        options = subject.causal_options() or {}
    if subject.module is None and subject.attend is not None:
        sizes = subject.fit(Sizes(1, 4, 2, length, length, 8, 8))
        run = partial(subject.run, *subject.inputs(sizes, trial), **options)
    elif subject.layer is not None:
        run = partial(subject.run_layer, subject.tokens(1, length, trial), **options)
    else:
        return []
    with Watch(files) as watch:
        try:
            run()
        except SubjectError:
            return watch.steps
    return watch.steps


def _cached(subject: Subject, files: Collection[str]) -> list[Step]:
    """The torch operations of a call that continues a cache."""
    if subject.stepper is None:
        return []
    first, second = subject.tokens(1, 4, Trial("lines")).split([3, 1], 1)
    try:
        _, state = subject.stepper.step(first, subject.stepper.new())
        with Watch(files) as watch:
            subject.stepper.step(second, state)
    except SubjectError:
        return []
    return watch.steps


def _topics(plain: list[Step], masked: list[Step], cached: list[Step]) -> dict[str, str]:
    steps = plain or masked
    names = [step.name for step in steps]
    at = next((i for i, name in enumerate(names) if name in ("softmax", *FUSED)), len(names))
    before = steps[:at]
    product = _last(before, PRODUCTS)
    fused = _last(steps, FUSED)
    scale = next((step.line for step in reversed(before) if _scales(step)), "")
    under = masked[: next((i for i, s in enumerate(masked) if s.name == "softmax"), len(masked))]
    found = {
        "softmax": _last(steps, ("softmax",)) or fused,
        "scale": scale or product or fused,
        "mask": _last(under, FILLS) or _last(_added(plain, under), SUMS) or _last(masked, FUSED),
        "causal": _last(under, TRIANGLES) or _last(under, FILLS) or _last(masked, FUSED),
        "dropout": _last(steps, ("dropout",)) or _last(steps, (IDLE,)) or fused,
        "sharing": _last(before, REPEATS) or fused,
        "cache": _last(cached, ("cat", "concat", "index_copy_", "__setitem__", "copy_")),
    }
    return {topic: line for topic, line in found.items() if line}


def _last(steps: list[Step], names: Collection[str]) -> str:
    return next((step.line for step in reversed(steps) if step.name in names), "")


def _scales(step: Step) -> bool:
    return step.name in SCALINGS and step.plain


def _added(plain: list[Step], masked: list[Step]) -> list[Step]:
    """The operations that a mask adds to a call."""
    known = {step.line for step in plain}
    return [step for step in masked if step.line not in known] or masked
