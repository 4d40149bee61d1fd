"""Laws of how a call runs: memory layout, mutation, dropout, dtypes, torch.compile."""

import copy
import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from regard_verify.law import (
    NotApplicable,
    Sizes,
    Trial,
    fail,
    law,
    require,
    tolerance,
    where_finite,
)
from regard_verify.laws.built import with_dropout
from regard_verify.laws.cases import ODD, random_mask
from regard_verify.oracle import bound
from regard_verify.subject.functions import FunctionCall, laid_out
from regard_verify.subject.modules import declares_dropout
from regard_verify.subject.subject import Call, Subject, SubjectError, called

CALLS = 6  # with the same shapes: enough to tell a compilation at every call from a few at first
SIZES = Sizes(2, 4, 4, 4, 4, 4, 4)


@law("bounded", "heads|layer", quick=False)
def compile_agree(subject: Subject, trial: Trial) -> None:
    """torch.compile changes nothing, not even where the length equals the number of heads."""
    target, given = _compilable(subject, trial)
    with torch.no_grad():
        base = target(*given)
        torch.compiler.reset()
        got = _calls(torch.compile(target, dynamic=False), given, 1)
    cause = "torch.compile gives other values for this code"
    require(f"{SIZES}, compiled", got, base, tolerance(base), cause)


@law("resource", "heads|layer", quick=False)
def compile_count(subject: Subject, trial: Trial) -> None:
    """It is compiled once for calls of the same shapes, and not again for each call."""
    graphs: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    target, given = _compilable(subject, trial)
    compiled = torch.compile(target, backend=counting)
    torch.compiler.reset()
    _calls(compiled, given, 1)
    first = len(graphs)
    _calls(compiled, given, CALLS - 1)
    if len(graphs) > 2 * first:
        fail(SIZES, f"graphs compiled in {CALLS} calls", f"at most {2 * first}", len(graphs),
             "something that the compiler guards on changes at every call")  # fmt: skip


def _calls(compiled: Any, given: tuple[Any, ...], times: int) -> Any:
    """The last output of some calls."""
    out = None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(times):
            try:
                out = compiled(*given)
            except Exception as error:
                raise NotApplicable(f"it was not compiled: {type(error).__name__}") from error
    return out


def _compilable(subject: Subject, trial: Trial) -> tuple[Any, tuple[Any, ...]]:
    """A function without options, and its arguments."""
    if not isinstance(subject.attend, FunctionCall):
        return subject.layer, (subject.tokens(2, 4, trial),)
    call = subject.attend
    if call.requires_a_mask():
        raise NotApplicable("it requires a mask")
    given = subject.inputs(subject.fit(SIZES), trial)
    options = call.arguments(given[0], given[1], {})

    def target(q: Tensor, k: Tensor, v: Tensor) -> Any:
        result = call.target(q, k, v, **options)
        return result[0] if isinstance(result, tuple) else result

    return target, tuple(laid_out(x, call.layout) for x in given)


def _strided(x: Tensor) -> dict[str, Tensor]:
    """The same values in other memory layouts."""
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


@law("bounded", "heads|layer")
def strides(subject: Subject, trial: Trial) -> None:
    """The memory layout of inputs does not matter: strides, offsets, a gradient that is
    expanded.
    """
    for call in subject.calls(ODD, trial):
        base = call()
        for name, x in call.given.items():
            for layout, other in _strided(x).items():
                assert torch.equal(other, x)
                with torch.no_grad():
                    got = call.target(**{**call.given, name: other})
                cause = "it reads memory as if it were contiguous"
                require(f"{ODD}, {name} {layout}", got, base, 1e-5, cause)
        _expanded_gradient(call)


def _expanded_gradient(call: Call) -> None:
    """Raise if the gradients depend on how the gradient of the output is laid out."""
    try:
        if not call.with_gradients()[0].requires_grad:
            return
    except SubjectError as error:
        if isinstance(error.__cause__, NotImplementedError):
            return  # it refuses inputs that require a gradient
        raise
    grads = []
    for expanded in (True, False):
        out, given = call.with_gradients()
        # The gradient of a sum is one value, expanded; backward(gradient) would import sympy.
        called((out if expanded else out * torch.ones_like(out)).sum().backward)
        grads.append([x.grad for x in given.values()])
    for name, one, other in zip(call.given, *grads, strict=True):
        if one is not None and other is not None:
            cause = "the backward pass reads its gradient as if it were contiguous"
            require(f"{ODD}, gradient expanded from one value, d{name}", one, other, 1e-5, cause)


