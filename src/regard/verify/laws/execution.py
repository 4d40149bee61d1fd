"""Laws of running: strides, copies, dice, threads of the same call, types and the compiler."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from regard.verify.law import NotApplicable, Sizes, Trial, compare, fail, insist, law
from regard.verify.laws.cases import some_keep
from regard.verify.oracle import bound
from regard.verify.subject.subject import Subject, SubjectError

ODD = Sizes(2, 2, 2, 5, 5, 4, 4)


def _strided(x: Tensor) -> dict[str, Tensor]:
    """The same numbers, laid out in memory in other ways."""
    last = x.ndim - 1
    found = {
        "transposed": x.transpose(1, last).contiguous().transpose(1, last),
        "every second of a longer one": torch.stack([x, x], -1).flatten(-2)[..., ::2],
        "with an offset": torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
        "batch innermost": x.movedim(0, -1).contiguous().movedim(-1, 0),
    }
    if x.ndim == 4:
        found["heads inside"] = x.transpose(1, 2).contiguous().transpose(1, 2)
    return found


@law(
    "How inputs lie in memory does not matter: strides, offsets, a gradient that is expanded.",
    "bounded",
    "strides that are assumed, a view where a copy was due",
    "heads|layer",
)
def strides(subject: Subject, trial: Trial) -> None:
    for call, given in subject.calls(ODD, trial):
        with torch.no_grad():
            base = call(**{n: x.clone() for n, x in given.items()})
            for name, x in given.items():
                for said, other in _strided(x).items():
                    assert torch.equal(other, x)
                    got = call(**{**given, name: other})
                    insist(compare(f"{ODD}, {name} {said}", got, base, 1e-5,
                                   "it reads memory as if it were contiguous"))  # fmt: skip
        _expanded_gradient(call, given)


def differentiable(call: Any, given: dict[str, Tensor]) -> bool:
    """Whether it does not refuse inputs that want a gradient."""
    try:
        out: Tensor = call(**{n: x.clone().requires_grad_() for n, x in given.items()})
    except SubjectError as error:
        if isinstance(error.__cause__, NotImplementedError):
            return False
        raise
    return out.requires_grad


def _expanded_gradient(call: Any, given: dict[str, Tensor]) -> None:
    if not differentiable(call, given):
        return
    grads = []
    for expanded in (True, False):
        ours = {n: x.clone().requires_grad_() for n, x in given.items()}
        out = call(**ours)
        if not out.requires_grad:
            return
        # a sum's gradient is one number expanded; backward(gradient) would import sympy
        (out if expanded else out * torch.ones_like(out)).sum().backward()
        grads.append([x.grad for x in ours.values()])
    for name, one, other in zip(given, *grads, strict=True):
        if one is not None and other is not None:
            insist(compare(f"{ODD}, gradient expanded from one number, d{name}", one, other, 1e-5,
                           "the backward reads its gradient as if it were contiguous"))  # fmt: skip


@law(
    "No input is changed: queries, keys, values, x, mask.",
    "exact",
    "in-place scaling, in-place edits of the mask",
    "heads|layer",
)
def no_mutation(subject: Subject, trial: Trial) -> None:
    for call, given in subject.calls(ODD, trial):
        ours = {n: x.clone() for n, x in given.items()}
        with torch.no_grad():
            call(**ours)
        for name, x in given.items():
            cause = f"it writes into {name}"
            insist(compare(f"{ODD}, {name} after the call", ours[name], x, 0.0, cause))
    if subject.attend is not None and subject.has & {"mask", "padding"}:
        sizes = subject.fit(ODD)
        q, k, v = subject.inputs(sizes, trial)
        mask = subject.form.encode(some_keep(subject, sizes, trial), (sizes.B, sizes.H), q.dtype)
        before = mask.clone()
        subject.run(q, k, v, raw=mask)
        if not torch.equal(mask, before):
            fail(f"{sizes}, the mask after the call", "", "unchanged", "changed",
                 "it writes into the mask")  # fmt: skip


@law(
    "The output shares no memory with the inputs: writing into it later changes nothing.",
    "exact",
    "an output that is a view of a value or a buffer",
    "heads|layer",
)
def no_alias(subject: Subject, trial: Trial) -> None:
    for sizes in (ODD, Sizes(1, 1, 1, 1, 1, 4, 4)):
        for call, given in subject.calls(sizes, trial):
            with torch.no_grad():
                first = call(**given)
                kept = first.clone()
                call(**{n: -x for n, x in given.items()})
            insist(compare(f"{sizes}, after a second call", first, kept, 0.0,
                           "a second call wrote into the first output"))  # fmt: skip
            for name, x in given.items():
                if first.numel() and first.untyped_storage().data_ptr() == x.data_ptr():
                    fail(sizes, "", "memory of its own", f"memory of {name}",
                         f"the output is a view of {name}")  # fmt: skip


def _with_dropout(subject: Subject, trial: Trial) -> tuple[Any, dict[str, Tensor]]:
    if "dropout" not in subject.has:
        raise NotApplicable("it drops nothing")
    calls = subject.calls(ODD, trial)
    return calls[-1] if subject.module is not None else calls[0]


@law(
    "In eval mode, or without dropout, two calls give the same bits.",
    "exact",
    "dropout that runs in eval mode",
    "heads|layer",
)
def eval_determinism(subject: Subject, trial: Trial) -> None:
    for call, given in subject.calls(ODD, trial):
        with torch.no_grad():
            base = call(**{n: x.clone() for n, x in given.items()})
            torch.rand(3)  # the global dice have moved on
            got = call(**{n: x.clone() for n, x in given.items()})
        if not torch.equal(torch.nan_to_num(base), torch.nan_to_num(got)):
            insist(compare(ODD, got, base, 0.0, "two calls in eval mode differ: dropout runs, or "
                           "memory is used before it is written"))  # fmt: skip


@law(
    "Dropout drops the share it says, what stays grows by 1 / (1 - p), and eval does not end it.",
    "statistical",
    "a wrong share or growth, dropout on scores, dropout that never comes back after eval",
    "dropout",
)
def dropout_stats(subject: Subject, trial: Trial) -> None:
    if subject.module is not None:
        return _sticky(subject, subject.module, trial)
    p, keys = 0.25, 64
    sizes = subject.fit(Sizes(2, 2, 2, keys, keys, 4, keys))
    if keys > sizes.V:
        raise NotApplicable("its values cannot be wide enough to read single weights")
    q, k, v = subject.inputs(sizes, trial)
    v = torch.eye(keys).expand(sizes.B, sizes.G, keys, keys)
    weights = subject.run(q, k, v)
    torch.manual_seed(trial.seed)
    out = subject.run(q, k, v, dropout=p)
    visible = weights > 0
    dropped = (out == 0) & visible
    count = int(visible.sum())
    share = float(dropped.sum()) / count
    spread = math.sqrt(p * (1 - p) / count)
    if not abs(share - p) < 5 * spread:
        fail(f"{sizes}, p={p}", "share of dropped weights", f"{p} +- {5 * spread:.3f}",
             f"{share:.3f}", "another share of the weights is dropped")  # fmt: skip
    alike = dropped.float().mean(-1).flatten()
    if bool(((alike == 0) | (alike == 1)).any()):
        fail(f"{sizes}, p={p}", "a query's weights", "dropped one by one", "dropped together",
             "whole rows are dropped")  # fmt: skip
    expected = torch.where(dropped, 0.0, weights / (1 - p))
    insist(compare(f"{sizes}, p={p}", out, expected, 1e-5,
                   "what is not dropped does not grow by 1 / (1 - p)"))  # fmt: skip
    return None


def _sticky(subject: Subject, module: nn.Module, trial: Trial) -> None:
    assert subject.layer is not None
    x = subject.tokens(2, 6, trial)

    def differ() -> bool:
        module.train()
        with torch.no_grad():
            assert subject.layer is not None
            return not torch.equal(subject.layer(x), subject.layer(x))

    try:
        if not differ():
            fail("train mode, after eval", "two calls", "different", "the same",
                 "dropout does not run, or ended with the first eval")  # fmt: skip
        module.eval()
        with torch.no_grad():
            subject.layer(x)
        if not differ():
            fail("train after eval", "two calls", "different", "the same",
                 "dropout was set to 0 in eval mode, and stays so")  # fmt: skip
    finally:
        module.eval()


@law(
    "The same call gives the same bits, time after time, backward too.",
    "exact",
    "races, memory read before it is written",
    "heads|layer",
)
def repeatability(subject: Subject, trial: Trial) -> None:
    times = 5 if trial.quick else 50
    for call, given in subject.calls(Sizes(2, 4, 4, 33, 33, 8, 8), trial):
        base: list[Tensor] | None = None
        wanted = differentiable(call, given)
        for turn in range(times):
            ours = {n: x.clone().requires_grad_(wanted) for n, x in given.items()}
            out = call(**ours)
            found = [out.detach().clone()]
            if out.requires_grad:
                out.sum().backward()
                found += [x.grad for x in ours.values() if x.grad is not None]
            base = base or found
            for one, other in zip(base, found, strict=True):
                insist(compare(f"call {turn}", torch.nan_to_num(other), torch.nan_to_num(one), 0.0,
                               "the same call gave other numbers"))  # fmt: skip


@law(
    "In float32, bfloat16 and float16 the error is what rounding explains: 4 u vmax (1 + S).",
    "bounded",
    "scores or weights kept in half precision, accumulation in half",
    "heads|layer",
)
def dtype_bound(subject: Subject, trial: Trial) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if subject.attend is not None and subject.module is None:
            for peak in (0.3, 2.0, 6.0):
                _half_heads(subject, trial, dtype, peak)
        if subject.layer is not None and subject.module is not None:
            _half_layer(subject, subject.module, trial, dtype)


def _half_heads(subject: Subject, trial: Trial, dtype: torch.dtype, peak: float) -> None:
    if "unknown positions" in subject.has:
        return
    sizes = subject.fit(Sizes(1, 4, 2, 33, 65, 16, 16))
    q, k, v = subject.inputs(sizes, trial, dtype=dtype, peak=peak)
    try:
        out = subject.run(q, k, v)
    except SubjectError as error:
        subject.notes.append(f"{dtype} is refused: {error}.")
        return
    judged = subject.judge(q, k, v)
    expected = torch.where(subject.visible(sizes.L, sizes.S).any(-1)[:, None], judged.out, out)
    if out.dtype != dtype:
        subject.notes.append(f"From {dtype} it gives {out.dtype}.")
    insist(compare(f"{sizes}, {dtype}", out.double(), expected, bound(judged, v, dtype),
                   "more is lost than rounding inputs and output explains"))  # fmt: skip


def _half_layer(subject: Subject, module: nn.Module, trial: Trial, dtype: torch.dtype) -> None:
    assert subject.layer is not None
    x = subject.tokens(2, 9, trial)
    expected = subject.through(x).double()
    twin = copy.deepcopy(module).to(dtype)
    call: Any = copy.copy(subject.layer)
    call.module = twin
    try:
        with torch.no_grad():
            out = call(x.to(dtype)).double()
    except SubjectError as error:
        subject.notes.append(f"{dtype} is refused: {error}.")
        return
    size = float(torch.nan_to_num(expected).abs().max()) + 1e-3
    allowed = 64 * torch.finfo(dtype).eps * size
    expected = torch.where(expected.isfinite(), expected, out)
    insist(compare(f"B=2 L=9, {dtype}", out, expected, allowed,
                   "the layer in this type is far from itself in float32"))  # fmt: skip


@law(
    "Under autocast to bfloat16 the result is the same, to bfloat16's rounding.",
    "bounded",
    "positions and tables that collapse under autocast",
    "heads|layer",
)
def autocast_invariance(subject: Subject, trial: Trial) -> None:
    for call, given in subject.calls(Sizes(1, 2, 2, 9, 9, 8, 8), trial):
        with torch.no_grad():
            base = call(**{n: x.clone() for n, x in given.items()}).double()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = call(**{n: x.clone() for n, x in given.items()}).double()
        size = float(torch.nan_to_num(base).abs().max())
        base = torch.where(base.isfinite(), base, got)
        insist(compare("L=9, autocast", got, base, 0.08 * (size + 1e-3),
                       "something that must not be rounded to bfloat16 is"))  # fmt: skip


@law(
    "Every way of asking gives one answer: with weights and without; and weights sum to 1.",
    "bounded",
    "a fast path that ignores an argument, weights returned after dropout",
    "weights",
)
def needs_weights_agree(subject: Subject, trial: Trial) -> None:
    name = subject.other.get("weights", "weights")
    for call, given in subject.calls(ODD, trial)[-1 if subject.module else 0 :][:1]:
        outs = []
        for wanted in (True, False):
            asked = {name: wanted} if subject.module else ({"weights": True} if wanted else {})
            with torch.no_grad():
                outs.append(call(**given, **asked))
        insist(compare(f"{ODD}, {name}", outs[0], outs[1], 1e-5,
                       "asking for the weights changes the output"))  # fmt: skip


LAWS = (
    strides,
    no_mutation,
    no_alias,
    eval_determinism,
    dropout_stats,
    repeatability,
    dtype_bound,
    autocast_invariance,
    needs_weights_agree,
)
