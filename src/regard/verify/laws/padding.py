"""Laws of what is hidden: queries that see nothing, padding, neighbours in the batch."""

from typing import Any

import torch
from torch import Tensor

from regard.verify.law import NotApplicable, Sizes, Trial, compare, fail, insist, law, worst
from regard.verify.laws.cases import causal_layer_call, some_keep
from regard.verify.subject.subject import Subject, SubjectError


def _blind(subject: Subject, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """A mask that leaves some queries blind, and which [B, 1, L, 1] those are."""
    keep = torch.ones(sizes.B, 1, sizes.L, sizes.S, dtype=torch.bool)
    if subject.form.shape in ("BS", "B11S"):
        keep[0] = False
    else:
        keep[..., 1, :] = False
    sees = subject.visible(sizes.L, sizes.S)[None, None] & keep
    return keep, ~sees.any(-1, keepdim=True)


@law(
    "A query that sees nothing reads what is declared, zeros if nothing is, and no other query "
    "notices.",
    "exact",
    "NaN from a softmax over nothing, the mean of hidden values",
    "mask|padding",
)
def fully_masked_forward(subject: Subject, trial: Trial) -> None:
    if subject.attend is None:
        return _blind_layer(subject, trial)
    asked = (Sizes(2, 2, 2, 3, 3, 4, 4), Sizes(2, 4, 1, 3, 3, 4, 4))
    for sizes in dict.fromkeys(subject.fit(each) for each in asked):
        _blind_query(subject, sizes, trial)
    return None


def _blind_query(subject: Subject, sizes: Sizes, trial: Trial) -> None:
    q, k, v = subject.inputs(sizes, trial)
    keep, blind = _blind(subject, sizes)
    out = subject.run(q, k, v, keep=keep)
    shape, row = f"{sizes}, query 1 sees nothing", blind.expand_as(out)
    if not bool(out[row].isfinite().all()):
        fail(shape, "query 1", "zeros", "NaN", "a softmax over nothing divides 0 by 0")
    expected = subject.judge(q, k, v, keep=keep).out
    cause = "a query that sees nothing must read " + (subject.conventions.fully_masked or "zeros")
    wrong = torch.where(row, expected, out.double())
    insist(compare(shape, out.double(), wrong, 1e-4, cause))
    base = torch.where(row, out, subject.run(q, k, v))
    cause = "a query that sees nothing changed another query's output"
    insist(compare(shape, out, base, 1e-5, cause))


def _blind_layer(subject: Subject, trial: Trial) -> None:
    x = subject.tokens(2, 4, trial)
    keep = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    keep[0] = False
    out = subject.through(x, keep=keep)
    if not bool(out.isfinite().all()):
        fail("B=2 L=4, row 0 sees nothing", "row 0", "finite numbers", "NaN",
             "a softmax over nothing divides 0 by 0")  # fmt: skip
    insist(compare("B=2 L=4, row 0 sees nothing", out[1:], subject.through(x)[1:], 1e-5,
                   "a row that sees nothing changed another"))  # fmt: skip


@law(
    "Where a query sees nothing, every gradient is finite, and its own is 0.",
    "exact",
    "NaN gradients that poison all weights from one padded row",
    "mask|padding",
)
def fully_masked_backward(subject: Subject, trial: Trial) -> None:
    if subject.attend is None:
        raise NotApplicable("its heads were not reached")
    sizes = subject.fit(Sizes(2, 2, 2, 3, 3, 4, 4))
    keep, blind = _blind(subject, sizes)
    given = [x.requires_grad_() for x in subject.inputs(sizes, trial)]
    out = subject.attend(*given, keep=keep)
    if not out.requires_grad:
        raise NotApplicable("its output has no gradient")
    out.square().sum().backward()
    for name, x in zip("qkv", given, strict=True):
        grad = x.grad
        if grad is not None and not bool(grad.isfinite().all()):
            bad = int((~grad.isfinite()).sum())
            fail(
                f"{sizes}, query 1 sees nothing",
                f"d{name}",
                "finite numbers",
                f"{bad} NaN or infinite",
                "0 times NaN in the backward of the softmax",
            )
    zeros = subject.conventions.fully_masked != "mean" and subject.sinks is None
    if zeros and given[0].grad is not None:
        found = torch.where(blind, given[0].grad, 0.0)
        insist(compare(f"{sizes}, query 1 sees nothing", found, torch.zeros_like(found), 0.0,
                       "a query that sees nothing has a gradient"))  # fmt: skip


@law(
    "NaN or infinity in a key or value that nobody may see harms nobody.",
    "exact",
    "0 times NaN: stale memory and padding that poison visible rows",
    "mask|padding",
    advised=True,
)
def masked_poison(subject: Subject, trial: Trial) -> None:
    if subject.attend is None:
        raise NotApplicable("its heads were not reached")
    sizes = subject.fit(Sizes(1, 1, 1, 4, 4, 4, 4))
    keep = torch.ones(sizes.B, 1, sizes.L, sizes.S, dtype=torch.bool)
    keep[..., 2] = False
    q, k, v = subject.inputs(sizes, trial)
    base = subject.run(q, k, v, keep=keep)
    for name, number in (("value", float("nan")), ("value", float("inf")), ("key", float("nan"))):
        keys, values = k.clone(), v.clone()
        (keys if name == "key" else values)[:, :, 2] = number
        got = subject.run(q, keys, values, keep=keep)
        insist(compare(f"{sizes}, {name} 2 hidden and {number}", got, base, 0.0,
                       "a weight of 0 was multiplied by it"))  # fmt: skip


@law(
    "What padded tokens hold changes nothing, to the last bit.",
    "exact",
    "a padding mask that is ignored, or hides with a number too small",
    "mask|padding",
)
def padding_content(subject: Subject, trial: Trial) -> None:
    for length in (3, 6):
        real = length - 1 - length // 4
        keep = (torch.arange(length) < real).expand(2, 1, length, length)
        if subject.attend is not None:
            sizes = subject.fit(Sizes(2, 2, 2, length, length, 4, 4))
            q, k, v = subject.inputs(sizes, trial)
            base = subject.run(q, k, v, keep=keep[: sizes.B])
            others = [torch.cat([x[:, :, :real], x[:, :, real:] * 50 + 9], 2) for x in (k, v)]
            got = subject.run(q, *others, keep=keep[: sizes.B])
            _untouched(sizes, got, base)
        if subject.layer is not None:
            x = subject.tokens(2, length, trial)
            base = subject.through(x, keep=keep)[:, :real]
            other = torch.cat([x[:, :real], x[:, real:] * 3 + 9], 1)
            got = subject.through(other, keep=keep)[:, :real]
            _untouched(f"B=2 L={length}", got, base)


def _untouched(shape: object, got: Tensor, base: Tensor) -> None:
    cause = "the content of padded, hidden tokens reached the output"
    insist(compare(f"{shape}, padded", torch.nan_to_num(got), torch.nan_to_num(base), 0.0, cause))


@law(
    "A sequence gives the same whether it is padded on the left, on the right, or not at all.",
    "bounded",
    "positions that count padding, one position vector for the whole batch",
    "layer",
)
def padding_side(subject: Subject, trial: Trial) -> None:
    if not subject.has & {"mask", "padding"}:
        raise NotApplicable("it takes no mask")
    if "unknown positions" in subject.has:
        raise NotApplicable("its positions may be absolute, and then padding moves them")
    real, pad = 4, 3
    x = subject.tokens(1, real, trial)
    causal = causal_layer_call(subject, real) or {}
    alone = subject.through(x, **causal).double()
    filler = subject.tokens(1, pad, trial)
    for side in ("right", "left"):
        whole = torch.cat([x, filler] if side == "right" else [filler, x], 1)
        first = 0 if side == "right" else pad
        shown = (torch.arange(real + pad) >= first) & (torch.arange(real + pad) < first + real)
        keep = shown.expand(1, 1, real + pad, real + pad)
        if causal.get("keep") is not None:
            keep = keep & subject.visible(real + pad, real + pad, causal=True)
        got = subject.through(whole, keep=keep)[:, first : first + real].double()
        cause = f"padding on the {side} moves positions, or is seen"
        allowed = 1e-3 * float(1 + alone.abs().max())
        insist(compare(f"L={real} and {pad} of padding", got, alone, allowed, cause))


@law(
    "A row of the batch is what it is alone: neighbours, their order and their number do not "
    "matter.",
    "exact",
    "samples that mix, a mask tiled over the batch, statistics shared by rows",
    "heads|layer",
)
def batch_invariance(subject: Subject, trial: Trial) -> None:
    for sizes in (Sizes(2, 2, 2, 3, 3, 4, 4), Sizes(5, 4, 4, 5, 5, 4, 4)):
        if subject.fixed.get("B") == 1:
            raise NotApplicable("it has no batch")
        for call, given in subject.calls(sizes, trial):
            with torch.no_grad():
                _neighbours(str(sizes), call, given)
        if subject.attend is not None and subject.has & {"mask", "padding"}:
            _masked_rows(subject, subject.fit(sizes), trial)


def _neighbours(shape: str, call: Any, given: dict[str, Tensor]) -> None:
    base = call(**{n: x.clone() for n, x in given.items()})
    others = {n: torch.cat([x[:1], x[1:] * 3 - 1]) for n, x in given.items()}
    cause = "what another row of the batch holds changed this one"
    insist(compare(shape, call(**others)[:1], base[:1], 0.0, cause))
    turned = call(**{n: x.flip(0).contiguous() for n, x in given.items()}).flip(0)
    allowed = 1e-4 * float(1 + torch.nan_to_num(base).abs().max())
    insist(compare(shape, turned, base, allowed, "the order of the batch's rows matters"))
    for row in range(base.shape[0]):
        alone = call(**{n: x[row : row + 1].clone() for n, x in given.items()})
        cause = f"row {row} alone is not what it is in the batch"
        insist(compare(shape, base[row : row + 1], alone, allowed, cause))


def _masked_rows(subject: Subject, sizes: Sizes, trial: Trial) -> None:
    keep = some_keep(subject, sizes, trial)
    q, k, v = subject.inputs(sizes, trial)
    base = subject.run(q, k, v, keep=keep)
    for row in range(sizes.B):
        one = slice(row, row + 1)
        alone = subject.run(q[one], k[one], v[one], keep=keep[one])
        alone = torch.where(alone.isnan(), base[one], alone)
        if worst(base[one], alone)[1] > 1e-4 * float(1 + v.abs().max()):
            insist(compare(f"{sizes}, each row its own mask", base[one], alone, 1e-4,
                           f"row {row} is masked by another row's mask"))  # fmt: skip


@law(
    "No queries, no keys, no batch, one channel: the output has its shape and nothing is raised.",
    "exact",
    "a crash or NaN where a sequence is empty",
    "heads|layer",
    advised=True,
)
def zero_sizes(subject: Subject, trial: Trial) -> None:
    sizes = Sizes(2, 2, 2, 3, 3, 4, 4)
    changes: list[dict[str, int]] = [{"D": 1, "V": 1}, {"L": 1, "S": 1}, {"B": 0}]
    if subject.attend is not None:
        if "cross" in subject.has:
            changes += [{"L": 0}, {"S": 0}]
        changes.append({"L": 0, "S": 0})
        for change in changes:
            _empty(subject, subject.fit(sizes._replace(**change)), trial)
    if subject.layer is not None:
        for batch, length in ((2, 1), (0, 3), (2, 0)):
            x = subject.tokens(batch, length, trial)
            try:
                out = subject.through(x)
            except SubjectError as error:
                fail(f"B={batch} L={length}", "", f"shape {list(x.shape)}", "an error", str(error))
            if not bool(out.isfinite().all()):
                fail(f"B={batch} L={length}", "", "finite numbers", "NaN", "an empty sum")


def _empty(subject: Subject, sizes: Sizes, trial: Trial) -> None:
    q, k, v = subject.inputs(sizes, trial)
    wanted = (sizes.B, sizes.H, sizes.L, sizes.V)
    try:
        out = subject.run(q, k, v)
    except SubjectError as error:
        fail(sizes, "", f"shape {list(wanted)}", "an error", str(error))
    if tuple(out.shape) != wanted or not bool(out.isfinite().all()):
        fail(sizes, "", f"finite numbers of shape {list(wanted)}",
             f"shape {list(out.shape)}, finite: {bool(out.isfinite().all())}", "an empty softmax",
        )  # fmt: skip


LAWS = (
    fully_masked_forward,
    fully_masked_backward,
    masked_poison,
    padding_content,
    padding_side,
    batch_invariance,
    zero_sizes,
)