@law("exact", "heads|layer")
def no_mutation(subject: Subject, trial: Trial) -> None:
    """No input is changed: queries, keys, values, x, mask."""
    for call in subject.calls(ODD, trial):
        ours = {n: x.clone() for n, x in call.given.items()}
        with torch.no_grad():
            call.target(**ours)
        for name, x in call.given.items():
            cause = f"it writes into {name}"
            require(f"{ODD}, {name} after the call", ours[name], x, 0.0, cause)
    if subject.attend is not None and subject.has.padding:
        sizes = subject.fit(ODD)
        q, k, v = subject.inputs(sizes, trial)
        mask = subject.form.encode(random_mask(subject, sizes, trial), (sizes.B, sizes.H), q.dtype)
        before = mask.clone()
        subject.run(q, k, v, raw=mask)
        if not torch.equal(mask, before):
            cause = "it writes into the mask"
            fail(f"{sizes}, the mask after the call", "", "unchanged", "changed", cause)


@law("exact", "heads|layer")
def no_alias(subject: Subject, trial: Trial) -> None:
    """The output shares no memory with the inputs or with a later output."""
    for sizes in (ODD, Sizes(1, 1, 1, 1, 1, 4, 4)):
        for call in subject.calls(sizes, trial):
            with torch.no_grad():
                first = call.target(**call.given)
                copied = first.clone()
                call.target(**{n: -x for n, x in call.given.items()})
            cause = "a second call wrote into the first output"
            require(f"{sizes}, after a second call", first, copied, 0.0, cause)
            for name, x in call.given.items():
                if first.numel() and first.untyped_storage().data_ptr() == x.data_ptr():
                    cause = f"the output is a view of {name}"
                    fail(sizes, "", "its own memory", f"memory of {name}", cause)


@law("exact", "heads|layer")
def eval_determinism(subject: Subject, trial: Trial) -> None:
    """In eval mode, or without dropout, two calls give the same bits."""
    for call in subject.calls(ODD, trial):
        base = call()
        torch.rand(3)  # changes the global random state
        cause = (
            "two calls in eval mode differ: dropout runs, something is stored from call to call, "
            "or memory is read before it is written"
        )
        require(ODD, call(), base, 0.0, cause)


@law("statistical", "dropout|module")
def dropout_stats(subject: Subject, trial: Trial) -> None:
    """Dropout drops the declared share of weights, scales the others by 1 / (1 - p), and runs again
    after eval.
    """
    if subject.module is not None:
        return _dropout_after_eval(subject, subject.module, trial)
    p, keys = 0.25, 64
    sizes = subject.fit(Sizes(2, 2, 2, keys, keys, 4, keys))
    if keys > sizes.V:
        raise NotApplicable("its values cannot be wide enough to read single weights")
    q, k, v = subject.inputs(sizes, trial)
    v = torch.eye(keys).expand(sizes.B, sizes.G, keys, keys)
    weights = subject.run(q, k, v)
    torch.manual_seed(trial.seed)
    out = subject.run(q, k, v, dropout=p)
    visible, label = weights > 0, f"{sizes}, p={p}"
    dropped = (out == 0) & visible
    count = int(visible.sum())
    share = float(dropped.sum()) / count
    spread = math.sqrt(p * (1 - p) / count)
    if not abs(share - p) < 5 * spread:
        fail(label, "share of dropped weights", f"{p} +- {5 * spread:.3f}", f"{share:.3f}",
             "another share of the weights is dropped")  # fmt: skip
    cause = "weights that are not dropped are not scaled by 1 / (1 - p)"
    require(label, out, torch.where(dropped, 0.0, weights / (1 - p)), 1e-5, cause)
    return None


def _dropout_after_eval(subject: Subject, module: nn.Module, trial: Trial) -> None:
    """On a copy with dropout, which was in eval mode: it runs in train mode."""
    twin = with_dropout(module, 0.5)
    call, x = subject.layer_of(twin), subject.tokens(2, 6, trial)
    try:
        with torch.no_grad():
            call(x.clone())
            twin.train()
            one, other = (call(x.clone()) for _ in range(2))
    except SubjectError as error:
        if isinstance(error.__cause__, (ValueError, NotImplementedError)):
            raise NotApplicable(f"it refuses dropout: {error}") from error
        raise
    if torch.equal(one, other):
        if not declares_dropout(module):
            raise NotApplicable("no dropout runs in a call in train mode")
        cause = "dropout does not run, or ended with the first eval"
        fail("train mode", "two calls", "different", "the same", cause)


@law("bounded", "heads|layer")
def dtype_bound(subject: Subject, trial: Trial) -> None:
    """In float32, bfloat16 and float16 the error is what rounding explains: 4 u vmax (1 + S)."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if subject.attend is not None and subject.module is None:
            for peak in (0.3, 2.0, 6.0):
                _heads_in(subject, trial, dtype, peak)
        if subject.layer is not None and subject.module is not None:
            _layer_in(subject, subject.module, trial, dtype)
    inner = getattr(subject.module, "inner", subject.module)
    tables = [n for n, x in inner.named_buffers() if x.is_complex()] if inner is not None else []
    if tables:
        subject.notes.append(
            f"Advice: .to(torch.bfloat16) breaks it: the imaginary part of {', '.join(tables)} is "
            "lost. Convert it by .bfloat16(), or keep cosines and sines."
        )


def _unless_refused(subject: Subject, call: Call, dtype: torch.dtype) -> Tensor | None:
    """The output; None, and a note, if the subject raises."""
    try:
        return call()
    except SubjectError as error:
        subject.notes.append(f"{dtype} is refused: {error}.")
        return None


def _heads_in(subject: Subject, trial: Trial, dtype: torch.dtype, peak: float) -> None:
    if subject.has.unknown_positions or subject.has.negative_weights:
        return
    sizes = subject.fit(Sizes(1, 4, 2, 33, 65, 16, 16))
    q, k, v = subject.inputs(sizes, trial, dtype=dtype, peak=peak)
    out = _unless_refused(subject, Call("", subject.attend, {"q": q, "k": k, "v": v}), dtype)
    if out is None:
        return
    right = subject.expected(q, k, v)
    attends = subject.visible(sizes.L, sizes.S).any(-1)[:, None]
    if out.dtype != dtype:
        subject.notes.append(f"From {dtype} it returns {out.dtype}.")
    cause = "more is lost than rounding inputs and output explains"
    expected = torch.where(attends, right.out, out)
    require(f"{sizes}, {dtype}", out.double(), expected, bound(right, v, dtype), cause)


def _layer_in(subject: Subject, module: nn.Module, trial: Trial, dtype: torch.dtype) -> None:
    x = subject.tokens(2, 9, trial)
    expected = subject.run_layer(x).double()
    twin = copy.deepcopy(module)
    # Not `.to(dtype)`, which drops the imaginary part of complex tables.
    convert = {torch.float32: twin.float, torch.bfloat16: twin.bfloat16}.get(dtype, twin.half)
    call = Call("", subject.layer_of(convert()), {"x": x.to(dtype)})
    out = _unless_refused(subject, call, dtype)
    if out is None:
        return
    size = float(torch.nan_to_num(expected).abs().max()) + 1e-3
    allowed = 64 * torch.finfo(dtype).eps * size
    cause = "the layer in this dtype is far from the layer in float32"
    expected = where_finite(expected, out.double())
    require(f"B=2 L=9, {dtype}", out.double(), expected, allowed, cause)


@law("bounded", "weights")
def needs_weights_agree(subject: Subject, trial: Trial) -> None:
    """The output is the same whether the weights are returned or not."""
    call = subject.calls(ODD, trial)[-1 if subject.module else 0]
    with torch.no_grad():
        with_weights, without = (call.target(**call.given, weights=x) for x in (True, False))
    cause = "returning the weights changes the output"
    require(f"{ODD}, weights", with_weights, without, 1e-5, cause)
